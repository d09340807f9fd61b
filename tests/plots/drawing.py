"""A path and a plane to draw."""

from onebasin.landscape.paths import LinearPath, Plane

PATH = LinearPath([0, 0.5, 1], {"loss": [1.0, 3.0, 2.0], "accuracy": [0.9, 0.5, 0.8]})


GRID = [[(x - 1) ** 2 + y**2 for x in range(4)] for y in range(3)]


PLANE = Plane([0, 1, 2, 3], [0, 1, 2], ((0, 0), (3, 0), (1, 2)), {"loss": GRID})


def draw(ax) -> None:
    ax.figure.canvas.draw()  # most mistakes show here only
