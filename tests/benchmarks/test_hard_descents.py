"""Descents that are kept near permutations, and the records that pages are drawn from."""

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks import hard_descents, records
from benchmarks.guided_descent import FrankWolfe, GuidedDescent
from benchmarks.pipelines import SHORTER, align_in_turn

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X[i::4], (X[i::4, 0] > 0).long()) for i in range(4)]


def make_pair():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    return a, b, {"data": DATA, "objective": ob.Midpoint(nn.functional.cross_entropy)}


@pytest.mark.parametrize(
    "method",
    [
        GuidedDescent(steps=10, is_hard=True),
        GuidedDescent(steps=10, distance=1.0, entropy=0.1, noise=1.0),
        GuidedDescent(steps=10, radius=3.0),
        FrankWolfe(),
        FrankWolfe(rewards=(0.0, 0.5)),
    ],
    ids=str,
)
def test_the_result_never_costs_more_than_the_start(method):
    a, b, goal = make_pair()
    found = ob.align(b, to=a, method=method, **goal)
    assert found.cost <= found.start_cost


def test_a_linear_cost_is_solved_in_a_step_of_frank_wolfe():
    a, b, _ = make_pair()

    def inner(params, target, batch):
        return -(params["0.weight"] * target["0.weight"]).sum()

    found = ob.align(b, to=a, example_inputs=X, objective=inner, method=FrankWolfe(rounds=1), groups=["0.weight"])
    scores = a[0].weight.detach() @ b[0].weight.detach().T
    assert found.permutation[next(iter(found.permutation.symmetry.groups))].equal(ob.assign(scores))


def test_methods_follow_each_other():
    a, b, goal = make_pair()
    first = align_in_turn(b, a, SHORTER["without the soft descent"][:1], **goal)
    assert align_in_turn(b, a, SHORTER["without the soft descent"], **goal).cost <= first.cost


def test_what_has_a_record_is_not_measured_again(tmp_path):
    calls = []

    def measure(config):
        calls.append(config)
        return {"loss": 1 / 3}

    path = tmp_path / "x.jsonl"
    records.complete(path, [{"pair": 0}], measure)
    found = records.complete(path, [{"pair": 0}, {"pair": 2}], measure)
    assert calls == [{"pair": 0}, {"pair": 2}]
    assert [record["result"] for record in found] == [{"loss": 0.333333}] * 2


def test_the_page_shows_every_candidate():
    result = {"loss": 0.4, "accuracy": 0.9, "passes": 750, "seconds": 9.0}
    made = [{"config": {"pair": 0, "candidate": name}, "result": result} for name in hard_descents.CANDIDATES]
    lines = hard_descents.draw(made)
    assert all(any(line.startswith(f"| {name} |") for line in lines) for name in hard_descents.CANDIDATES)
