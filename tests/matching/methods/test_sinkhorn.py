"""Descents on logits: the steps they take, how they are resumed, what does not fit into memory."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.descent.cuda_graphs import NUM_WARMUP, CapturedStep
from onebasin.matching.methods.sinkhorn import find_distance, make_optimizer, make_step
from onebasin.matching.problem import Problem
from onebasin.relaxation.objectives import as_objective, parameter_keys
from onebasin.tensors.states import read_state
from tests.matching.planted import X, mlp, pair, planted
from tests.relaxation.soft_cases import ALONE, arrange, case


def test_a_descent_can_be_resumed():
    model = mlp()
    twin, symmetry, answer = planted(model, X)
    first = ob.align(twin, to=model, symmetry=symmetry, steps=5, polish=False, detect_copy=False)
    assert not first.converged
    second = ob.align(twin, to=model, symmetry=symmetry, steps=95, polish=False, logits=first.logits)
    assert second.history[0]["soft"] < first.history[0]["soft"]
    assert second.permutation == answer


def test_a_resumed_descent_is_the_one_that_was_not_interrupted():
    a, b = pair()
    options = {"example_inputs": X, "method": "sinkhorn", "polish": False, "patience": 100}
    whole = ob.align(b, to=a, steps=20, **options)
    first = ob.align(b, to=a, steps=10, **options)
    second = ob.align(b, to=a, steps=10, logits=first.logits, **options)
    assert [entry["soft"] for entry in first.history + second.history] == [entry["soft"] for entry in whole.history]
    anew = ob.align(b, to=a, steps=10, logits={"logits.10": first.logits["logits.10"]}, **options)
    assert anew.history[0]["soft"] == second.history[0]["soft"]
    assert anew.history[-1]["soft"] != second.history[-1]["soft"]


def test_plans_that_do_not_fit_are_refused(monkeypatch):
    for module in ("methods.sinkhorn", "recommendation"):
        monkeypatch.setattr(f"onebasin.matching.{module}.available_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"the plans need about 0\.0 GiB"):
        ob.align(mlp(), to=mlp(), example_inputs=X, method="sinkhorn", detect_copy=False)
    assert ob.align(mlp(), to=mlp(), example_inputs=X, detect_copy=False).method == "weight-matching"


def test_a_step_is_the_general_one(monkeypatch):
    """The same logits after some steps as with an objective that is not known to be a distance."""
    arrange(ALONE, monkeypatch)
    net, source, target, keys = case("vgg with flatten")
    objective = ob.WeightDistance(keys=keys)
    ended = []
    for given in (objective, as_objective(lambda params, target, batch: objective(params, target))):
        twin = copy.deepcopy(net)
        step = make_step(Problem(net.symmetry, source, target, keys, given), twin, make_optimizer(twin, 0.1))
        costs = torch.stack([step(None) for _ in range(5)])
        ended.append((costs, twin.state_dict()))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-9, atol=1e-9)


def test_a_distance_of_statistics_goes_the_general_way():
    """Buffers of the softly permuted network are detached: they cost something and have no gradient."""
    net, source, target, keys = case("batch norm 2d")
    statistic = next(key for key in source if key.endswith("running_mean"))
    for counted, known in ((keys, True), ((*keys, statistic), False)):
        problem = Problem(net.symmetry, source, target, keys, ob.WeightDistance(keys=counted))
        assert (find_distance(problem, net) is not None) == known


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("width", [32, 1056], ids=["small ones together", "a large one alone"])
def test_a_captured_step_is_the_plain_one(width):
    torch.manual_seed(0)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)]
    a, b = nn.Sequential(*layers).cuda(), nn.Sequential(*copy.deepcopy(layers)).cuda()
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.copy_(torch.randn_like(parameter))
    symmetry = ob.symmetry(a, torch.zeros(1, 6, device="cuda"), verify=False)
    source, target, keys = read_state(b), read_state(a), tuple(parameter_keys(a))
    ended = []
    for capture in (False, True):
        net = ob.RebasinNet(b, symmetry)
        problem = Problem(symmetry, source, target, keys, ob.WeightDistance(keys=keys))
        assert (find_distance(problem, net) is not None) == (width > 1024)
        step = CapturedStep(make_step(problem, net, make_optimizer(net, 0.1)), capture, torch.device("cuda"))
        costs = torch.stack([step(None).clone() for _ in range(NUM_WARMUP + 6)])
        assert step.is_captured == capture
        ended.append((costs, net.state_dict()))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-4, atol=1e-4)
