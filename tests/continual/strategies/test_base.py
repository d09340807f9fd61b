"""What holds for every strategy."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import onebasin as ob
from onebasin import continual
from onebasin.continual import Finetune, Task, accuracy, adam
from tests.continual.clusters import TRAINING, make_mlp, make_task


def example_for(model: nn.Module) -> torch.Tensor:
    return torch.rand(2, 6).to(next(model.parameters()))


def make_rebasin(model: nn.Module, **options) -> continual.RebasinStrategy:
    return continual.RebasinStrategy(model, ob.symmetry(model, example_for(model), verify=False), **options)


def make_clewi(model: nn.Module, **options) -> continual.CLeWI:
    return continual.CLeWI(model, ob.symmetry(model, example_for(model), verify=False), **options)


STRATEGIES = {
    "finetune": continual.Finetune,
    "ewc": lambda model, **options: continual.EWC(model, strength=10, num_fisher=20, **options),
    "lwf": continual.LwF,
    "agem": continual.AGEM,
    "replay": continual.Replay,
    "derpp": continual.DERPlusPlus,
    "joint": continual.Joint,
    "mcsgd": continual.MCSGD,
    "stable sgd": continual.StableSGD,
    "clewi": make_clewi,
    "rebasin": lambda model, **options: make_rebasin(model, noise=0.1, **options),
    "rebasin, residual alone": lambda model, **options: make_rebasin(model, groups=(), **options),
    "rebasin with recall": lambda model, **options: make_rebasin(model, noise=0.1, recall=0.5, **options),
    "rebasin with steps after the fusion": lambda model, **options: make_rebasin(
        model, noise=0.1, recall=0.5, share_after_fusion=0.5, **options
    ),
}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


@pytest.fixture
def mlp():
    return make_mlp()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key


@every_strategy
def test_the_users_model_is_left_alone(make):
    model = make_mlp().train()
    before = copy.deepcopy(model)
    strategy = make(model, **TRAINING)
    for seed in range(2):
        strategy.fit(make_task(seed))
    assert_same(model, before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not strategy.model.training
    assert strategy.num_tasks == 2
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), strategy.model.parameters(), strict=True))


@every_strategy
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(make):
    tasks = [make_task(seed, (2 * seed, 2 * seed + 1), heads=True) for seed in (0, 1)] + [make_task(2, (1, 2), heads=True)]
    through, first = make(make_mlp(), **TRAINING), make(make_mlp(), **TRAINING)
    for task in tasks:
        through.fit(task)
    for task in tasks[:2]:
        first.fit(task)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(make_mlp(seed=9), **TRAINING)
    second.load_state_dict(torch.load(file, weights_only=True))
    second.fit(tasks[2])
    assert_same(through.model, second.model)
    assert second.heads == through.heads
    assert len(second.memory) == len(through.memory)
    if len(through.memory):  # the resumed one chooses the same examples of the last task
        assert torch.equal(second.memory.samples.inputs, through.memory.samples.inputs)
        assert (second._stored_outputs is None) == (through._stored_outputs is None)
        assert second._stored_outputs is None or torch.equal(second._stored_outputs, through._stored_outputs)


@every_strategy
def test_a_state_stays_as_it_was_when_the_strategy_goes_on(make):
    strategy = make(make_mlp(), **TRAINING)
    strategy.fit(make_task(0))
    state = strategy.state_dict()
    before = copy.deepcopy(state)
    strategy.fit(make_task(1))
    for now, then in zip(tree_leaves(state), tree_leaves(before), strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then


def test_there_is_no_state_within_a_task():
    strategy = continual.Replay(make_mlp(), batch_size=1, epochs=2)
    before = strategy.state_dict()
    portions = strategy.learn(make_task(0))
    next(portions)
    with pytest.raises(ValueError, match="between two tasks"):
        strategy.state_dict()
    strategy.load_state_dict(before)  # as after a task that was broken off
    assert strategy.num_tasks == 0
    strategy.fit(make_task(0))
    strategy.state_dict()


def test_a_state_with_outputs_needs_a_strategy_that_stores_them():
    plain, storing = make_rebasin(make_mlp(), **TRAINING), make_rebasin(make_mlp(), recall=0.5, **TRAINING)
    storing.load_state_dict(plain.state_dict())  # nothing is stored yet
    for strategy in (plain, storing):
        strategy.fit(make_task(0))
    with pytest.raises(ValueError, match="with stored outputs"):
        storing.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="without stored outputs"):
        plain.load_state_dict(storing.state_dict())


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_portions_count_the_steps_of_a_task(share):
    strategy = make_rebasin(make_mlp(), share_after_fusion=share, batch_size=1, epochs=3)
    strategy.fit(make_task(0))
    counts = list(strategy.learn(make_task(1)))
    assert counts == sorted(set(counts))
    assert counts[-1] == 240


def test_with_the_permutation_and_without_it_the_batches_are_the_same():
    orders = []
    for groups in (None, ()):
        strategy = make_rebasin(make_mlp(), groups=groups, noise=0.1, **TRAINING)
        drawn = []
        for seed in range(3):
            for _ in strategy.learn(make_task(seed)):
                drawn += [feed._order.clone() for feed in strategy.feeds]
        orders.append(drawn)
    assert len(orders[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*orders, strict=True))


@every_strategy
def test_the_same_seed_gives_the_same_network(make):
    networks = []
    for seed in (0, 0, 1):
        strategy = make(make_mlp(), seed=seed, **TRAINING)
        for number in range(2):
            strategy.fit(make_task(number))
        networks.append(strategy.model)
    assert_same(networks[0], networks[1])
    assert any(not torch.equal(a, b) for a, b in zip(networks[0].parameters(), networks[2].parameters(), strict=True))


def test_strategies_of_one_seed_keep_the_same_examples():
    """So that they can be compared in pairs: five examples of a class are chance enough."""
    memories = []
    for name in ("replay", "derpp", "agem", "mcsgd", "clewi", "rebasin", "rebasin, residual alone"):
        strategy = STRATEGIES[name](make_mlp(), seed=3, memory_per_class=2, **TRAINING)
        for number in range(3):
            strategy.fit(make_task(number))
        memories.append(strategy.memory.samples.inputs)
    assert all(torch.equal(memory, memories[0]) for memory in memories[1:])


@every_strategy
def test_a_task_with_a_head_does_not_touch_the_other_outputs(make):
    strategy = make(make_mlp(), first_optimizer=continual.sgd(), **TRAINING)
    before = strategy.model[-1].bias.detach().clone()
    strategy.fit(make_task(0, (0, 2), heads=True))
    changed = strategy.model[-1].bias != before
    assert changed.tolist() == [True, False, True, False]


@every_strategy
def test_batch_norm(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    strategy = make(model, first_optimizer=adam(0.01), first_epochs=20, **TRAINING)
    for seed in range(2):
        strategy.fit(make_task(seed))
    assert float(accuracy(strategy.model, make_task(0))) + float(accuracy(strategy.model, make_task(1))) > 1.0
    assert not torch.equal(strategy.model[1].running_mean, model[1].running_mean)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_strategy
def test_captured_steps_train_as_plain_ones_do(make):
    """The same kernels in the same order; 80 steps per task, of which all but a few are replayed."""
    states = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)).cuda()
        strategy = make(model, first_optimizer=adam(0.01), batch_size=20, epochs=20, capture=capture)
        for seed in range(2):
            strategy.fit(make_task(seed))
        states.append(strategy.model.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-3, atol=1e-4)


def test_norms_are_reset_on_equal_shares_of_all_tasks():
    """Inputs of the first task lie at -1, of the second at 1: their mean must come out near zero, not near the last task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 2))
    means = {}
    for reset in (True, False):
        strategy = continual.Replay(model, reset_norms=reset, batch_size=20, replay_size=1, memory_per_class=10)
        for place in (-1.0, 1.0):
            inputs = place + 0.01 * torch.randn(100, 1)
            strategy.fit(Task(inputs, torch.arange(100) % 2))
        means[reset] = float(strategy.model[0].running_mean)
    assert abs(means[True]) < 0.02
    assert means[False] > 0.5


