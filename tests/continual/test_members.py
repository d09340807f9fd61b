"""Several networks in one, trained side by side, against each of them alone."""

import pytest
import torch

import onebasin as ob
from experiments.continual_networks import StackedMLP, make_mlp
from onebasin import continual
from onebasin.continual.memory import Memory
from onebasin.continual.samples import Feed, Samples

SEEDS = (0, 1, 2)


def make_networks() -> list[torch.nn.Module]:
    networks = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        networks.append(make_mlp(num_hidden=2, width=5).double())
    return networks


def make_task(seed: int) -> continual.Task:
    generator = torch.Generator().manual_seed(seed)
    return continual.Task(torch.rand(30, 1, 28, 28, generator=generator, dtype=torch.float64), torch.arange(30) % 10)


# A batch is everything there is, tasks and memory, so that orders do not matter.
WHOLE = {"batch_size": 60, "epochs": 8, "memory_per_class": 3}
STRATEGIES = {
    "finetune": continual.Finetune,
    "ewc": lambda model, **options: continual.EWC(model, num_fisher=None, strength=5.0, **options),
    "lwf": continual.LwF,
    "agem": continual.AGEM,
    "replay": continual.Replay,
    "derpp": continual.DERPlusPlus,
    "joint": continual.Joint,
    "mcsgd": continual.MCSGD,
    "stable sgd": continual.StableSGD,
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_each_member_is_trained_as_if_alone(make):
    networks = make_networks()
    together = make(StackedMLP(networks), members=len(SEEDS), **WHOLE)
    alone = [make(network, **WHOLE) for network in networks]
    tasks = [make_task(seed) for seed in range(2)]
    for task in tasks:
        for strategy in (together, *alone):
            strategy.fit(task)
    for member, strategy in enumerate(alone):
        for stack, own in zip(together.model.weights, [strategy.model[i] for i in (2, 4, 6)], strict=True):
            torch.testing.assert_close(stack[member], own.weight)
    found = together.accuracies(tasks)
    expected = torch.stack([strategy.accuracies(tasks) for strategy in alone], dim=1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"groups": ()}, {}, {"clip": None}], ids=["residual alone", "re-basin", "without clip"])
def test_rebasin_trains_each_member_as_if_alone(options, monkeypatch):
    """With a residual that starts at zero, the last thing that is drawn at random."""
    monkeypatch.setattr(torch, "randn", lambda *shape, generator=None, **options: torch.zeros(*shape, **options))
    networks = make_networks()
    stacked = StackedMLP(networks)
    options = {"optimizer": continual.sgd(0.5, weight_decay=0.1), "first_optimizer": continual.sgd(0.1), **WHOLE, **options}
    together = continual.RebasinStrategy(stacked, stacked.symmetry(), members=len(SEEDS), **options)
    symmetry = ob.symmetry(networks[0], make_task(0).inputs[:2])
    alone = [continual.RebasinStrategy(network, symmetry, **options) for network in networks]
    for seed in range(2):
        for strategy in (together, *alone):
            strategy.fit(make_task(seed))
    for member, strategy in enumerate(alone):
        for stack, own in zip(together.model.weights, [strategy.model[i] for i in (2, 4, 6)], strict=True):
            torch.testing.assert_close(stack[member], own.weight)
    moved = [strategy.history[0]["moved"] for strategy in alone]
    assert together.history[0]["moved"] == pytest.approx(sum(moved) / len(moved))


def test_a_matrix_of_several_members_is_refused():
    task = make_task(0)
    strategy = continual.Finetune(StackedMLP(make_networks()), members=len(SEEDS), **WHOLE)
    with pytest.raises(ValueError, match="learn_stream"):
        continual.run_stream(strategy, continual.Stream([task], [task]))
    assert strategy.num_tasks == 0


def test_rebasin_permutes_each_member_by_itself():
    """alpha 0 and no residual: a permutation of its own for each member, and no output changes."""
    stacked = StackedMLP(make_networks())
    options = {"alpha": 0.0, "residual": False, "noise": 1.0, "members": len(SEEDS), **WHOLE}
    strategy = continual.RebasinStrategy(stacked, stacked.symmetry(), **options)
    task = make_task(5)
    inputs = task.inputs.repeat_interleave(len(SEEDS), dim=0)
    strategy.fit(make_task(0))
    before, rows = strategy.model(inputs), strategy.model.weights[0].detach().clone()
    strategy.fit(make_task(1))
    assert strategy.history[0]["moved"] > 0
    torch.testing.assert_close(strategy.model(inputs), before)
    for old, new in zip(rows, strategy.model.weights[0].detach(), strict=True):
        assert sorted(map(tuple, old.tolist())) == sorted(map(tuple, new.tolist()))


def test_every_member_has_its_own_memory_and_its_own_order():
    labels = torch.arange(40) % 4
    samples = Samples(torch.arange(40.0), labels, torch.zeros(40, dtype=torch.int64))
    memory, generator = Memory(2, members=3), torch.Generator().manual_seed(0)
    kept = memory.add(samples)
    assert kept is not None
    pools = [set(kept.inputs[member::3].tolist()) for member in range(3)]
    assert [len(pool) for pool in pools] == [8, 8, 8]
    assert pools[0] != pools[1]
    assert all(kept.targets[member::3].bincount().tolist() == [2] * 4 for member in range(3))
    feed = Feed(memory.samples, 4, 4, generator, members=3, partitioned=True)
    batches = [feed.draw().inputs for _ in range(4)]
    for member in range(3):
        seen = torch.cat([batch[member::3] for batch in batches])
        assert sorted(seen.tolist()) == sorted([*pools[member], *pools[member]])
    whole = Feed(samples, 20, 2, generator, members=3)
    batches = [whole.draw().inputs for _ in range(2)]
    for member in range(3):
        assert sorted(torch.cat([batch[member::3] for batch in batches]).tolist()) == list(range(40))
