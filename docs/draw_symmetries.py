"""Draw what a permutation, nested permutations and a rotation do to the two matrices on both sides of hidden units.

``python -m docs.make_gallery permutation nested rotation`` draws them. The library finds the symmetries of three tiny
networks and applies random elements of them; the numbers in the record say how far the outputs of the networks move.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import onebasin as ob
from onebasin.plots.style import COLORS

NUM_HEADS = HEAD_SIZE = 3
Unit = tuple[str, str]
"""A colour and a label, which a unit keeps wherever it goes."""


class Attention(nn.Module):
    """Self-attention with a matrix each for queries, keys, values and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, NUM_HEADS * HEAD_SIZE, bias=False) for _ in range(3))
        self.output = nn.Linear(NUM_HEADS * HEAD_SIZE, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, length, 5) to the same shape."""
        split = (*x.shape[:2], NUM_HEADS, HEAD_SIZE)
        heads = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.output(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def draw_permutation() -> tuple[Figure, dict[str, Any]]:
    """Rows of the first matrix and columns of the second change places together."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(100, 4)
    permutation = ob.symmetry(model, x).random(torch.Generator().manual_seed(8))
    moved = permutation.apply(model)
    units = list(zip(COLORS[:6], "123456", strict=True))
    names = ("first layer $W_1$", "second layer $W_2$", "$P\\,W_1$", "$W_2\\,P^T$")
    figure = draw_move(moved, model.state_dict(), ("0.weight", "2.weight"), units, permutation, names)
    return figure, {"largest change of an output": measure_change(model, moved, x)}


def draw_nested() -> tuple[Figure, dict[str, Any]]:
    """Heads change places as wholes, and units change places inside each head."""
    torch.manual_seed(3)
    model = Attention()
    x = torch.randn(20, 6, 5)
    symmetry = ob.symmetry(model, x)
    permutation = symmetry.random(torch.Generator().manual_seed(2))
    moved = permutation.apply(model)
    units = [(COLORS[head], f"{'ABC'[head]}{unit + 1}") for head in range(NUM_HEADS) for unit in range(HEAD_SIZE)]
    names = ("values $W_V$", "outputs $W_O$", "$P\\,W_V$", "$W_O\\,P^T$")
    figure = draw_move(
        moved, model.state_dict(), ("value.weight", "output.weight"), units, permutation, names, block=HEAD_SIZE
    )
    return figure, {"largest change of an output": measure_change(model, moved, x)}


def draw_rotation() -> tuple[Figure, dict[str, Any]]:
    """Every entry of the writer and of the reader changes; their product does not."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.RMSNorm(6, elementwise_affine=False), nn.Linear(6, 3, bias=False))
    x = torch.randn(100, 4)
    transform = ob.Transform.random(ob.symmetry(model, x, kinds="all"), torch.Generator().manual_seed(1))
    moved = transform.apply(model)
    states = [{key: value.detach() for key, value in state.items()} for state in (model.state_dict(), moved)]
    rows = [(state["0.weight"], state["2.weight"], state["2.weight"] @ state["0.weight"]) for state in states]
    figure = Figure(figsize=(9, 2.3), layout="constrained")
    panels = figure.subplots(1, 7, width_ratios=(4, 6, 4, 2, 4, 6, 4))
    draw_arrow(panels[3])
    titles = ("writer $W$", "reader $R$", "product $R\\,W$", "$O\\,W$", "$R\\,O^T$", "$R\\,O^T O\\,W$")
    drawn = zip([*panels[:3], *panels[4:]], rows[0] + rows[1], rows[1] + rows[0], titles, strict=True)
    for axes, matrix, other, title in drawn:
        limit = float(torch.maximum(matrix.abs(), other.abs()).max())  # one scale before and after
        axes.imshow(matrix.numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
        clear(axes, title)
    changes = [round_tiny(float((after - before).abs().max())) for before, after in zip(*rows, strict=True)]
    return figure, {
        "largest change of an output": measure_change(model, moved, x),
        **dict(zip(("of an entry of the writer", "of the reader", "of their product"), changes, strict=True)),
    }


def draw_move(
    moved: dict[str, Tensor],
    state: dict[str, Tensor],
    keys: tuple[str, str],
    units: Sequence[Unit],
    permutation: ob.Permutation,
    names: Sequence[str],
    block: int = 0,
) -> Figure:
    """The two matrices around hidden units before and after; a unit is a row of the first and a column of the second."""
    order = permutation.move(torch.arange(len(units)), permutation.symmetry.layouts[keys[0]][:1]).tolist()
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    columns = state[keys[0]].shape[1]
    panels = figure.subplots(1, 5, width_ratios=(columns, len(units), 2, columns, len(units)))
    draw_pair(panels[:2], [state[key] for key in keys], units, names[:2], block)
    draw_pair(panels[3:], [moved[key] for key in keys], [units[index] for index in order], names[2:], block)
    draw_arrow(panels[2])
    return figure


def draw_arrow(axes: Axes) -> None:
    """From before to after."""
    axes.axis("off")
    axes.annotate("", (1, 0.5), (0, 0.5), xycoords="axes fraction", arrowprops={"arrowstyle": "->", "lw": 1.6})


def draw_pair(
    panels: Sequence[Axes], matrices: list[Tensor], units: Sequence[Unit], names: Sequence[str], block: int = 0
) -> None:
    """A matrix whose rows are units beside one whose columns are; lighter entries are closer to zero."""
    colors = np.array([to_rgb(color) for color, _ in units])  # (units, 3)
    labels = [label for _, label in units]
    for axes, matrix, name, axis in zip(panels, matrices, names, (0, 1), strict=True):
        size = matrix.detach().abs().numpy()
        strength = (0.15 + 0.85 * size / size.max())[..., None]
        shades = colors[:, None] if axis == 0 else colors[None]
        axes.imshow((1 - strength * (1 - shades)).clip(0, 1))
        clear(axes, name)
        ticks = (range(len(labels)), labels)
        if axis == 0:
            axes.set_yticks(*ticks)
        else:
            axes.set_xticks(*ticks)
        axes.tick_params(length=0, labelsize=9)
        for start in range(0, len(units), block or len(units)):
            extent = (matrix.shape[1 - axis], block) if block else (0, 0)
            place = (-0.5, start - 0.5) if axis == 0 else (start - 0.5, -0.5)
            width, height = extent if axis == 0 else extent[::-1]
            axes.add_patch(Rectangle(place, width, height, fill=False, lw=1.4, clip_on=False))


def clear(axes: Axes, title: str) -> None:
    """No ticks, a thin frame and a title."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color="#bbbbbb", linewidth=0.6)
    axes.set_title(title, fontsize=10)


def measure_change(model: nn.Module, moved: dict[str, Tensor], x: Tensor) -> float:
    """The largest difference of an output after the move."""
    with torch.no_grad():
        return round_tiny(float((torch.func.functional_call(model, moved, x) - model(x)).abs().max()))


def round_tiny(value: float) -> float:
    """Two digits."""
    return float(f"{value:.1e}")


DRAWINGS: dict[str, Callable[[], tuple[Figure, dict[str, Any]]]] = {
    "permutation": draw_permutation,
    "nested": draw_nested,
    "rotation": draw_rotation,
}
