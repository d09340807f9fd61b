"""Finetuning: each task alone."""

import torch
from torch.nn import functional as F

from onebasin.continual import Finetune
from tests.continual.clusters import TRAINING, make_mlp, make_task


def test_the_cost_is_the_loss_on_the_task_alone():
    strategy = Finetune(make_mlp(), batch_size=80, epochs=1)
    strategy.fit(make_task(0))
    assert len(strategy.memory) == 0
    task = make_task(1)
    strategy.open_feeds(strategy._add_task(task), 1)
    assert len(strategy.feeds) == 1
    torch.testing.assert_close(strategy.cost(), F.cross_entropy(strategy.model(task.inputs), task.targets))


def test_what_is_not_seen_again_is_forgotten():
    first, second = make_task(0, (0, 1)), make_task(1, (2, 3))
    strategy = Finetune(make_mlp(), **TRAINING | {"epochs": 20})
    strategy.fit(first)
    learned = strategy.accuracies([first])
    strategy.fit(second)
    assert learned > 0.9
    assert torch.equal(strategy.accuracies([first, second]).round(), torch.tensor([0.0, 1.0]))