def test_refusals(mlp):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        Finetune(mlp, batch_size=0)
    with pytest.raises(ValueError, match="CUDA"):
        Finetune(mlp, capture=True)
    with pytest.raises(ValueError, match="no parameters"):
        Finetune(nn.ReLU())
    with pytest.raises(ValueError, match="weighting"):
        continual.Replay(mlp, weighting="half")  # type: ignore[arg-type]
    strategy = Finetune(mlp)
    with pytest.raises(ValueError, match="not all outputs"):
        strategy.fit(Task(torch.rand(4, 6), torch.tensor([0, 1, 8, 9]), (0, 1, 8, 9)))
    with pytest.raises(ValueError, match="not among its classes"):
        strategy.fit(Task(torch.rand(4, 6), torch.tensor([0, 1, 2, 3]), (0, 1)))
    with pytest.raises(ValueError, match="labels from 0 to 4, the model has 4 outputs"):
        strategy.fit(Task(torch.rand(4, 6), torch.tensor([0, 1, 2, 4])))
    with pytest.raises(ValueError, match="labels from -1 to 2"):
        strategy.fit(Task(torch.rand(4, 6), torch.tensor([0, 1, 2, -1])))
    assert strategy.num_tasks == 0
    with pytest.raises(ValueError, match="expected the state of a Finetune"):
        strategy.load_state_dict(continual.Replay(mlp).state_dict())


def test_a_strategy_without_a_cost_is_abstract(mlp):
    class Incomplete(continual.Strategy):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete(mlp)
