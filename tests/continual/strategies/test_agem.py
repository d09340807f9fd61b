import torch
from torch.nn import functional

from onebasin import continual
from onebasin.continual.strategies.agem import project
from tests.continual.clusters import make_mlp, make_task


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
        vectors.append(torch.cat([g.flatten() for g in torch.autograd.grad(cost, list(strategy.model.parameters()))]))
    strategy.fit(second)
    step = torch.cat([(b - p.detach()).flatten() for p, b in zip(strategy.model.parameters(), before, strict=True)])
    assert float(vectors[0] @ vectors[1]) < 0
    torch.testing.assert_close(step, 0.5 * project(*vectors), atol=1e-6, rtol=1e-4)
