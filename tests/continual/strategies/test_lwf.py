import copy

import torch
from torch.nn import functional

from onebasin import continual
from tests.continual.clusters import TRAINING, make_mlp, make_task


def test_distillation_is_the_cross_entropy_to_the_old_outputs_in_each_old_head():
    strategy = continual.LwF(make_mlp(), strength=0.7, temperature=1.5, **TRAINING)
    strategy.fit(make_task(0, (0, 1), heads=True))
    strategy.fit(make_task(1, (1, 2, 3), heads=True))
    teacher = copy.deepcopy(strategy.model)
    task = make_task(2, (0, 3), count=10, heads=True)
    strategy.batch_size = 10
    samples = strategy._add_task(task)
    strategy.make_step(samples, 1)
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        output, before = strategy.model(task.inputs), teacher(task.inputs)
        expected = functional.cross_entropy(output[:, [0, 3]], (task.targets == 3).long())
        for classes in ([0, 1], [1, 2, 3]):
            old = (before[:, classes] / 1.5).softmax(1)
            expected += 0.7 * functional.cross_entropy(output[:, classes] / 1.5, old)
        torch.testing.assert_close(strategy.cost(), expected)


def test_distillation_at_a_low_temperature_is_a_number():
    strategy = continual.LwF(make_mlp(), temperature=0.05, **TRAINING)
    strategy.fit(make_task(0, (0, 1), heads=True))
    strategy.make_step(strategy._add_task(make_task(1, (2, 3), heads=True)), 1)
    assert bool(strategy.cost().isfinite())


def test_tasks_that_share_a_head_count_as_one():
    strategy = continual.LwF(make_mlp(), **TRAINING)
    for seed in range(3):
        strategy.fit(make_task(seed))
    assert strategy._old_heads.tolist() == [0]
