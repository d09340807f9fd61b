"""Descents on logits: the steps they take, how they are resumed, what does not fit into memory."""

import copy
import itertools

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
    options = {"example_inputs": X, "method": "sinkhorn", "polish": False, "patience": 100, "check_every": 1}
    whole = ob.align(b, to=a, steps=20, **options)
    first = ob.align(b, to=a, steps=10, **options)
    second = ob.align(b, to=a, steps=10, logits=first.logits, **options)
    assert [entry["soft"] for entry in first.history + second.history] == [entry["soft"] for entry in whole.history]
    anew = ob.align(b, to=a, steps=10, logits={"logits.10": first.logits["logits.10"]}, **options)
    assert anew.history[0]["soft"] == second.history[0]["soft"]
    assert anew.history[-1]["soft"] != second.history[-1]["soft"]


def test_a_wide_copy_is_found_in_a_few_steps():
    """Adam by entries needs more than ten steps for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.Linear(130, 130), nn.ReLU(), nn.Linear(130, 5))
    twin, symmetry, answer = planted(model, torch.zeros(1, 64))
    options = {"symmetry": symmetry, "method": "sinkhorn", "polish": False, "detect_copy": False, "steps": 5}
    found = ob.align(twin, to=model, **options)
    assert found.permutation == answer
    assert found.history[0]["step"] < 4  # the first looks come before the fifth step
    assert ob.align(twin, to=model, optimizer="adam", **options).permutation != answer


@pytest.mark.parametrize(("has_data", "optimizer"), [(False, "row-adam"), (True, "adam")])
def test_the_optimizer_depends_on_data(has_data, optimizer):
    a, b = pair()
    options = {"example_inputs": X, "method": "sinkhorn", "steps": 4, "polish": False, "check_every": 1}
    if has_data:
        options |= {"objective": ob.Midpoint(nn.functional.mse_loss), "data": [(X, b(X).detach())]}
    default, named = (ob.align(b, to=a, **options, **given) for given in ({}, {"optimizer": optimizer}))
    assert [entry["soft"] for entry in default.history] == [entry["soft"] for entry in named.history]


def find_looks(**options):
    """The steps at which a descent on a trained pair looked, and the lowest cost by then."""
    a, b = pair()
    found = ob.align(b, to=a, example_inputs=X, method="sinkhorn", polish=False, detect_copy=False, **options)
    return [entry["step"] for entry in found.history], [entry["best"] for entry in found.history]


def test_looks_become_rarer_while_they_find_nothing_better():
    steps, best = find_looks(steps=60, patience=60)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) == 4
    after_gains = [gap for gap, (before, now) in zip(gaps[1:], itertools.pairwise(best), strict=False) if now < before]
    assert after_gains
    assert set(after_gains) == {1}
    assert steps[-1] == 59


def test_a_descent_that_ends_has_looked_at_its_end():
    steps, _ = find_looks(steps=100, patience=7)
    assert steps[-1] < 99
    assert find_looks(steps=100, patience=7, check_every=50)[0][0] == 7


def test_with_a_number_given_looks_come_at_that_distance():
    assert find_looks(steps=20, patience=20, check_every=7)[0] == [6, 13, 19]


def test_nothing_is_assigned_where_the_best_of_every_row_has_stayed(monkeypatch):
    called = []
    plain = ob.RebasinNet.candidates
    monkeypatch.setattr(ob.RebasinNet, "candidates", lambda net, *args: called.append(1) or plain(net, *args))
    steps, _ = find_looks(steps=100, patience=100, check_every=1)
    assert len(steps) == 100
    assert 1 < len(called) < 100


def wide_pair():
    """Two random networks with more units than are looked at after every step."""
    torch.manual_seed(0)
    layers = [[nn.Linear(8, 130), nn.ReLU(), nn.Linear(130, 3)] for _ in range(2)]
    return [nn.Sequential(*each) for each in layers]


def test_looks_at_wide_groups_are_put_off_while_rows_share_their_best_column():
    a, b = wide_pair()
    options = {"example_inputs": torch.zeros(1, 8), "method": "sinkhorn", "polish": False, "steps": 60, "patience": 60}
    found = ob.align(b, to=a, **options)
    assert [entry["step"] for entry in found.history] == [24, 49, 59]
    batches = [(torch.randn(16, 8), torch.randint(3, (16,)))]
    found = ob.align(b, to=a, objective=ob.Midpoint(nn.functional.cross_entropy), data=batches, lr=1e-6, **options)
    assert found.history[0]["step"] == 4  # at the identity every row has a column of its own


def test_a_copy_is_looked_at_as_soon_as_its_rows_have_columns_of_their_own():
    a, _ = wide_pair()
    twin, symmetry, answer = planted(a, torch.zeros(1, 8))
    found = ob.align(twin, to=a, symmetry=symmetry, method="sinkhorn", polish=False, detect_copy=False)
    assert found.permutation == answer
    assert found.history[-1]["step"] < 24


def test_no_look_is_put_off_at_the_end():
    a, b = wide_pair()
    options = {"example_inputs": torch.zeros(1, 8), "method": "sinkhorn", "polish": False}
    assert [entry["step"] for entry in ob.align(b, to=a, steps=7, **options).history] == [6]
    found = ob.align(b, to=a, steps=60, patience=7, **options)
    assert found.history[0]["step"] == 7


def test_the_polish_starts_from_where_the_descent_ended(monkeypatch):
    """By the plans and by the logits, which differ here."""
    given = []
    monkeypatch.setattr("onebasin.matching.search.sweep_all", lambda problem, starts: given.extend(starts) or iter(starts))
    a, b = wide_pair()
    found = ob.align(b, to=a, example_inputs=torch.zeros(1, 8), method="sinkhorn")
    net = ob.RebasinNet(b, found.permutation.symmetry)
    net.load_state_dict({key: value for key, value in found.logits.items() if not key.startswith("adam.")})
    ends = net.candidates()
    assert len(ends) == 2
    assert all(end in given for end in ends)
    assert given[-1].is_identity


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
        step = make_step(Problem(net.symmetry, source, target, keys, given), twin, make_optimizer(twin, "row-adam", 0.1))
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
        step = CapturedStep(make_step(problem, net, make_optimizer(net, "row-adam", 0.1)), capture, torch.device("cuda"))
        costs = torch.stack([step(None).clone() for _ in range(NUM_WARMUP + 6)])
        assert step.is_captured == capture
        ended.append((costs, net.state_dict()))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-4, atol=1e-4)


def test_its_title_tells_its_start():
    assert ob.Sinkhorn().title == "sinkhorn"
    assert ob.Sinkhorn(start="scaled", mass=0.9).title == "sinkhorn from plans of mass 0.9"
    assert ob.Sinkhorn(start="random").title == "sinkhorn from random plans"
