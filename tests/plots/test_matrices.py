"""Planes, permutations and plans."""

import math

import pytest
import torch

from onebasin.landscape.paths import Plane
from onebasin.plots import plot_permutation, plot_plane
from tests.plots.drawing import GRID, PLANE, draw


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
