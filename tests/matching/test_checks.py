"""What does not fit is refused in one sentence, before anything is traced or computed."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching import checks

X, Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
LOSS = nn.functional.cross_entropy


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def untraced(monkeypatch):
    """Tracing is an error."""

    def fail(*_):
        raise AssertionError("traced before everything was checked")

    monkeypatch.setattr(checks, "trace", fail)


REFUSED = pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps must be a whole number of at least 0, got -1"),
        ({"steps": "many"}, "steps must be a whole number of at least 0, got 'many'"),
        ({"restarts": -3}, "restarts must be a whole number of at least 0, got -3"),
        ({"method": "sinkhorn", "check_every": 0}, "check_every must be a whole number of at least 1 or None, got 0"),
        ({"method": "sinkhorn", "start": "bogus"}, "start must be 'identity', 'scaled' or 'random', got 'bogus'"),
        ({"method": "sinkhorn", "mass": 1.0}, "mass must be a number above 0 and below 1, got 1.0"),
        ({"method": "sinkhorn", "tau": 0.0}, "tau must be a number above 0, got 0.0"),
        ({"method": "sinkhorn", "capture": True, "final_tau": 0.1}, "final_tau must be None"),
        ({"method": "ste", "lr": -1.0}, "lr must be a number above 0"),
        ({"method": "weight-matching", "max_sweeps": 0}, "max_sweeps must be a whole number of at least 1"),
        ({"method": "weight-matching", "steps": 3}, "'weight-matching' has no option 'steps'; it has max_sweeps, order"),
        ({"method": ob.Sinkhorn(), "steps": 3}, "'steps' is an option: give it to Sinkhorn"),
        ({"method": "sinkhron"}, "method must be one of 'auto', 'sinkhorn'"),
        ({"init": 3}, "init must be a Permutation, a Transform or one of"),
        ({"objective": ob.WeightDistance}, "objective must be WeightDistance"),
        ({"objective": "l2"}, "objective must be WeightDistance"),
        ({"data": []}, "the data has no batches"),
        ({"data": 3}, "data must be an iterable of"),
        ({"data": X}, "data must be an iterable of"),
        ({"data": [(X, Y, X)]}, "got a tuple of 3. Give several inputs as a tuple"),
        ({"data": (X, Y[:3])}, "64 inputs and 3 targets"),
        ({"method": "activation-matching", "data": []}, "the data has no batches"),
        ({"method": "activation-matching"}, "activation-matching looks at activations"),
        ({"init": "activation-matching"}, "activation-matching looks at activations"),
        ({"objective": ob.Midpoint(LOSS)}, "Midpoint needs data"),
        ({"steps": 2.5}, "steps must be a whole number of at least 0, got 2.5"),
        ({"steps": None}, "steps must be a whole number of at least 0, got None"),
        ({"steps": True}, "steps must be a whole number of at least 0, got True"),
        ({"tau": None}, "tau must be a number above 0, got None"),
        ({"method": "sinkhorn", "lr": 0.0}, "lr must be a number above 0 or None, got 0.0"),
        ({"method": "sinkhorn", "optimizer": "sgd"}, "optimizer must be 'adam' or 'row-adam', got 'sgd'"),
        ({"num_iters": 2.5}, "num_iters must be a whole number of at least 1, got 2.5"),
        ({"check_every": 2.5}, "check_every must be a whole number of at least 1 or None, got 2.5"),
        ({"restarts": 1.5}, "restarts must be a whole number of at least 0, got 1.5"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"method": "weight-matching", "max_sweeps": 1.5}, "max_sweeps must be a whole number of at least 1, got 1.5"),
        ({"method": "ste", "max_sweeps": 1.5}, "max_sweeps must be a whole number of at least 1, got 1.5"),
        ({"method": "exchange", "rounds": 1.5}, "rounds must be a whole number of at least 1, got 1.5"),
        ({"method": "activation-matching", "num_batches": 1.5}, "num_batches must be a whole number of at least 1 or None"),
        ({"method": [1]}, "method must be one of 'auto'"),
        ({"init": 1.5}, r"init must be a Permutation, a Transform or one of .*, got 1.5$"),
        ({"logits": 3}, "logits must be a dict of tensors, such as the logits of an Alignment; got a int"),
        ({"logits": {"a": 3}}, "logits must be a dict of tensors"),
        ({"logits": {"a": X}}, "logits must come from an Alignment or a RebasinNet, which have no key 'a'"),
        ({"symmetry": 3}, "symmetry must come from onebasin.symmetry or Symmetry.from_axes, got 3"),
        ({"groups": 3}, "groups must be names of groups, or shell patterns such as .*; got 3"),
        ({"groups": [3]}, "groups must be names of groups"),
        ({"callback": 3}, "callback must be a function or None, got 3"),
        ({"progress": 3}, "progress must be True or False, got 3"),
        ({"polish": "no"}, "polish must be True, False or None, got 'no'"),
        ({"detect_copy": "no"}, "detect_copy must be True or False, got 'no'"),
        ({"capture": "no"}, "capture must be True, False or None, got 'no'"),
        ({"data": iter([(X, Y)])}, "can be read once"),
        ({"data": (X, Y, Y)}, r"must be a pair \(inputs, targets\), or .* got the shapes \(64, 3\), \(64,\), \(64,\)"),
        ({"objective": ob.Midpoint(LOSS), "data": [X]}, "a batch must have a target: .*; got a Tensor"),
        ({"objective": ob.Midpoint(LOSS), "data": [X, Y]}, "a batch must have a target: .*; got a Tensor"),
        ({"objective": ob.RandomPoint(LOSS), "data": [(X,)]}, "a batch must have a target: .*; got a tuple"),
        ({"objective": ob.RandomPoint(LOSS, [{"input": X}])}, "a batch must have a target: .*; got a dict"),
    ],
)


@pytest.mark.usefixtures("untraced")
@REFUSED
def test_refusals_come_before_tracing(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ob.align(mlp(1), to=mlp(), example_inputs=X, **arguments)


@pytest.mark.usefixtures("untraced")
@REFUSED
@pytest.mark.parametrize("inputs", [X, None])
def test_merge_refuses_the_same(arguments, message, inputs):
    with pytest.raises((ValueError, TypeError), match=message):
        ob.merge([mlp(1), mlp()], inputs, **arguments)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rounds": -1}, "max_rounds must be a whole number of at least 0, got -1"),
        ({"to": mlp()}, "merge has no argument to="),
        ({"on_aligned": 3}, "on_aligned must be a function or None, got 3"),
        ({"on_result": 3}, "on_result must be a function or None, got 3"),
        ({"stepps": 3}, "'sinkhorn' has no option 'stepps'"),
    ],
)
def test_merge_refuses_its_own_before_tracing(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ob.merge([mlp(1), mlp()], X, **arguments)


@pytest.mark.usefixtures("untraced")
def test_merge_refuses_other_architectures_before_tracing():
    with pytest.raises(ValueError, match="model 3"):
        ob.merge([mlp(), mlp(1), nn.Linear(3, 2)], X)


def test_merge_takes_the_data_of_the_objective():
    models = [mlp(), mlp(1)]
    given, own = (
        ob.merge(models, objective=ob.Midpoint(LOSS, data), steps=3, **arguments).state_dict()
        for data, arguments in (([(X, Y)], {}), (None, {"data": [(X, Y)]}))
    )
    assert all(torch.equal(given[key], own[key]) for key in own)


def test_merge_reads_patterns_of_groups_once():
    models, moved = [mlp(seed) for seed in range(3)], []
    ob.merge(models, X, groups=iter(["0.*"]), method="weight-matching", on_aligned=moved.extend)
    kept = [{name for name, order in p.indices.items() if torch.equal(order, torch.arange(8))} for p in moved[1:]]
    assert kept == [{"2.weight"}] * 2


def test_logits_of_another_problem_are_refused_in_one_line():
    found = ob.align(mlp(1), to=mlp(), example_inputs=X, steps=2)
    wider = [nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"logits belong to another problem: .*9, 9.*got .*8, 8") as error:
        ob.align(wider[0], to=wider[1], example_inputs=X, logits=found.logits)
    assert "\n" not in str(error.value)


class Tokens(nn.Module):
    """Takes keywords, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.out(self.embed(input_ids).mean(1).relu())


