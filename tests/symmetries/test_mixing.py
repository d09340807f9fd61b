"""Soft permutations of tensors: hard ones at permutation matrices, and the same together as alone."""

import pytest
import torch
from hypothesis import given, settings

import onebasin as ob
from onebasin.relaxation.plans import plans_of
from onebasin.symmetries import mixing
from onebasin.symmetries.mixing import mix, mix_all
from tests.symmetries.axis_patterns import AXES, FREE, states


@given(states())
@settings(max_examples=40, deadline=None)
def test_soft_with_permutation_matrices_is_hard(drawn):
    state, generator = drawn
    symmetry = ob.Symmetry.from_axes(AXES, FREE, state)
    permutation = symmetry.random(generator)
    plans = plans_of(permutation, torch.float64)
    moved = permutation.apply(state)
    together = mix_all(state, symmetry.layouts, plans, symmetry.parents)
    for key, layout in symmetry.layouts.items():
        torch.testing.assert_close(mix(state[key], layout, plans, symmetry.parents), moved[key])
        torch.testing.assert_close(together[key], moved[key])


@pytest.mark.parametrize("join", [0, 1000])
def test_tensors_mixed_together_are_those_mixed_alone(join, monkeypatch):
    """Any plans, not permutations only; vectors of one group, of two, and in another type; a batch of tensors of one shape
    that move by other groups or along other axes; a group on two axes; one that stays. Side by side, as on CUDA, and not."""
    monkeypatch.setitem(mixing._JOINED_NUMEL, "cpu", join)
    torch.manual_seed(0)
    axes = {"w": "a b", "conv": "b a 3", "one": "a", "two": "a", "three": "b", "stays": "i"}
    axes |= {"v": "c b", "rows": "c j", "kernel": "b c 3", "square": "b b"}
    shapes = {"w": (5, 4), "conv": (4, 5, 3), "one": (5,), "two": (5,), "three": (4,), "stays": (7,)}
    shapes |= {"v": (5, 4), "rows": (5, 4), "kernel": (4, 5, 3), "square": (4, 4)}
    state = {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}
    state["two"] = state["two"].float()
    symmetry = ob.Symmetry.from_axes(axes, ["a", "b", "c"], state)
    plans = {name: torch.rand(size, size, dtype=torch.float64) for name, size in (("a", 5), ("b", 4), ("c", 5))}
    free = {name: plan.clone().requires_grad_() for name, plan in plans.items()}
    together = mix_all(state, symmetry.layouts, free, symmetry.parents)
    alone = {key: mix(value, symmetry.layouts[key], free, symmetry.parents) for key, value in state.items()}
    gradients = [
        torch.autograd.grad(sum(value.double().square().sum() for value in mixed.values()), list(free.values()))
        for mixed in (together, alone)
    ]
    torch.testing.assert_close(*gradients)
    found = {key: value.detach() for key, value in together.items()}
    a, b, c = plans["a"], plans["b"], plans["c"]
    torch.testing.assert_close(found["w"], a @ state["w"] @ b.T)
    torch.testing.assert_close(found["v"], c @ state["v"] @ b.T)
    torch.testing.assert_close(found["rows"], c @ state["rows"])
    torch.testing.assert_close(found["square"], b @ state["square"] @ b.T)
    torch.testing.assert_close(found["kernel"], torch.einsum("Bb,bck,Cc->BCk", b, state["kernel"], c))
    torch.testing.assert_close(found["conv"], torch.einsum("Bb,bak,Aa->BAk", b, state["conv"], a))
    torch.testing.assert_close(found["one"], a @ state["one"])
    torch.testing.assert_close(found["two"], (a @ state["two"].double()).float())
    torch.testing.assert_close(found["three"], b @ state["three"])
    assert together["stays"] is state["stays"]
