"""Mode connectivity SGD, against what its equation says."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin import continual
from onebasin.continual import Finetune, Task, adam, rotated_digits, run_stream, sgd
from tests.continual.clusters import TRAINING, make_mlp, make_task


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.squeeze(1), target)


def make_regression(seed: int, count: int = 12) -> Task:
    """Targets are distinct, so a memory of one per class has the whole task."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, generator=generator, dtype=torch.float64)
    return Task(inputs, inputs @ weights + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64))


def make_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


# Every batch is everything: orders do not matter, and descents end at their minimum.
WHOLE = {"batch_size": 12, "replay_size": 12, "memory_per_class": 1, "epochs": 400}


@pytest.mark.parametrize("points", [1, 3])
def test_the_network_minimises_the_losses_along_both_lines(points):
    first, second = make_regression(0), make_regression(1)
    strategy = continual.MCSGD(make_linear(), squares, points=points, optimizer=sgd(0.1), **WHOLE)
    strategy.fit(first)
    before = strategy.model.weight.detach()[0].clone()
    torch.testing.assert_close(before, torch.linalg.lstsq(first.inputs, first.targets[:, None]).solution[:, 0])
    before += torch.tensor([0.5, -1.0, 0.3])  # away from the minimum, so that the whole line matters
    with torch.no_grad():
        strategy.model.weight[0] = before
    strategy.fit(second)
    alone = torch.linalg.lstsq(second.inputs, second.targets[:, None]).solution[:, 0]
    torch.testing.assert_close(strategy._sequential["weight"][0], alone)

    # The gradient, mean_s s [H (end + s (v - end)) - b] summed over both lines, is zero.
    places = torch.arange(1, points + 1, dtype=torch.float64) / points
    mean, square = places.mean(), places.square().mean()
    matrix, vector = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for task, end in ((first, before), (second, alone)):
        hessian, slope = task.inputs.T @ task.inputs, task.inputs.T @ task.targets
        matrix += square * hessian
        vector += square * hessian @ end - mean * (hessian @ end - slope)
    torch.testing.assert_close(strategy.model.weight.detach()[0], torch.linalg.solve(matrix, vector))


def test_the_descent_starts_near_the_last_network():
    options = {"optimizer": sgd(0.1), "line_optimizer": sgd(0.0), **TRAINING}
    strategy = continual.MCSGD(make_mlp(), start=0.25, **options)
    strategy.fit(make_task(0))
    before = {name: value.detach().clone() for name, value in strategy.model.named_parameters()}
    strategy.fit(make_task(1))
    for name, value in strategy.model.named_parameters():
        torch.testing.assert_close(value.detach(), torch.lerp(before[name], strategy._sequential[name], 0.25))
    assert not torch.equal(before["0.weight"], strategy._sequential["0.weight"])


def test_the_first_network_is_finetuned():
    options = {"batch_size": 80, "epochs": 10, "optimizer": sgd(0.1)}
    strategy, plain = continual.MCSGD(make_mlp(), **options), Finetune(make_mlp(), **options)
    for seed in range(3):
        strategy.fit(make_task(seed))
        plain.fit(make_task(seed))
    for name, value in plain.model.named_parameters():
        torch.testing.assert_close(strategy._sequential[name], value.detach())
    assert not torch.allclose(strategy.model[0].weight, plain.model[0].weight, atol=1e-3)


def test_rotated_digits():
    stream = rotated_digits(4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    options = {"optimizer": sgd(0.2), "first_optimizer": adam(5e-3), "batch_size": 50, "epochs": 6}
    matrix = run_stream(continual.MCSGD(model, line_optimizer=sgd(0.4), **options), stream)
    plain = run_stream(Finetune(model, **options), stream)
    assert matrix.average > plain.average + 0.1, (matrix, plain)
    assert matrix.forgetting < plain.forgetting - 0.1


@pytest.mark.parametrize(("option", "value"), [("points", 0), ("start", -0.1), ("start", 1.1), ("memory_per_class", 0)])
def test_options_that_cannot_be_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must"):
        continual.MCSGD(make_mlp(), **{option: value})
