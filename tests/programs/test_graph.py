"""A program is replayed with any state, in any precision, holding no more than it needs."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.graph import ReplayError
from onebasin.programs.precision import compute_in_float64, promote
from onebasin.programs.recording import record
from onebasin.tensors.states import LazyState, read_state
from tests.cases import call_of, two_layers

CALL = call_of(torch.rand(3, 4))


@pytest.fixture
def model():
    return two_layers(lambda self, x: self.last(torch.relu(self.first(x))))


def test_a_program_returns_what_the_module_returns(model):
    program = record(model, CALL)
    (found,) = program.run(read_state(model))
    assert torch.equal(found, model(*CALL.args))
    assert not found.requires_grad
    other = two_layers(model._forward)
    other.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    (found,) = program.run(read_state(other))
    assert torch.equal(found, other(*CALL.args))
    (found,) = program.run(read_state(model), compute_in_float64, promote)
    assert found.dtype == torch.float64


def test_what_a_program_reads(model):
    model.spare = torch.nn.Parameter(torch.ones(2))
    program = record(model, CALL)
    assert program.reads == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert set(program.keys.values()) == program.reads
    assert not program.is_random
    assert not program.training


def test_a_lazy_state_is_read_where_it_is_used(model):
    state, read = read_state(model), []

    def get(key):
        read.append(key)
        return state[key]

    record(model, CALL).run(LazyState({key: value.to("meta") for key, value in state.items()}, get))
    assert read == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_a_state_may_be_permuted_on_several_threads_while_it_is_read():
    """Large tensors are gathered by threads, which are not in the mode that the program runs in."""
    model = nn.Sequential(nn.Linear(4, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 2))
    try:
        torch.set_num_threads(2)
        assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 2
    finally:
        torch.set_num_threads(1)


def test_random_programs_draw_the_same_numbers_every_time():
    model = two_layers(lambda self, x: self.last(self.first(x) + torch.rand(8)))
    program = record(model, CALL)
    before = torch.get_rng_state()
    first, second = (program.run(read_state(model))[0] for _ in range(2))
    assert program.is_random
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operation_that_fails_is_named(model):
    state = {**read_state(model), "last.weight": torch.ones(2, 3)}
    with pytest.raises(ReplayError, match=r"aten.linear.default failed"):
        record(model, CALL).run(state)