def test_data_may_be_a_pair_of_tensors_or_batches_of_keywords():
    target, source = mlp(), mlp(1)
    pair, batches = (ob.align(source, to=target, objective=ob.Midpoint(LOSS), data=d, steps=3) for d in ((X, Y), [(X, Y)]))
    assert pair.permutation == batches.permutation
    ids = torch.arange(24).view(8, 3) % 10
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8) % 2}
    found = ob.align(Tokens(), to=Tokens(), objective=ob.Midpoint(LOSS), data=[batch], steps=3)
    assert found.cost <= found.start_cost


def test_a_later_batch_without_a_target_is_refused():
    with pytest.raises(TypeError, match="a batch must have a target"):
        ob.align(mlp(1), to=mlp(), objective=ob.Midpoint(LOSS), data=[(X, Y), X], steps=3)


def test_a_loss_may_ignore_the_target():
    found = ob.align(mlp(1), to=mlp(), objective=ob.Midpoint(lambda out, _: out.square().mean()), data=[(X, None)], steps=3)
    assert found.cost <= found.start_cost


@pytest.mark.parametrize("call", [ob.align, lambda a, b, data: ob.merge([a, b], data=data)])
def test_a_loader_that_shuffles_leaves_the_generator_alone(call):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16, shuffle=True)
    models, before = (mlp(1), mlp()), torch.get_rng_state()
    call(*models, data=loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_example_inputs_come_from_the_data():
    assert ob.align(mlp(1), to=mlp(), data=[(X, Y)]).method == "activation-matching"


def test_a_symmetry_written_by_hand_is_verified_where_inputs_are_known():
    model = mlp()
    claims_too_much = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h"}, free=["h"])
    for call in (
        lambda: ob.align(mlp(1), to=model, symmetry=claims_too_much, example_inputs=X),
        lambda: ob.align(mlp(1), to=model, symmetry=claims_too_much, data=[(X, Y)]),
        lambda: ob.align(mlp(1).state_dict(), to=model, symmetry=claims_too_much, example_inputs=X),
        lambda: ob.merge([mlp(1), model], symmetry=claims_too_much, example_inputs=X),
    ):
        with pytest.raises(ValueError, match="permuting changes the function on this model's weights"):
            call()
    holds = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o h"}, free=["h"])
    assert ob.align(mlp(1), to=model, symmetry=holds, example_inputs=X).permutation.indices.keys() == {"h"}
