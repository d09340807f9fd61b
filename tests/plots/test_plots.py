import builtins
import math

import pytest
import torch

from onebasin.landscape.paths import LinearPath, Plane
from onebasin.plots import history_series, plot_history, plot_path, plot_paths, plot_permutation, plot_plane

PATH = LinearPath([0, 0.5, 1], {"loss": [1.0, 3.0, 2.0], "accuracy": [0.9, 0.5, 0.8]})
GRID = [[(x - 1) ** 2 + y**2 for x in range(4)] for y in range(3)]
PLANE = Plane([0, 1, 2, 3], [0, 1, 2], ((0, 0), (3, 0), (1, 2)), {"loss": GRID})


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def draw(ax) -> None:
    ax.figure.canvas.draw()  # most mistakes show here only


def test_a_path(pyplot):
    ax = PATH.plot(label="naive")
    draw(ax)
    curve, chord, _ = ax.lines
    assert curve.get_ydata().tolist() == [1, 3, 2]
    assert curve.get_label() == "naive"
    assert list(chord.get_ydata()) == [1, 2]
    assert ax.get_ylabel() == "loss"


def test_another_metric_on_given_axes(pyplot):
    _, ax = pyplot.subplots()
    assert plot_path(PATH, ax, metric="accuracy", color="red") is ax
    draw(ax)
    assert ax.get_ylabel() == "accuracy"
    assert {line.get_color() for line in ax.lines} == {"red"}
    assert len(pyplot.get_fignums()) == 1
    with pytest.raises(ValueError, match=r"no metric 'f1', it has \['loss', 'accuracy'\]"):
        plot_path(PATH, metric="f1")


@pytest.mark.parametrize("given", [True, False])
def test_several_paths_have_a_legend_and_their_own_looks(pyplot, given):
    names = [f"method {i}" for i in range(9)]
    ax = plot_paths(dict.fromkeys(names, PATH), pyplot.subplots()[1] if given else None)
    draw(ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == names
    curves = [line for line in ax.lines if line.get_label() in names]
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in curves[:8]}) == 8


def test_one_path_among_several_is_blue_and_none_is_refused(pyplot):
    assert plot_paths({"only": PATH}).lines[0].get_color() == plot_path(PATH).lines[0].get_color()
    with pytest.raises(ValueError, match="no path"):
        plot_paths({})


def test_nan_leaves_a_gap(pyplot):
    draw(LinearPath([0, 0.5, 1], {"loss": [1.0, math.nan, 2.0]}).plot())


def test_a_plane_shows_its_models(pyplot):
    ax = PLANE.plot()
    draw(ax)
    assert [text.get_text() for text in ax.texts] == ["A", "B", "C"]
    assert ax.get_aspect() == 1
    draw(plot_plane(PLANE, pyplot.subplots()[1]))


@pytest.mark.parametrize("value", [0.0, 2.5, -3.0])
def test_a_flat_plane_and_holes(pyplot, value):
    flat = [[value] * 4 for _ in range(3)]
    draw(plot_plane(Plane(PLANE.x, PLANE.y, PLANE.points, {"loss": flat})))
    holes = [row.copy() for row in GRID]
    holes[0][0], holes[2][3] = math.nan, math.inf
    draw(plot_plane(Plane(PLANE.x, PLANE.y, PLANE.points, {"loss": holes})))
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_plane(Plane(PLANE.x, PLANE.y, PLANE.points, {"loss": [[math.nan] * 4] * 3}))


def test_an_index_is_drawn_as_marks(pyplot):
    ax = plot_permutation(torch.tensor([2, 0, 1]))
    draw(ax)
    (marks,) = ax.lines
    assert marks.get_xdata().tolist() == [2, 0, 1]
    assert marks.get_ydata().tolist() == [0, 1, 2]
    assert ax.get_ylim() == (2.5, -0.5)


@pytest.mark.parametrize("size", [1, 5, 256, 300])
def test_every_entry_of_a_large_plan_is_seen(pyplot, size):
    plan = torch.eye(size, requires_grad=True).flip(0).bfloat16()
    ax = plot_permutation(plan)
    draw(ax)
    picture = ax.images[0].get_array()
    assert picture.shape == ((size, size) if size <= 256 else (150, 150))
    assert (picture.max(axis=0) == 1).all()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, 3, 3), torch.zeros(2, 2).long()])
def test_what_is_not_one_permutation_is_refused(pyplot, wrong):
    with pytest.raises(ValueError, match=r"an index tensor \(n,\) or a plan \(n, n\)"):
        plot_permutation(wrong)


def test_a_descent_and_its_polish(pyplot):
    history = [{"step": i, "soft": 3.0 - i, "hard": 5.0 - i, "gap": 2.0, "best": 5.0 - i} for i in range(3)]
    ax = plot_history([*history, {"step": 2, "polish": 2.5, "best": 2.5}])
    draw(ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["soft plan", "hardened", "best so far", "polished"]
    assert {line.get_label(): list(line.get_xdata()) for line in ax.lines}["best so far"] == [1, 2, 3, 3]
    assert ax.get_ylabel() == "cost"
    assert ax.get_xlabel() == "step"


def test_sweeps_have_an_inner_product(pyplot):
    ax = plot_history([{"sweep": i, "moved": 1, "inner": float(i)} for i in range(4)], pyplot.subplots()[1])
    draw(ax)
    assert ax.get_xlabel() == "sweep"
    assert ax.get_ylabel() == "inner product of the weights"
    assert list(ax.lines[0].get_ydata()) == [0, 1, 2, 3]


def test_a_method_without_steps_has_no_curve(pyplot):
    assert history_series([{"batches": 8, "sites": 4}]) == {}
    with pytest.raises(ValueError, match="no curve"):
        plot_history([])


@pytest.mark.parametrize("draw_it", [PATH.plot, PLANE.plot, lambda: plot_permutation(torch.arange(3))])
def test_without_matplotlib_the_extra_is_named(monkeypatch, draw_it):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'onebasin\[plots\]'"):
        draw_it()
