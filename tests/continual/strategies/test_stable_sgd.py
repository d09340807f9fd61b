"""Stable SGD: its rates, its dropout, and that it forgets less than plain training."""

import pytest
import torch
from torch import nn

from onebasin import continual
from onebasin.continual import Finetune, rotated_digits, run_stream, sgd
from tests.continual.clusters import TRAINING, make_mlp, make_task


def make_dropped_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 4))


def test_the_rate_falls_from_task_to_task_down_to_the_smallest():
    """One step on everything, without momentum: theta - rate times the gradient."""
    options = {"batch_size": 80, "epochs": 1, "optimizer": sgd(0.4)}
    strategy = continual.StableSGD(make_mlp(), gamma=0.5, min_lr=0.15, **options)
    for number, rate in enumerate((0.4, 0.2, 0.15, 0.15)):
        task = make_task(number)
        before = [value.detach().clone() for value in strategy.model.parameters()]
        cost = nn.functional.cross_entropy(strategy.model(task.inputs), task.targets)
        gradients = torch.autograd.grad(cost, list(strategy.model.parameters()))
        strategy.fit(task)
        for value, start, gradient in zip(strategy.model.parameters(), before, gradients, strict=True):
            torch.testing.assert_close(value.detach(), start - rate * gradient)


def test_dropout_is_set_in_the_copy_alone():
    model = make_dropped_mlp()
    assert continual.StableSGD(model, dropout=0.2).model[2].p == 0.2
    assert continual.StableSGD(model).model[2].p == 0.5
    assert model[2].p == 0.5


def test_dropout_follows_the_seed_and_leaves_the_global_generator_alone():
    """A batch is everything, so that dropout alone is random."""
    networks = []
    for disturbance, seed, dropout in ((0, 0, 0.5), (7, 0, 0.5), (0, 1, 0.5), (0, 0, 0.0), (0, 1, 0.0)):
        strategy = continual.StableSGD(make_dropped_mlp(), dropout=dropout, batch_size=80, epochs=3, seed=seed)
        torch.manual_seed(disturbance)
        state = torch.get_rng_state()
        for number in range(2):
            strategy.fit(make_task(number))
        assert torch.equal(torch.get_rng_state(), state)
        networks.append(strategy.model[0].weight.detach())
    assert torch.equal(networks[0], networks[1])
    assert not torch.allclose(networks[0], networks[2])
    assert not torch.allclose(networks[0], networks[3])
    torch.testing.assert_close(networks[3], networks[4])


def test_rotated_digits():
    """Less is forgotten than with the same batches at the first rate."""
    stream = rotated_digits(4, degrees=90)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
    options = {"optimizer": sgd(0.1, momentum=0.8), "batch_size": 20, "epochs": 4}
    matrix = run_stream(continual.StableSGD(model, gamma=0.4, dropout=0.25, **options), stream)
    model[3].p = 0.0
    plain = run_stream(Finetune(model, **options), stream)
    assert matrix.learning > 0.8
    assert matrix.average > plain.average, (matrix, plain)
    assert matrix.forgetting < plain.forgetting - 0.05


@pytest.mark.parametrize(("option", "value"), [("gamma", 0.0), ("gamma", 1.1), ("min_lr", -1.0), ("dropout", 1.0)])
def test_options_that_cannot_be_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must"):
        continual.StableSGD(make_dropped_mlp(), **{option: value})


def test_dropout_without_a_layer_for_it_is_refused():
    with pytest.raises(ValueError, match=r"the model has none"):
        continual.StableSGD(make_mlp(), dropout=0.1, **TRAINING)
