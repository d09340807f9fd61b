import pytest
import torch
from torch.nn import functional

from onebasin import continual
from tests.continual.clusters import TRAINING, make_mlp, make_task


@pytest.mark.parametrize(("weighting", "share"), [("pooled", 20 / 28), ("equal", 0.5)])
def test_replay_weighs_the_two_batches(weighting, share):
    strategy = continual.Replay(make_mlp(), weighting=weighting, memory_per_class=2, **TRAINING)
    first, second = make_task(0), make_task(1, count=20)
    strategy.fit(first)
    memory = strategy.memory.samples
    strategy.open_feeds(strategy._add_task(second), 1)
    new = functional.cross_entropy(strategy.model(second.inputs), second.targets)
    old = functional.cross_entropy(strategy.model(memory.inputs), memory.targets)
    torch.testing.assert_close(strategy.cost(), share * new + (1 - share) * old)
