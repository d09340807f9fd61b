"""The paper's strategy, against what its equations say."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.digits_demo import ResidualCNN
from onebasin.continual import DERPlusPlus, RebasinStrategy, run_stream, sgd
from onebasin.continual.samples import Feed, Samples
from onebasin.continual.strategies.soft_midpoint import SoftMidpoint
from tests.continual.clusters import TRAINING, make_mlp, make_task


@pytest.fixture
def mlp() -> nn.Module:
    return make_mlp()


@pytest.fixture
def symmetry(mlp) -> ob.Symmetry:
    return ob.symmetry(mlp, torch.rand(2, 6))


def make_residual_cnn() -> nn.Module:
    torch.manual_seed(0)
    return ResidualCNN()


def fit_two(strategy: RebasinStrategy, **options) -> tuple[dict, dict]:
    """The state after the first task and after the second."""
    strategy.fit(make_task(0, **options))
    first = {key: value.clone() for key, value in strategy.model.state_dict().items()}
    strategy.fit(make_task(1, **options))
    return first, strategy.model.state_dict()


def test_a_full_move_is_a_permutation_and_leaves_the_function_alone(mlp, symmetry):
    """alpha 0 and no residual: the new network is pi(theta), whose outputs are those of theta."""
    strategy = RebasinStrategy(mlp.double(), symmetry, alpha=0, residual=False, noise=0.5, **TRAINING)
    tasks = [replace(make_task(seed), inputs=make_task(seed).inputs.double()) for seed in range(3)]
    inputs = tasks[2].inputs
    strategy.fit(tasks[0])
    first = {key: value.clone() for key, value in strategy.model.state_dict().items()}
    before = strategy.model(inputs)
    strategy.fit(tasks[1])
    assert strategy.history[0]["moved"] > 0.2
    assert not torch.equal(first["0.weight"], strategy.model[0].weight)
    torch.testing.assert_close(strategy.model(inputs), before, rtol=1e-12, atol=1e-12)
    rows = {tuple(row.tolist()) for row in first["0.weight"]}
    assert {tuple(row.tolist()) for row in strategy.model[0].weight.detach()} == rows


@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_scales_are_learned_beside_the_plans_and_leave_the_function_alone(mlp, kinds):
    symmetry = ob.symmetry(mlp, torch.rand(2, 6), kinds=kinds)
    assert symmetry.scales
    strategy = RebasinStrategy(mlp.double(), symmetry, alpha=0, residual=False, mass=0.9, **TRAINING)
    tasks = [replace(make_task(seed), inputs=make_task(seed).inputs.double()) for seed in range(3)]
    inputs = tasks[2].inputs
    strategy.fit(tasks[0])
    norms = strategy.model[0].weight.detach().norm(dim=1).sort().values
    before = strategy.model(inputs)
    strategy.fit(tasks[1])
    torch.testing.assert_close(strategy.model(inputs), before, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(strategy.model[0].weight.detach().norm(dim=1).sort().values, norms)


def test_scales_have_a_rate_and_a_bound_of_their_own(mlp):
    """With a rate this large the bound is reached; rows are multiplied by the scale, up to the share of pi in the fusion."""
    symmetry = ob.symmetry(mlp, torch.rand(2, 6), kinds="positive")
    options = {"alpha": 0, "residual": False, "mass": 0.9, "scale_optimizer": ob.continual.adam(1.0), "scale_limit": 0.2}
    strategy = RebasinStrategy(mlp, symmetry, **options, **TRAINING)
    strategy.fit(make_task(0))
    norms = strategy.model[0].weight.detach().norm(dim=1)
    strategy.fit(make_task(1))
    moved = strategy.model[0].weight.detach().norm(dim=1)
    ratios = (moved[:, None] / norms).log().abs()  # of each row to the one that it was
    assert ratios.min(1).values.max() <= 0.2 + 1e-6
    assert (moved.sort().values - norms.sort().values).abs().max() > 1e-3
    with pytest.raises(ValueError, match="scale_limit must be positive"):
        RebasinStrategy(mlp, symmetry, scale_limit=0.0)


def test_without_a_move_and_without_a_residual_nothing_changes(mlp, symmetry):
    first, second = fit_two(RebasinStrategy(mlp, symmetry, alpha=1, residual=False, noise=0.5, **TRAINING))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_the_two_fusions_exchange_alpha(mlp, symmetry):
    options = {**TRAINING, "noise": 0.5}
    states = [
        fit_two(RebasinStrategy(mlp, symmetry, alpha=alpha, fusion=fusion, **options))[1]
        for alpha, fusion in ((0.75, "code"), (0.25, "paper"), (0.75, "paper"))
    ]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert any(not torch.equal(value, states[2][key]) for key, value in states[0].items())


def test_the_residual_is_all_that_changes_without_groups(mlp, symmetry):
    strategy = RebasinStrategy(mlp, symmetry, groups=(), **TRAINING)
    first, second = fit_two(strategy)
    length = sum(float((second[key] - first[key]).square().sum()) for key in first) ** 0.5
    assert strategy.history == [{"task": 1.0, "moved": 0.0, "residual": pytest.approx(length, rel=1e-4)}]


def test_clip_and_decay_bound_the_residual(mlp, symmetry):
    """Each step is at most lr * clip, so after n of them no entry is beyond n lr clip, nor beyond clip / beta."""
    options = {"groups": (), "clip": 1e-3, "optimizer": sgd(0.5, weight_decay=1.0), **TRAINING}
    first, second = fit_two(RebasinStrategy(mlp, symmetry, **options))
    start = 5e-4  # of the residual: five standard deviations
    assert max(float((second[key] - first[key]).abs().max()) for key in first) < 1e-3 + start
    free, far = fit_two(RebasinStrategy(mlp, symmetry, **{**options, "clip": None}))
    assert max(float((far[key] - free[key]).abs().max()) for key in first) > 1e-2


def test_groups_choose_what_moves():
    model = make_residual_cnn()
    stream = ob.continual.rotated_digits(2)
    symmetry = ob.symmetry(model, stream.train[0].inputs[:2])
    assert list(symmetry.groups) == ["stem", "conv1"]
    strategy = RebasinStrategy(model, symmetry, groups=["conv*"], residual=False, alpha=0, noise=1.0, epochs=1)
    strategy.fit(stream.train[0])
    stem, inner = strategy.model.stem.weight.detach().clone(), strategy.model.conv1.weight.detach().clone()
    strategy.fit(stream.train[1])
    assert torch.equal(strategy.model.stem.weight, stem)
    assert not torch.equal(strategy.model.conv1.weight, inner)


def test_a_residual_network_with_batch_norm_learns_a_stream():
    model = make_residual_cnn()
    stream = ob.continual.rotated_digits(2, degrees=90)
    symmetry = ob.symmetry(model, stream.train[0].inputs[:2])
    options = {"optimizer": sgd(0.1), "clip": None, "first_epochs": 3, "first_optimizer": ob.continual.adam(5e-3)}
    strategy = RebasinStrategy(model, symmetry, batch_size=50, epochs=3, **options)
    matrix = run_stream(strategy, stream)
    assert strategy.history[0]["moved"] > 0.2
    assert min(matrix.rows[1]) > 0.85, matrix.rows


def test_hardenings_are_judged_with_the_statistics_of_the_batch():
    """The kept ones are far from any batch here: with them all permutations would have nearly the same cost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    symmetry = ob.symmetry(model, torch.rand(2, 6))
    strategy = RebasinStrategy(model, symmetry, **TRAINING)
    strategy.fit(make_task(0))
    strategy.model[1].running_mean.fill_(3.0)
    strategy.model[1].running_var.fill_(1e4)
    before = {key: value.clone() for key, value in strategy.model.state_dict().items()}
    permutations = [symmetry.random(torch.Generator().manual_seed(seed)) for seed in range(5)]
    costs = []

    class Net:
        def transform(self):
            return ob.Transform(permutations[0], {})

        def permutation(self, cost):
            costs.extend(cost(each) for each in permutations)
            return permutations[0]

    samples = strategy._add_task(make_task(1))
    point = SoftMidpoint(strategy.model, symmetry, None, False, torch.Generator().manual_seed(3))
    strategy._choose_transform(point, Net(), samples)

    generator = torch.Generator().manual_seed(3)
    feeds = [Feed(each, 500, 1, generator) for each in (samples, strategy.memory.samples)]
    batch = Samples.join([feed.draw() for feed in feeds])
    trained = copy.deepcopy(strategy.model).train()
    for permutation, cost in zip(permutations, costs, strict=True):
        trained.load_state_dict(point.fuse(ob.Transform(permutation, {}), 0.5), strict=False)
        assert cost == pytest.approx(float(nn.functional.cross_entropy(trained(batch.inputs), batch.targets).detach()))
    assert max(costs) - min(costs) > 0.1
    assert all(torch.equal(value, before[key]) for key, value in strategy.model.state_dict().items())
    assert not strategy.model[1].training
    assert strategy.model[1].track_running_stats


