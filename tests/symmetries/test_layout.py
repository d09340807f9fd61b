import doctest
import importlib
import pkgutil

import pytest

import onebasin
from onebasin.symmetries.layout import Factor, Product, Sum, parse, write


@pytest.mark.parametrize(
    "text", ["h i", "o (h 49)", "(h q)+(h k) i", "(h (q+k+v)) i", "a+b+c", "", "layer1.0.conv1 (x:2 3)"]
)
def test_text_round_trip(text):
    assert write(parse(text)) == text


def test_parsed_structure():
    sizes = {"h": 2, "q": 3, "k": 5}
    (term,) = parse("(h (q + k))", sizes)
    assert term == Product((Factor(2, "h"), Sum((Factor(3, "q"), Factor(5, "k")))))
    assert term.size == 16


# To be imported at all, the kernels need Triton, and the adapter Avalanche.
FOREIGN = (".kernels", "_kernel", ".avalanche")
MODULES = [m.name for m in pkgutil.walk_packages(onebasin.__path__, "onebasin.") if not any(f in m.name for f in FOREIGN)]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
