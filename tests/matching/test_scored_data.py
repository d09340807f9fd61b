"""Targets from the networks themselves."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
BATCHES = list(X.split(16))


def make(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, outputs))


@pytest.fixture
def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(2)]


def test_targets_are_the_mean_outputs_in_eval_mode(models):
    before = [copy.deepcopy(model.state_dict()) for model in models]
    found = list(ob.mean_scores(models, BATCHES))
    for (inputs, scores), x in zip(found, BATCHES, strict=True):
        expected = torch.stack([copy.deepcopy(model).eval()(x) for model in models]).mean(0)
        assert torch.equal(inputs, x)
        assert torch.allclose(scores, expected)
        assert not scores.requires_grad
    for model, state in zip(models, before, strict=True):
        assert model.training
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_labels_are_left_out_and_inputs_are_read_anew(models):
    class Noisy:
        def __iter__(self):
            return ((x + torch.rand(1), torch.zeros(16)) for x in BATCHES)

    data = ob.mean_scores(models, Noisy())
    first, second = next(iter(data)), next(iter(data))
    assert first[1].shape == (16, 3)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert len(ob.mean_scores(models, BATCHES)) == 4  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        len(data)  # type: ignore[arg-type]


def test_the_users_generator_is_left_alone(models):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=16, shuffle=True)
    state = torch.get_rng_state()
    ob.mean_scores(models, loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_with_logits_count(models):
    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return {"logits": self.model(x), "hidden": x}

    plain, wrapped = (next(iter(ob.mean_scores(each, BATCHES)))[1] for each in (models, [Wrapped(m) for m in models]))
    assert torch.equal(plain, wrapped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_may_be_of_another_type_than_the_models(models, dtype):
    scores = next(iter(ob.mean_scores([model.to(dtype) for model in models], BATCHES)))[1]
    assert scores.dtype == (dtype if dtype == torch.float64 else torch.float32)  # what alignments compute in


def test_a_merge_comes_closer_to_the_mean_of_its_parents():
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2)]
    data = ob.mean_scores(models, BATCHES)
    line = ob.RandomPoint(nn.functional.mse_loss, low=0.3, high=0.7)

    def error(model: nn.Module) -> float:
        with torch.no_grad():
            return float(sum(nn.functional.mse_loss(model(x), scores) for x, scores in data))

    options = {"objective": line, "data": data, "kinds": "positive", "repair": None}
    scaled = ob.merge(models, scaling=ob.Scaling(steps=100), **options)
    assert error(scaled) < 0.9 * error(ob.merge(models, scaling=ob.Scaling(steps=0), **options))


def test_bad_input_is_refused(models):
    with pytest.raises(ValueError, match="at least one model"):
        ob.mean_scores([], BATCHES)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ob.mean_scores([models[0].state_dict()], BATCHES)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="read once"):
        ob.mean_scores(models, iter(BATCHES))
    with pytest.raises(ValueError, match="no batches"):
        ob.mean_scores(models, [])
    with pytest.raises(ValueError, match=r"of one shape, got \(16, 3\), \(16, 2\)"):
        ob.mean_scores([models[0], make(2)], BATCHES)
    with pytest.raises(ValueError, match="tuple"):
        ob.mean_scores([nn.LSTM(4, 4)], BATCHES)
