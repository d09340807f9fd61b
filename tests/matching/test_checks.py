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


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps must be a number at least 0, got -1"),
        ({"steps": "many"}, "steps must be a number at least 0, got 'many'"),
        ({"restarts": -3}, "restarts must be a number at least 0, got -3"),
        ({"method": "sinkhorn", "check_every": 0}, "check_every must be a number at least 1, got 0"),
        ({"method": "sinkhorn", "start": "bogus"}, "start must be 'identity', 'scaled' or 'random', got 'bogus'"),
        ({"method": "sinkhorn", "mass": 1.0}, "mass must be a number above 0 and below 1, got 1.0"),
        ({"method": "sinkhorn", "tau": 0.0}, "tau must be a number above 0, got 0.0"),
        ({"method": "sinkhorn", "capture": True, "final_tau": 0.1}, "final_tau must be None"),
        ({"method": "ste", "lr": -1.0}, "lr must be a number above 0"),
        ({"method": "weight-matching", "max_sweeps": 0}, "max_sweeps must be a number at least 1"),
        ({"method": "weight-matching", "steps": 3}, "'weight-matching' has no option 'steps'; it has max_sweeps, order"),
        ({"method": ob.Sinkhorn(), "steps": 3}, "'steps' is an option: give it to Sinkhorn"),
        ({"method": "sinkhron"}, "method must be one of 'sinkhorn'"),
        ({"init": 3}, "init must be a Permutation or one of"),
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
    ],
)
def test_refusals_come_before_tracing(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ob.align(mlp(1), to=mlp(), example_inputs=X, **arguments)


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


def test_example_inputs_come_from_the_data():
    assert ob.align(mlp(1), to=mlp(), data=[(X, Y)]).method == "activation-matching"


def test_a_symmetry_written_by_hand_is_verified_where_inputs_are_known():
    model = mlp()
    claims_too_much = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h"}, free=["h"])
    for call in (
        lambda: ob.align(mlp(1), to=model, symmetry=claims_too_much, example_inputs=X),
        lambda: ob.align(mlp(1), to=model, symmetry=claims_too_much, data=[(X, Y)]),
        lambda: ob.merge([mlp(1), model], symmetry=claims_too_much, example_inputs=X),
    ):
        with pytest.raises(ValueError, match="permuting changes the function on this model's weights"):
            call()
    holds = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o h"}, free=["h"])
    assert ob.align(mlp(1), to=model, symmetry=holds, example_inputs=X).permutation.indices.keys() == {"h"}
