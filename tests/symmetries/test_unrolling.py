"""Taking tensors apart and putting them together again changes nothing."""

import pytest
import torch

from onebasin.symmetries.layout import parse
from onebasin.symmetries.unrolling import roll, unroll

SIZES = {"h": 2, "d": 3, "e": 4}


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("h d", [["h", "d"]]),
        ("(h d) 5", [["h", "d", None]]),
        ("(h d)+(h e) 5", [["h", "d", None], ["h", "e", None]]),
        ("(h (d+e)) 5", [["h", "d", None], ["h", "e", None]]),
        ("3+5 (2 7)", [[None, None]]),
        ("3+5 d|(d 1)", [[None, "d"], [None, "d", None]]),
        ("(h d) 3+5 e|e", [["h", "d", None, "e"]] * 2),
    ],
)
def test_there_and_back(pattern, labels):
    layout = parse(pattern, SIZES)
    tensor = torch.arange(torch.Size([term.size for term in layout]).numel()).view([term.size for term in layout])
    blocks = list(unroll(layout, SIZES, tensor))
    assert [block.labels for block in blocks] == labels
    assert all(list(block.tensors[0].shape) == block.sizes for block in blocks)
    assert torch.equal(roll(layout, SIZES, (block.tensors[0] for block in blocks)), tensor)


def test_parents_of_the_same_axis_come_first():
    (block,) = unroll(parse("(h d) (h e)", SIZES), SIZES, torch.zeros(6, 8))
    assert block.origins == [0, 0, 1, 1]
    assert block.parent_axes(1, ("h",)) == [0]
    assert block.parent_axes(3, ("h",)) == [2]
