"""Tensors multiplied by scales, in layouts that are not plain."""

import torch

from onebasin.symmetries import Group, Power, Scale
from onebasin.symmetries.layout import parse
from onebasin.symmetries.scales import ScaledTensors

SIZES = {"h": 2, "d": 3, "a": 2, "b": 4}
S = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def scaled(pattern, power, group, logarithm, shape, offset=None):
    scale = Scale("s", group.name, {"w": (power,)}, {} if offset is None else {"w": offset})
    tensors = ScaledTensors({"s": scale}, {group.name: group}, {"w": parse(pattern, SIZES)}, SIZES)
    return tensors.scale("w", torch.ones(shape), {"s": logarithm})


def test_a_plain_axis_and_a_power():
    found = scaled("b i", Power(0, 0, -1), Group("b", 4), torch.arange(1.0, 5.0).log(), (4, 3))
    torch.testing.assert_close(found, (1 / torch.arange(1.0, 5.0)).view(4, 1).expand(4, 3))


def test_blocks_of_fixed_entries():
    found = scaled("o (b 5)", Power(1, 0, 1), Group("b", 4), torch.arange(1.0, 5.0).log(), (2, 20))
    torch.testing.assert_close(found, torch.arange(1.0, 5.0).repeat_interleave(5).expand(2, 20))


def test_a_segment():
    found = scaled("a+b+a", Power(0, 1, 1), Group("a", 2), torch.tensor([2.0, 3.0]).log(), (8,))
    torch.testing.assert_close(found, torch.tensor([1.0, 1, 1, 1, 1, 1, 2, 3]))


def test_a_family_beside_its_parent_and_across_axes():
    family = Group("d", 3, ("h",))
    torch.testing.assert_close(scaled("(h d)", Power(0, 0, 1), family, S.log(), (6,)), S.flatten())
    torch.testing.assert_close(scaled("h d", Power(1, 0, 1), family, S.log(), (2, 3)), S)
    torch.testing.assert_close(scaled("d (5 h)", Power(0, 0, 1), family, S.log(), (3, 10)), S.T.repeat(1, 5))


def test_an_offset_and_a_gradient():
    logarithm = torch.zeros(4, requires_grad=True)
    found = scaled("b", Power(0, 0, 2), Group("b", 4), logarithm, (4,), offset=0.5)
    torch.testing.assert_close(found, torch.ones(4))
    found.sum().backward()
    torch.testing.assert_close(logarithm.grad, torch.full((4,), 3.0))
