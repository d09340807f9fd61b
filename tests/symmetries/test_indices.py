"""Indices of layouts that depend on other axes; plain ones are tested with the gathering of entries."""

import torch

from onebasin.symmetries.gather import gather
from onebasin.symmetries.indices import coordinate, gather_indices
from onebasin.symmetries.layout import parse


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


def test_a_family_reads_the_coordinate_of_its_parent_from_another_axis():
    """new[h, d] = old[s[h], p[h][d]]."""
    layout = parse("h d", {"h": 2, "d": 3})
    lookup = {"h": torch.tensor([1, 0]), "d": torch.tensor([[1, 2, 0], [0, 2, 1]])}
    tensor = torch.arange(6).view(2, 3)
    moved = gather(tensor, gather_indices(layout, lookup, {"h": (), "d": ("h",)}))
    assert moved.tolist() == [[4, 5, 3], [0, 2, 1]]


def test_coordinates_of_a_factor():
    (term,) = parse("(h d)", {"h": 2, "d": 3})
    assert coordinate(term, "h", torch.arange(6)).tolist() == [0, 0, 0, 1, 1, 1]
    assert coordinate(term, "d", torch.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]
