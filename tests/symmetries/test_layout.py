import doctest
import importlib
import pkgutil

import pytest
from torch import nn

import onebasin
from onebasin.symmetries.layout import Factor, Product, Sum, parse, write


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
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
