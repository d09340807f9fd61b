"""A problem: its source permuted, its batches, and the costs of permutations."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.problem import Problem, make_problem
from onebasin.relaxation.objectives import parameter_keys
from onebasin.tensors.states import read_state
from tests.matching.planted import DATA, X, mlp, pair, planted


def problem_of(model: nn.Module, target: nn.Module, objective: ob.Objective | None = None, **options) -> Problem:
    keys = tuple(parameter_keys(target))
    objective = (objective or ob.WeightDistance()).bind(target)
    return Problem(ob.symmetry(target, X), read_state(model), read_state(target), keys, objective, **options)


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_source_moves_as_the_model_does():
    a, b = pair()
    problem = problem_of(b, a)
    permutation = problem.symmetry.random(torch.Generator().manual_seed(0))
    assert equal(problem.permuted(permutation), permutation.apply(b))
    assert equal(problem.starting_from(permutation).source, permutation.apply(b))
    assert problem.starting_from(problem.symmetry.identity()) is problem


@pytest.mark.parametrize("lazy", [False, True])
def test_an_update_of_what_was_moved_is_the_whole_permutation(lazy):
    a, b = pair()
    problem = problem_of(b, a)
    if lazy:
        problem = replace(problem, source=problem.source.lazily())
    before, update = (problem.symmetry.random(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    total = update @ before
    advanced = problem.advance(problem.permuted(before), update, total, problem.keys)
    assert equal({key: advanced[key] for key in problem.keys}, dict(total.apply(b)))


def test_batches_come_again_without_end():
    a, b = pair()
    midpoint = problem_of(b, a, ob.Midpoint(nn.functional.cross_entropy), batches=DATA)
    assert [id(batch) for batch in itertools.islice(midpoint.stream(), 4)] == [id(batch) for batch in (*DATA, *DATA)]
    distance = problem_of(b, a, batches=DATA)
    assert list(itertools.islice(distance.stream(), 2)) == [None, None]


class Unsized:
    """Batches whose number is known only once they are read."""

    def __init__(self, batches):
        self.batches, self.num_read = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.num_read += 1
            yield batch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((X, torch.zeros(len(X), dtype=torch.long)) for _ in range(20))


def test_a_loader_of_a_stream_has_no_length():
    a, b = pair()
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    problem = make_problem(b, a, ob.symmetry(a, X), ob.Midpoint(nn.functional.cross_entropy), loader, lazily=False)
    assert (len(problem.compared), problem.num_held_out) == (4, 4)


class Sized(Unsized):
    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize(("count", "num_held_out"), [(1, 0), (3, 0), (15, 0), (16, 4), (40, 4)])
@pytest.mark.parametrize("kind", [Unsized, Sized])
def test_descents_do_not_see_the_batches_that_permutations_are_compared_on(count, num_held_out, kind):
    """With few batches there are too few to leave some out."""
    a, b = pair()
    data = kind([(X, torch.full((len(X),), number)) for number in range(count)])
    problem = make_problem(b, a, ob.symmetry(a, X), ob.Midpoint(nn.functional.cross_entropy), data, lazily=False)
    assert data.num_read == min(count, 4 if kind is Sized else 16)
    seen = [int(batch[1][0]) for batch in itertools.islice(problem.stream(), 2 * count)]
    assert [int(batch[1][0]) for batch in problem.compared] == list(range(min(count, 4)))
    assert set(seen) == set(range(num_held_out, count))


def test_a_pass_without_batches_for_a_descent_is_an_error():
    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(X, torch.zeros(len(X), dtype=torch.long))] * (16 if self.passes < 3 else 4))

    a, b = pair()
    data = Shrinking()
    problem = make_problem(b, a, ob.symmetry(a, X), ob.Midpoint(nn.functional.cross_entropy), data, lazily=False)
    with pytest.raises(ValueError, match="no batches beside those"):
        list(itertools.islice(problem.stream(), 50))


def test_a_cost_is_the_mean_over_the_judged_batches():
    a, b = pair()
    objective = ob.Midpoint(nn.functional.cross_entropy)
    problem = problem_of(b, a, objective, batches=DATA, compared=DATA)
    identity = problem.symmetry.identity()
    alone = [replace(problem, compared=[batch]).cost(identity) for batch in DATA]
    assert alone[0] != alone[1]
    assert problem.cost(identity) == pytest.approx(sum(alone) / 2)


def test_the_cost_of_a_copy_is_known_without_moving_it():
    model = mlp()
    twin, _, answer = planted(model, X)
    problem = problem_of(twin, model)
    assert problem.cost_of_copy(answer) == problem.cost(answer) == 0.0 < problem.cost(problem.symmetry.identity())


def test_buffers_are_fresh_and_parameters_shared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    problem = problem_of(model, model)
    fresh = problem.fresh(problem.source)
    assert fresh["0.weight"] is problem.source["0.weight"]
    assert fresh["1.running_mean"] is not problem.source["1.running_mean"]
    assert torch.equal(fresh["1.running_mean"], problem.source["1.running_mean"])
