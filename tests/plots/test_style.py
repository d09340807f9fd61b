"""Colours, dashes and empty axes."""

import builtins

import pytest
import torch

from onebasin.plots import plot_permutation
from onebasin.plots.style import COLORS, GREY, line_style, prepare_axes
from tests.plots.drawing import PATH, PLANE


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


def test_the_first_of_several_is_grey_and_the_others_have_colours():
    assert line_style(0, 1)["color"] == COLORS[0]
    assert [line_style(number, 3)["color"] for number in range(3)] == [GREY, *COLORS[:2]]
    assert len({str(line_style(number, 4)["linestyle"]) for number in range(4)}) == 4


def test_axes_are_new_or_those_that_were_given(pyplot):
    _, given = pyplot.subplots()
    assert prepare_axes(given) is given
    assert not given.spines["top"].get_visible()
    assert given.spines["left"].get_visible()
    assert prepare_axes(None) is not given
