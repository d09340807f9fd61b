"""Blocks of networks of different depth are found, and shown under each other's names."""

import torch
from torch import nn

from onebasin.lineage.layer_stacks import find_stack
from onebasin.tensors.states import read_state


def deep(num_blocks: int, width: int = 3) -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks)))
    return nn.ModuleDict({"embed": nn.Linear(2, 3), "blocks": blocks, "head": nn.Linear(3, 2)})


def test_every_block_is_seen_beside_every_other():
    few, many = read_state(deep(2)), read_state(deep(3))
    stack = find_stack(few, many)
    assert stack is not None
    assert (stack.prefix, stack.few, stack.many) == ("blocks.", (0, 1), (0, 1, 2))
    pairs = {(key, stack.rename(key, shift)) for shift in range(3) for key in few.shapes if key.startswith("blocks")}
    assert len(pairs) == 2 * 3 * 2
    view = stack.view(few, many, 2)
    assert view.keys() == few.keys()
    assert torch.equal(view["blocks.0.weight"], many["blocks.2.weight"])
    assert torch.equal(view["blocks.1.weight"], many["blocks.0.weight"])
    assert torch.equal(view["head.weight"], many["head.weight"])


def test_the_order_of_the_networks_does_not_matter():
    assert find_stack(read_state(deep(3)), read_state(deep(2))) == find_stack(read_state(deep(2)), read_state(deep(3)))


def test_networks_that_differ_otherwise_have_no_stack():
    assert find_stack(read_state(deep(2)), read_state(deep(2))) is None
    assert find_stack(read_state(deep(2)), read_state(nn.Linear(2, 2))) is None
    other = {**read_state(deep(3)), "more": torch.zeros(2)}
    assert find_stack(read_state(deep(2)), read_state(other)) is None
    uneven = {**read_state(deep(3)), "blocks.2.weight": torch.zeros(4, 4)}
    assert find_stack(read_state(deep(2)), read_state(uneven)) is None
