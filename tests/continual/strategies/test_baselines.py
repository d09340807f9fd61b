"""Each baseline against its source's equation, computed another way."""

import copy

import pytest
import torch
from torch.nn import functional

from onebasin import continual
from onebasin.continual.samples import Samples
from onebasin.continual.strategies.agem import project
from tests.continual.clusters import TRAINING, make_mlp, make_task


def gradients(strategy, cost) -> list[torch.Tensor]:
    return list(torch.autograd.grad(cost, list(strategy.model.parameters())))


def as_samples(task, head: int = 0) -> Samples:
    return Samples(task.inputs, task.targets, torch.full((len(task),), head))


# ---------------------------------------------------------------------------------------------------------------- A-GEM


def test_a_gradient_that_agrees_is_kept():
    assert project(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])).tolist() == [1, 2]


def test_a_gradient_that_disagrees_ends_orthogonal_to_the_reference():
    torch.manual_seed(0)
    reference = torch.randn(20, dtype=torch.float64)
    gradient = 0.1 * torch.randn(20, dtype=torch.float64) - reference
    projected = project(gradient, reference)
    assert abs(float(projected @ reference)) < 1e-12
    ratios = (gradient - projected) / reference
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))


def test_without_a_reference_nothing_is_projected():
    assert project(torch.ones(2), torch.zeros(2)).tolist() == [1, 1]


def test_the_step_is_along_the_projected_gradient():
    strategy = continual.AGEM(make_mlp(), optimizer=continual.sgd(0.5), batch_size=80, epochs=1, memory_per_class=2)
    first, second = make_task(0), make_task(1)
    strategy.fit(first)
    memory, before = strategy.memory.samples, [p.detach().clone() for p in strategy.model.parameters()]
    vectors = []
    for inputs, targets in ((second.inputs, second.targets), (memory.inputs, memory.targets)):
        cost = functional.cross_entropy(strategy.model(inputs), targets)
        vectors.append(torch.cat([g.flatten() for g in gradients(strategy, cost)]))
    strategy.fit(second)
    step = torch.cat([(b - p.detach()).flatten() for p, b in zip(strategy.model.parameters(), before, strict=True)])
    assert float(vectors[0] @ vectors[1]) < 0
    torch.testing.assert_close(step, 0.5 * project(*vectors), atol=1e-6, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------------ EWC


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
    plain._feed = strategy._feed
    strategy.feed._position.zero_()
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


# ------------------------------------------------------------------------------------------------------------------ LwF


def test_distillation_is_the_cross_entropy_to_the_old_answers_in_each_old_head():
    strategy = continual.LwF(make_mlp(), strength=0.7, temperature=1.5, **TRAINING)
    strategy.fit(make_task(0, (0, 1), heads=True))
    strategy.fit(make_task(1, (1, 2, 3), heads=True))
    teacher = copy.deepcopy(strategy.model)
    task = make_task(2, (0, 3), count=10, heads=True)
    strategy.batch_size = 10
    samples = strategy._admit(task)
    strategy.begin(samples, 1)
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
    strategy.begin(strategy._admit(make_task(1, (2, 3), heads=True)), 1)
    assert bool(strategy.cost().isfinite())


def test_tasks_that_share_a_head_count_as_one():
    strategy = continual.LwF(make_mlp(), **TRAINING)
    for seed in range(3):
        strategy.fit(make_task(seed))
    assert strategy._old_heads.tolist() == [0]


# ----------------------------------------------------------------------------------------------------------- replay, DER++


@pytest.mark.parametrize(("weighting", "share"), [("pooled", 20 / 28), ("equal", 0.5)])
def test_replay_weighs_the_two_batches(weighting, share):
    strategy = continual.Replay(make_mlp(), weighting=weighting, memory_per_class=2, **TRAINING)
    first, second = make_task(0), make_task(1, count=20)
    strategy.fit(first)
    memory = strategy.memory.samples
    strategy.open_feeds(strategy._admit(second), 1)
    new = functional.cross_entropy(strategy.model(second.inputs), second.targets)
    old = functional.cross_entropy(strategy.model(memory.inputs), memory.targets)
    torch.testing.assert_close(strategy.cost(), share * new + (1 - share) * old)


def test_der_adds_the_distance_to_what_was_answered():
    strategy = continual.DERPlusPlus(make_mlp(), alpha=0.3, beta=0.6, memory_per_class=2, **TRAINING)
    first, second = make_task(0), make_task(1, count=20)
    strategy.fit(first)
    memory, answers = strategy.memory.samples, strategy.model(strategy.memory.samples.inputs).detach()
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    strategy.open_feeds(strategy._admit(second), 1)
    output = strategy.model(memory.inputs)
    expected = (
        functional.cross_entropy(strategy.model(second.inputs), second.targets)
        + 0.6 * functional.cross_entropy(output, memory.targets)
        + 0.3 * (output - answers).square().mean()
    )
    torch.testing.assert_close(strategy.cost(), expected)


# ---------------------------------------------------------------------------------------------------------------- joint


def test_joint_training_is_training_on_all_tasks_at_once():
    tasks = [make_task(seed) for seed in range(2)]
    everything = continual.Task(torch.cat([t.inputs for t in tasks]), torch.cat([t.targets for t in tasks]))
    joint, plain = continual.Joint(make_mlp(), **TRAINING), continual.Finetune(make_mlp(), **TRAINING)
    joint.gather(tasks[0])
    joint.fit(tasks[1])
    plain.fit(everything)
    for a, b in zip(joint.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
