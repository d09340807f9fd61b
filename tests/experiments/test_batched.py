"""Many pairs at once give what `onebasin.align` and `onebasin.linear_path` give for each."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import onebasin as ob
from experiments.batched import align_pairs, measure_paths, permute
from experiments.tasks import TASKS, Data, train_networks

TASK = replace(TASKS["Pol3"], epochs=30)
NUM = 3


@pytest.fixture(scope="module")
def pairs():
    stack = train_networks(TASK, list(range(2 * NUM)), "cpu")
    model = TASK.make_model()
    targets, sources = ({key: value[i::2] for key, value in stack.items()} for i in (0, 1))
    return model, ob.symmetry(model, torch.zeros(1, 1)), sources, targets


def module_of(model: nn.Module, stack: dict, number: int) -> nn.Module:
    import copy

    result = copy.deepcopy(model)
    result.load_state_dict({key: value[number] for key, value in stack.items()})
    return result


DATA = Data(torch.linspace(2, 4, 40)[:, None], torch.linspace(-1, 1, 40)[:, None] ** 3)


@pytest.mark.parametrize("objective", [ob.WeightDistance(), ob.Midpoint(TASK.loss), ob.RandomPoint(TASK.loss)], ids=type)
def test_a_batch_of_pairs_is_aligned_like_each_pair(pairs, objective):
    model, symmetry, sources, targets = pairs
    batches = None if isinstance(objective, ob.WeightDistance) else DATA.batches(20)
    found = align_pairs(model, symmetry, sources, targets, objective, batches, steps=25)
    for number in range(NUM):
        alone = ob.align(
            module_of(model, sources, number), to=module_of(model, targets, number), symmetry=symmetry,
            objective=objective, data=batches, steps=25, polish=False,
            optimizer="adam", check_every=1 if batches is None else 5,
        )  # fmt: skip
        assert found.costs[number] == pytest.approx(alone.cost, rel=1e-4)
        assert all(torch.equal(found.indices[name][number], alone.permutation[name]) for name in symmetry.groups)


def test_permuting_a_stack_keeps_every_function(pairs):
    model, symmetry, sources, _ = pairs
    found = {name: torch.stack([torch.randperm(10) for _ in range(NUM)]) for name in symmetry.groups}
    moved = permute(symmetry, sources, found)
    for number in range(NUM):
        expected = module_of(model, sources, number).double()(DATA.x.double())
        assert torch.allclose(module_of(model, moved, number).double()(DATA.x.double()), expected, atol=1e-6)


def test_paths_are_those_of_linear_path(pairs):
    model, _, sources, targets = pairs
    losses, accuracies = measure_paths(model, TASK.loss, targets, sources, DATA, num_points=5, chunk=15)
    assert np.isnan(accuracies).all()
    for number in range(NUM):
        path = ob.linear_path(
            module_of(model, targets, number), module_of(model, sources, number),
            lambda m: TASK.loss(m(DATA.x), DATA.y).item(), num_points=5,
        )  # fmt: skip
        assert losses[number] == pytest.approx(path.losses, rel=1e-4)


def test_networks_trained_together_are_those_trained_alone():
    together = train_networks(TASK, [3, 4], "cpu")
    alone = train_networks(TASK, [4], "cpu")
    for key, value in together.items():
        assert torch.allclose(value[1], alone[key][0], atol=1e-4)
