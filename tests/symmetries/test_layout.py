import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import onebasin
from onebasin.symmetries.gather import gather
from onebasin.symmetries.layout import Factor, Product, Sum, gather_indices, parse, write


@pytest.mark.parametrize(
    "text", ["h i", "o (h 49)", "(h q)+(h k) i", "(h (q+k+v)) i", "a+b+c", "", "layer1.0.conv1 (x:2 3)", "q+(k 2) a|(b 3)"]
)
def test_text_round_trip(text):
    assert write(parse(text)) == text


def test_parsed_structure():
    sizes = {"h": 2, "q": 3, "k": 5}
    (term,) = parse("(h (q + k))", sizes)
    assert term == Product((Factor(2, "h"), Sum((Factor(3, "q"), Factor(5, "k")))))
    assert term.size == 16


def test_a_switch():
    """new[i, j] = old[i, p[j]] beside the first segment of the first axis, and old[i, s[j]] beside the second."""
    sizes = {"q": 2, "k": 3, "a": 4, "b": 4}
    layout = parse("q+k a|b", sizes)
    assert layout[1].size == 4
    lookup = {"a": torch.tensor([1, 2, 3, 0]), "b": torch.tensor([3, 2, 1, 0]), "k": torch.tensor([2, 0, 1])}
    tensor = torch.arange(20).view(5, 4)
    for transposed in (False, True):
        if transposed:
            layout, tensor = parse("a|b q+k", sizes), tensor.T.contiguous()
        moved = gather(tensor, gather_indices(layout, lookup, dict.fromkeys(sizes, ())))
        moved, old = (moved.T, tensor.T) if transposed else (moved, tensor)
        assert torch.equal(moved[:2], old[:2][:, lookup["a"]])
        assert torch.equal(moved[2:], old[2:][lookup["k"]][:, lookup["b"]])


@pytest.mark.parametrize("text", ["a|b c", "q+k a|b|c", "q+k r+s a|b", "a|"])
def test_a_switch_needs_an_axis_that_decides(text):
    with pytest.raises(ValueError, match="cannot read the layout"):
        parse(text)


def test_a_switch_written_by_hand():
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    axes = {"in_proj_weight": "6+6+6 a|b|b", "out_proj.weight": "a 6", "out_proj.bias": "a"}
    symmetry = onebasin.Symmetry.from_axes(axes, ["a", "b"], model)
    assert symmetry.sizes == {"a": 6, "b": 6}


# To be imported at all, the kernels need Triton, and the adapter Avalanche.
FOREIGN = (".kernels", "_kernel", ".avalanche")
MODULES = [m.name for m in pkgutil.walk_packages(onebasin.__path__, "onebasin.") if not any(f in m.name for f in FOREIGN)]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
