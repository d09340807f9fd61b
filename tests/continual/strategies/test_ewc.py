import pytest
import torch
from torch.nn import functional

from onebasin import continual
from onebasin.continual.samples import Samples
from tests.continual.clusters import TRAINING, make_mlp, make_task


def gradients(strategy, cost) -> list[torch.Tensor]:
    return list(torch.autograd.grad(cost, list(strategy.model.parameters())))


def as_samples(task, head: int = 0) -> Samples:
    return Samples(task.inputs, task.targets, torch.full((len(task),), head))


def test_the_fisher_information_is_the_mean_of_squared_gradients_of_examples():
    task = make_task(0, count=30)
    strategy = continual.EWC(make_mlp(), num_fisher=None, **TRAINING)
    strategy.fit(task)
    expected = [torch.zeros_like(p) for p in strategy.model.parameters()]
    for x, y in zip(task.inputs, task.targets, strict=True):
        cost = functional.cross_entropy(strategy.model(x[None]), y[None])
        for total, gradient in zip(expected, gradients(strategy, cost), strict=True):
            total += gradient.square() / len(task)
    for a, b in zip(strategy._fisher, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_one_quadratic_pulls_as_all_tasks_do():
    strategy = continual.EWC(make_mlp(), strength=6.0, num_fisher=20, **TRAINING)
    fishers, anchors = [], []
    for seed in range(3):
        total = [f.clone() for f in strategy._fisher] or [torch.zeros_like(p) for p in strategy.model.parameters()]
        strategy.fit(make_task(seed))
        fishers.append([new - old for new, old in zip(strategy._fisher, total, strict=True)])
        anchors.append([p.detach().clone() for p in strategy.model.parameters()])
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    strategy.open_feeds(as_samples(make_task(3)), 2)
    pull = gradients(strategy, strategy.cost())
    strategy.generator.manual_seed(0)
    plain = continual.Finetune(strategy.model, **TRAINING)
    plain.feeds = strategy.feeds
    strategy.feeds[0]._position.zero_()
    plain.model = strategy.model
    own = gradients(plain, plain.cost())
    for i, parameter in enumerate(strategy.model.parameters()):
        springs = sum(
            6.0 * fisher[i] * (parameter.detach() - anchor[i]) for fisher, anchor in zip(fishers, anchors, strict=True)
        )
        torch.testing.assert_close(pull[i] - own[i], springs, atol=2e-4, rtol=1e-3)


def test_batches_before_squaring_make_the_fisher_information_smaller():
    totals = []
    for size in (1, 10):
        strategy = continual.EWC(make_mlp(), num_fisher=None, fisher_batch=size, **TRAINING)
        strategy.fit(make_task(0))
        totals.append(sum(float(f.sum()) for f in strategy._fisher))
    assert totals[1] < totals[0]


@pytest.mark.parametrize("option", ["num_fisher", "fisher_batch"])
def test_a_fisher_information_of_nothing_is_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1"):
        continual.EWC(make_mlp(), **{option: 0})
