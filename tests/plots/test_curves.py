"""Paths and histories."""

import math

import pytest

from onebasin.landscape.paths import LinearPath
from onebasin.plots import history_series, plot_history, plot_path, plot_paths
from tests.plots.drawing import PATH, draw


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