def test_rotated_digits():
    """Better than finetuning by a margin, and units do move."""
    stream = ob.continual.rotated_digits(4)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    symmetry = ob.symmetry(make(), stream.train[0].inputs[:2])
    options = {
        "optimizer": sgd(0.2),
        "clip": None,
        "first_optimizer": ob.continual.adam(5e-3),
        "batch_size": 50,
        "epochs": 6,
    }
    strategy = RebasinStrategy(make(), symmetry, weighting="equal", mass=0.9, **options)
    matrix = run_stream(strategy, stream)
    plain = run_stream(ob.continual.Finetune(make(), optimizer=sgd(0.2), batch_size=50, epochs=6), stream)
    assert matrix.average > plain.average + 0.1
    assert matrix.forgetting < plain.forgetting - 0.1
    assert any(entry["moved"] > 0 for entry in strategy.history)


def test_refusals(mlp, symmetry):
    with pytest.raises(ValueError, match="alpha must lie"):
        RebasinStrategy(mlp, symmetry, alpha=1.2)
    with pytest.raises(ValueError, match="fusion"):
        RebasinStrategy(mlp, symmetry, fusion="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to learn with"):
        RebasinStrategy(mlp, symmetry, groups=(), residual=False)
    with pytest.raises(ValueError, match="no group matches"):
        RebasinStrategy(mlp, symmetry, groups=["conv*"])
    with pytest.raises(ValueError, match="symmetry expects"):
        RebasinStrategy(make_mlp(width=9), symmetry)


