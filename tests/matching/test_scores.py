"""Inner products of units at any place of a layout, against loops."""

import torch

import onebasin as ob
from onebasin.matching.scores import has_siblings, innermost_axes, member_blocks, products, reduce_to

STATE = {"heads": torch.randn(6, 5, dtype=torch.float64), "bias": torch.randn(2, dtype=torch.float64)}
SYMMETRY = ob.Symmetry.from_axes({"heads": "(h d) i", "bias": "h"}, ["h", "d[h]"], STATE)


def test_blocks_have_members_as_single_axes():
    (block,) = member_blocks(SYMMETRY.layouts["heads"], SYMMETRY.groups, STATE["heads"])
    assert block.labels[:2] == ["h", "d"]
    assert block.tensors[0].shape == (2, 3, 5)
    assert not list(member_blocks(SYMMETRY.layouts["bias"], {"d": SYMMETRY.groups["d"]}, STATE["bias"]))


def test_a_parent_counts_through_its_children():
    (block,) = member_blocks(SYMMETRY.layouts["heads"], SYMMETRY.groups, STATE["heads"])
    assert innermost_axes(SYMMETRY.groups, block) == {1: [0, 1]}
    (block,) = member_blocks(SYMMETRY.layouts["bias"], SYMMETRY.groups, STATE["bias"])
    assert innermost_axes(SYMMETRY.groups, block) == {0: [0]}


def test_members_of_one_parent_are_siblings_where_they_meet():
    axes = {"gains": "h", "values": "(h d) i", "outputs": "i (h q d)", "beside": "(h q)+(h d) i"}
    shapes = {"gains": (2,), "values": (6, 5), "outputs": (5, 24), "beside": (14, 5)}
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    symmetry = ob.Symmetry.from_axes(axes, ["h", "q[h]", "d[h]"], state)
    assert [has_siblings(symmetry, key, symmetry.groups) for key in axes] == [False, False, True, False]
    assert not has_siblings(symmetry, "outputs", {"q": symmetry.groups["q"]})


def test_products_are_those_of_loops():
    target, source = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    found = products(SYMMETRY, target, source, [0, 1], ["h", "d", None])
    assert found.shape == (2, 2, 3, 3)
    for h, j, d, e in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        torch.testing.assert_close(found[h, j, d, e], target[h, d] @ source[j, e])


def test_the_axes_that_are_kept_come_in_the_order_given():
    tensor = torch.randn(2, 3, 4)
    torch.testing.assert_close(reduce_to(tensor, [2, 0]), tensor.sum(1).T)
    torch.testing.assert_close(reduce_to(tensor, [1], torch.amax), tensor.amax((0, 2)))
    assert torch.equal(reduce_to(tensor, [2, 1, 0]), tensor.permute(2, 1, 0))
