"""Calls at other values and other sizes."""

import pytest
import torch
from torch import nn

from onebasin.programs.calls import Call
from onebasin.programs.derivation import draw_inputs, find_limits, perturb_inputs, resize
from onebasin.programs.recording import record
from tests.cases import Fn, call_of, two_layers


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([torch.rand(2, 3)], [[(1, 4)], [(1, 3)]]),
        ([torch.rand(1, 3, 8, 8)], [[(2, 3, 16, 9)], [(2, 3, 16, 16)], [(2, 3, 8, 8)], [(1, 3, 16, 8)], [(1, 3, 8, 16)]]),
        ([torch.rand(2, 5, 4)], [[(1, 6, 4)], [(1, 5, 5)], [(1, 5, 4)], [(2, 6, 4)]]),
        (
            [torch.ones(1, 5).long(), torch.rand(1, 1, 5, 5)],
            [
                [(2, 6), (2, 1, 10, 6)],
                [(2, 6), (2, 1, 10, 10)],
                [(2, 6), (2, 1, 5, 5)],
                [(2, 6), (2, 1, 6, 6)],
                [(2, 5), (2, 1, 5, 5)],
                [(1, 6), (1, 1, 5, 5)],
                [(1, 5), (1, 1, 10, 5)],
                [(1, 5), (1, 1, 5, 10)],
            ],
        ),
        ([torch.rand(())], []),
    ],
    ids=["features", "images", "sequences", "tokens and a mask", "a number"],
)
def test_sizes_change_together_and_alone(inputs, expected):
    found = list(resize(call_of(tuple(inputs))))
    assert [[tuple(leaf.shape) for leaf in call.leaves] for call in found] == expected


def test_types_and_other_arguments_are_kept():
    mask = torch.ones(2, 30).long()
    found = next(resize(Call((mask, "mean"), {"scale": torch.rand(2, dtype=torch.float16)})))
    assert found.args[0].shape == (1, 31)
    assert found.args[0][0, 0] == 1  # a sample that is masked altogether would say nothing
    assert set(found.args[0].flatten().tolist()) == {0, 1}
    assert found.args[1] == "mean"
    assert found.kwargs["scale"].dtype == torch.float16


def test_indices_are_drawn_from_those_that_are_valid():
    """A sequence of equal tokens would hide how they are told apart."""
    found = next(resize(call_of(torch.tensor([[7, 3, 3, 3, 3, 3, 3]]))))
    assert found.args[0].shape == (2, 8)
    assert len(found.args[0].unique()) > 2
    assert 0 <= found.args[0].min() <= found.args[0].max() <= 7


def embed(self, ids, types, mask):
    h = self.embedding(ids.long().unsqueeze(0)[0]) + self.types[types]
    return self.last(h * mask[..., None])


def test_inputs_are_drawn_over_all_that_is_valid():
    model = Fn(embed, embedding=nn.Embedding(500, 4), types=nn.Parameter(torch.rand(3, 4)), last=nn.Linear(4, 2))
    ids, types, mask = torch.zeros(40, 30, dtype=torch.int32), torch.zeros(40, 30).long(), torch.ones(40, 30).bool()
    program = record(model, call_of((ids, types, mask)))
    assert sorted(find_limits(program).values()) == [3, 500]
    drawn = draw_inputs(program)
    assert [drawn[name].dtype for name in program.given] == [torch.int32, torch.long, torch.bool]
    assert [len(drawn[name].unique()) for name in program.given] == [pytest.approx(500, abs=80), 3, 2]
    assert next(resize(call_of((ids, types, mask)), find_limits(program))).args[0].max() > 400


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        (torch.zeros(50), lambda drawn: drawn.abs().max() > 1),
        (torch.tensor([0.0, 1.0] * 25), lambda drawn: set(drawn.tolist()) == {0.0, 1.0}),
        (torch.zeros(50, dtype=torch.complex64), lambda drawn: drawn.imag.abs().max() > 0.5),
        (torch.tensor([-3, 9] * 25), lambda drawn: len(drawn.unique()) > 5 and drawn.min() >= -3 and drawn.max() <= 9),
        (torch.zeros(50).long(), lambda drawn: not drawn.any()),  # nothing else is known to be valid
        (torch.rand(0), lambda drawn: drawn.shape == (0,)),
    ],
    ids=["numbers", "a floating mask", "complex numbers", "integers", "zeros", "empty"],
)
def test_how_each_kind_of_input_is_drawn(value, is_valid):
    program = record(two_layers(lambda self, x: x * 2), call_of(value))
    (drawn,) = draw_inputs(program).values()
    assert drawn.dtype == value.dtype
    assert is_valid(drawn)


def test_perturbed_inputs_keep_their_signs_and_integers():
    program = record(two_layers(lambda self, x, n: x * n), call_of((torch.tensor([2.0, -3.0]), torch.tensor([5, 6]))))
    x, n = perturb_inputs(program).values()
    assert n.tolist() == [5, 6]
    assert 1 <= x[0] <= 3
    assert -4.5 <= x[1] <= -1.5
