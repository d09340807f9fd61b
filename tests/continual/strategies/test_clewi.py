"""CLeWI: its network is the interpolation of the new network and the aligned old one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin import continual
from onebasin.continual import CLeWI, Finetune, Replay, Task, adam, rotated_digits, run_stream, sgd, split_digits
from tests.continual.clusters import TRAINING, make_mlp, make_task


@pytest.fixture
def mlp() -> nn.Module:
    return make_mlp().double()


@pytest.fixture
def symmetry(mlp) -> ob.Symmetry:
    return ob.symmetry(mlp, torch.rand(2, 6, dtype=torch.float64))


def make_double_task(seed: int) -> Task:
    task = make_task(seed)
    return replace(task, inputs=task.inputs.double())


class Shuffled(CLeWI):
    """The old network is a permuted copy of itself: the same function."""

    def make_step(self, samples, num_steps):
        step = super().make_step(samples, num_steps)
        if self._old is not None:
            permutation = self.symmetry.random(torch.Generator().manual_seed(1))
            self._old.load_state_dict(permutation.apply(self._old))
        return step


def test_the_network_is_the_interpolation_of_the_aligned_networks(mlp, symmetry):
    new = Replay(mlp, **TRAINING)
    new.fit(make_double_task(0))
    old = {name: value.detach().clone() for name, value in new.model.named_parameters()}
    new.fit(make_double_task(1))
    strategy = Shuffled(mlp, symmetry, alpha=0.4, **TRAINING)
    for number in range(2):
        strategy.fit(make_double_task(number))
    aligned = {  # pi(old), from theta = 0.6 new + 0.4 pi(old)
        name: (value.detach() - 0.6 * new.model.get_parameter(name).detach()) / 0.4
        for name, value in strategy.model.named_parameters()
    }
    inputs = make_double_task(2).inputs
    expected = torch.func.functional_call(mlp, old, (inputs,))
    torch.testing.assert_close(torch.func.functional_call(mlp, aligned, (inputs,)), expected, rtol=1e-9, atol=1e-9)
    # Two epochs hardly move a unit, so matching activations finds the way back.
    assert strategy.history == [{"task": 1.0, "moved": pytest.approx(strategy.history[0]["moved"])}]
    assert strategy.history[0]["moved"] > 0.5
    for name, value in old.items():
        torch.testing.assert_close(aligned[name], value, rtol=1e-9, atol=1e-9)


def test_with_alpha_zero_it_is_replay_and_with_one_the_old_function(mlp, symmetry):
    strategies = [
        Replay(mlp, **TRAINING),
        CLeWI(mlp, symmetry, alpha=0, **TRAINING),
        CLeWI(mlp, symmetry, alpha=1, **TRAINING),
    ]
    for strategy in strategies:
        strategy.fit(make_double_task(0))
    inputs = make_double_task(2).inputs
    before = strategies[2].model(inputs)
    for strategy in strategies:
        strategy.fit(make_double_task(1))
    for key, value in strategies[0].model.state_dict().items():
        assert torch.equal(strategies[1].model.state_dict()[key], value)
    torch.testing.assert_close(strategies[2].model(inputs), before)


def test_activations_are_those_of_all_tasks_in_equal_shares(mlp, symmetry):
    strategy = CLeWI(mlp, symmetry, memory_per_class=2, **TRAINING)
    for number in range(2):
        strategy.fit(replace(make_double_task(number), inputs=torch.full((80, 6), float(number), dtype=torch.float64)))
    samples = strategy._add_task(replace(make_double_task(2), inputs=torch.full((80, 6), 2.0, dtype=torch.float64)))
    batches = torch.cat(strategy.mixed_batches(samples))[:, 0]
    assert torch.bincount(batches.int()).div(len(batches)).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)


@pytest.mark.parametrize("stream", [rotated_digits(3), split_digits(5, heads=False)], ids=["rotated", "split"])
def test_digits(stream):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    symmetry = ob.symmetry(model, stream.train[0].inputs[:2])
    options = {"optimizer": sgd(0.1), "first_optimizer": adam(5e-3), "batch_size": 50, "epochs": 6}
    matrix = run_stream(CLeWI(model, symmetry, **options), stream)
    plain = run_stream(Finetune(model, **options), stream)
    assert matrix.average > plain.average + 0.1, (matrix, plain)
    assert matrix.forgetting < plain.forgetting - 0.1


def test_refusals(mlp, symmetry):
    with pytest.raises(ValueError, match="alpha must lie"):
        CLeWI(mlp, symmetry, alpha=1.5)
    with pytest.raises(ValueError, match="memory_per_class must be at least 1"):
        CLeWI(mlp, symmetry, memory_per_class=0)
    with pytest.raises(ValueError, match="members=2"):
        CLeWI(mlp, symmetry, members=2)
    with pytest.raises(ValueError, match="symmetry expects"):
        CLeWI(make_mlp(width=9), symmetry)
    by_hand = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "1.weight": "o h", "1.bias": "o"}, free=["h"])
    with pytest.raises(ValueError, match="where activations are"):
        continual.CLeWI(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), by_hand)
