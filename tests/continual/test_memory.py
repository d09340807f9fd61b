import pytest
import torch

from onebasin.continual.memory import Memory
from onebasin.continual.samples import Samples


def make_samples(targets: list[int], head: int) -> Samples:
    labels = torch.tensor(targets)
    return Samples(torch.arange(len(labels)).float() + 100 * head, labels, torch.full((len(labels),), head))


def test_each_class_of_each_task_has_its_share():
    memory = Memory(3)
    for head in range(2):
        kept = memory.add(make_samples([0, 1, 1, 2] * 10, head))
        assert kept is not None
        assert kept.targets.bincount().tolist() == [3, 3, 3]
        assert len(set(kept.inputs.tolist())) == 9
    assert len(memory) == 18
    assert memory.samples.heads.tolist() == [0] * 9 + [1] * 9
    source = torch.tensor([0, 1, 1, 2] * 10)
    assert torch.equal(memory.samples.targets[:9], source[memory.samples.inputs[:9].long()])


def test_a_class_with_too_few_examples_is_kept_whole():
    kept = Memory(3).add(make_samples([0, 0, 0, 0, 1], 0))
    assert kept is not None
    assert kept.targets.tolist() == [0, 0, 0, 1]


def test_nothing_is_kept_without_room():
    memory = Memory(0)
    assert memory.add(make_samples([0, 1], 0)) is None
    assert len(memory) == 0
    with pytest.raises(ValueError, match="empty"):
        _ = memory.samples
    with pytest.raises(ValueError, match="negative"):
        Memory(-1)


def test_the_choice_is_random_and_seeded():
    task = make_samples([0] * 50, 0)
    chosen = [Memory(5, seed=seed).add(task) for seed in (0, 0, 1)]
    values = [sorted(c.inputs.tolist()) for c in chosen if c is not None]
    assert values[0] == values[1] != values[2]
