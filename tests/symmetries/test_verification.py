"""Verification sees a wrong symmetry whatever the example's values are, and takes outputs that are not finite."""

import dataclasses

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.recording import record
from onebasin.symmetries.verification import CannotVerify, Different, verify_programs
from onebasin.tensors.states import read_state
from tests.cases import Fn, two_layers, weight

WRONG = ob.Symmetry.from_axes({"first.weight": "h i", "first.bias": "h"}, free=["h"])  # forgets the columns of last


def refuse_wrong(model, inputs, wrong=WRONG):
    programs = [record(model, call) for call in read_calls(inputs)]
    with pytest.raises(Different, match="'h'"):
        verify_programs(wrong.bind(model), programs, read_state(model))


def hide_in_zeros(self, x):
    return self.last(self.first(x) - self.first.bias) * x.sum()


def hide_behind_huge_numbers(self, x):
    y = self.last(self.first(x))
    return torch.cat([y, torch.full_like(y, torch.finfo(y.dtype).min)], 1)


def hide_behind_infinity(self, x):
    y = self.last(self.first(x))
    return torch.cat([y, torch.full_like(y, -torch.inf)], 1)


def hide_behind_what_is_no_number(self, x):
    y = self.last(self.first(x))
    return torch.cat([y, torch.full_like(y, torch.nan)], 1)


def hide_in_small_numbers(self, x):
    return torch.cat([x.sum(1, True) + 1.0, 1e-12 * self.last(self.first(x))], 1)


HIDDEN = [
    hide_in_zeros,
    hide_behind_huge_numbers,
    hide_behind_infinity,
    hide_behind_what_is_no_number,
    hide_in_small_numbers,
]


@pytest.mark.parametrize("forward", HIDDEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inputs", [torch.zeros(3, 4), torch.rand(3, 4)], ids=["zeros", "random"])
def test_nothing_hides_a_wrong_symmetry(forward, inputs):
    model = two_layers(forward)
    refuse_wrong(model, inputs)
    assert [group.size for group in ob.symmetry(model, inputs).groups.values()] == [8]


def test_equal_tokens_hide_nothing():
    def forward(self, ids):
        return self.last(self.first(self.embedding(ids) - self.embedding.weight[0]) - self.first.bias)

    model = two_layers(forward, embedding=nn.Embedding(9, 4))
    refuse_wrong(model, torch.zeros(2, 3).long())


@pytest.mark.parametrize("mask", [torch.zeros(3, 5).bool(), torch.zeros(3, 5)])
def test_a_mask_that_masks_everything_hides_nothing(mask):
    model = two_layers(lambda self, x, mask: self.last(self.first(x) * mask[..., None]))
    refuse_wrong(model, (torch.rand(3, 5, 4), mask))


def test_complex_outputs_are_compared_with_a_tolerance():
    model = two_layers(lambda self, x: torch.complex(*self.last(self.first(x)).unbind(1)))
    assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 1
    refuse_wrong(model, torch.rand(3, 4))


def test_random_weights_where_a_network_is_not_defined_are_left():
    """Negative weights have no logarithm; the model's own are perturbed instead."""
    model = Fn(lambda self, x: (x.exp() @ self.first.log()) @ self.last.log(), first=weight(4, 8), last=weight(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.1, 1.0)
    assert [group.size for group in ob.symmetry(model, torch.rand(3, 4)).groups.values()] == [8]


def sparse(self, x):
    return self.last(torch.sparse.mm(self.sparse, self.first(x).t()).t())


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_sparse_tensors_do_not_move(kind):
    model = two_layers(sparse)
    model.sparse = kind(torch.eye(8).to_sparse())
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert not symmetry.groups


def turn(self, x):
    """Positions as angles of complex numbers, as DeepSeek-V2 has them."""
    angles = torch.arange(x.shape[1])[:, None] * torch.arange(1.0, 5.0)
    h = torch.view_as_complex(self.first(x).unflatten(-1, (4, 2)))
    h = torch.view_as_real(h * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return self.last(h), h @ h.mT


def test_complex_numbers_inside():
    model = two_layers(turn)
    symmetry = ob.symmetry(model, torch.rand(2, 5, 4))
    assert symmetry.verify(model, torch.rand(2, 9, 4)) < 1e-12


@dataclasses.dataclass
class Result:
    """What no tree of tensors is known of."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]


def test_dataclasses_are_outputs():
    model = two_layers(lambda self, x: Result(self.last(h := self.first(x)), [h] if self.shows else []))
    model.shows = False
    assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 1
    model.shows = True
    assert not ob.symmetry(model, torch.rand(3, 4)).groups


def test_vmap_inside():
    model = two_layers(lambda self, x: torch.vmap(lambda row: self.last(self.first(row)))(x))
    assert [group.size for group in ob.symmetry(model, torch.rand(3, 4)).groups.values()] == [8]


def test_an_output_without_numbers_cannot_be_verified():
    model = two_layers(lambda self, x: self.last(self.first(x)) * torch.nan)
    with pytest.raises(CannotVerify, match="an output is not a number there; give inputs where it is defined"):
        ob.symmetry(model, torch.rand(3, 4))


def test_inputs_that_the_model_does_not_take_are_not_needed():
    """Drawn lengths and logarithms fail; then the call's own inputs are used, perturbed or as they are."""
    model = two_layers(lambda self, x: self.last(self.first(x.sqrt().log())))
    assert len(ob.symmetry(model, torch.rand(3, 4) + 1).groups) == 1
