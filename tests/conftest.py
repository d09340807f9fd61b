"""For all tests: one thread, torchvision on CPU torch, and no figure left open."""

import sys

import pytest
import torch

from onebasin.cli.torchvision_operators import declare_missing_operators

torch.set_num_threads(1)  # networks this small gain nothing from threads, and lose much where the cores are shared
declare_missing_operators()


@pytest.fixture(autouse=True)
def no_figure_is_left_open():
    """Matplotlib warns of more than twenty, and pages and examples leave theirs open."""
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