@pytest.mark.parametrize(
    ("option", "value"), [("mass", 1.5), ("tau", 0.0), ("num_iters", 0), ("solver_steps", 0), ("clip", 0.0)]
)
def test_what_the_second_task_could_not_do_is_refused_before_the_first(mlp, symmetry, option, value):
    with pytest.raises(ValueError, match=f"{option} must"):
        RebasinStrategy(mlp, symmetry, **{option: value})


def test_with_recall_and_nothing_permuted_it_is_dark_experience_replay(mlp, symmetry, monkeypatch):
    """(new + old) / 2 + recall kept, with twice the step: new + old + 2 recall kept."""
    monkeypatch.setattr(torch, "randn", lambda *shape, generator=None, **options: torch.zeros(*shape, **options))
    options = {"batch_size": 80, "epochs": 10, "first_optimizer": sgd(0.1)}  # a batch is everything: no order matters
    ours = RebasinStrategy(
        mlp, symmetry, groups=(), clip=None, weighting="equal", recall=0.2, optimizer=sgd(0.04), **options
    )
    theirs = DERPlusPlus(mlp, alpha=0.4, beta=1.0, optimizer=sgd(0.02), **options)
    for task in [make_task(seed) for seed in range(3)]:
        ours.fit(task)
        theirs.fit(task)
    for key, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_a_recall_that_cannot_be_is_refused(mlp, symmetry):
    with pytest.raises(ValueError, match="recall must not be negative"):
        RebasinStrategy(mlp, symmetry, recall=-1.0)
    with pytest.raises(ValueError, match="recall stores outputs with the memory"):
        RebasinStrategy(mlp, symmetry, recall=0.5, memory_per_class=0)


def test_steps_after_the_fusion_lower_its_cost(mlp, symmetry):
    """Half of the steps on the network that is kept give a lower cost than all of them on the midpoint."""
    options = {"batch_size": 40, "epochs": 40, "noise": 0.5, "alpha": 0.8, "clip": None, "optimizer": sgd(0.02)}
    task = make_task(1)
    costs = []
    for share in (0.0, 0.5):
        strategy = RebasinStrategy(mlp, symmetry, share_after_fusion=share, **options)
        strategy.fit(make_task(0))
        strategy.fit(task)
        assert strategy.history[0]["moved"] > 0
        costs.append(float(nn.functional.cross_entropy(strategy.model(task.inputs), task.targets).detach()))
    assert costs[1] < costs[0]


@pytest.mark.parametrize(("share", "residual"), [(1.0, True), (-0.1, True), (0.5, False)])
def test_steps_after_the_fusion_that_cannot_be_are_refused(mlp, symmetry, share, residual):
    with pytest.raises(ValueError, match="share_after_fusion must lie in"):
        RebasinStrategy(mlp, symmetry, share_after_fusion=share, residual=residual)
