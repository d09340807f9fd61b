import pytest
import torch

from onebasin.operator import sinkhorn
from onebasin.operator.adjoint import implicit_gradient
from onebasin.operator.rounds import run_rounds

CONVERGED = 400


def normal(*shape, scale=1.0, seed=0, dtype=torch.float64):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def gradient_of(logits, weights, **arguments):
    logits = logits.detach().requires_grad_()
    sinkhorn(logits, **arguments).backward(weights)
    return logits.grad


def dense_gradient(plan, grad, tau):
    """The implicit system written out and solved by least squares: slow, and hard to get wrong."""
    plan, grad = plan.double(), grad.double()
    rows, columns, weighted = plan.sum(1), plan.sum(0), plan * grad / tau
    upper = torch.cat([rows.diag(), plan], 1)
    lower = torch.cat([plan.T, columns.diag()], 1)
    rhs = torch.cat([weighted.sum(1), weighted.sum(0)]).unsqueeze(1)
    solution = torch.linalg.lstsq(torch.cat([upper, lower]), rhs, driver="gelsd").solution.squeeze(1)
    x, y = solution.split(len(plan))
    return plan * (grad / tau - x[:, None] - y[None, :])


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 4, 4), (2, 1, 3, 3)])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_gradcheck(shape, tau):
    logits = normal(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, tau, CONVERGED), (logits,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("scale", [1, 10, 20])
def test_marginals_are_those_that_were_reached(scale, dtype, tolerance):
    for shape in [(30, 30), (3, 30, 30), (2, 130, 130)]:  # one problem, a batch, a batch taken in turn
        logits, weights = normal(*shape, scale=scale, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
        grad, plan = gradient_of(logits, weights), sinkhorn(logits)
        for problem in zip(*(t.reshape(-1, *shape[-2:]) for t in (grad, plan, weights)), strict=True):
            expected = dense_gradient(*problem[1:], 1.0)
            if shape[-1] < 100 or scale < 20:
                assert (problem[0].double() - expected).norm() <= tolerance * expected.norm()


def test_gradient_lies_off_the_gauge():
    grad = gradient_of(normal(3, 25, 25, scale=2), normal(3, 25, 25, seed=1), num_iters=CONVERGED)
    assert grad.sum(-1).abs().max() < 1e-13
    assert grad.sum(-2).abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tau", [1.0, 0.01])
def test_hard_plans_have_a_vanishing_gradient(dtype, tau):
    for shape in [(12, 12), (3, 12, 12)]:
        logits = (torch.eye(12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))] * 1e3).to(dtype)
        weights = normal(*shape, dtype=dtype)
        grad = gradient_of(logits.expand(shape), weights, tau=tau)
        assert grad.isfinite().all()
        assert grad.abs().max() <= 8 * torch.finfo(torch.float32).eps / tau * weights.abs().max()


def test_plan_that_falls_into_blocks():
    logits = torch.full((8, 8), -torch.inf, dtype=torch.float64)
    logits[:3, :3], logits[3:, 3:] = normal(3, 3), normal(5, 5, seed=1)
    weights = normal(8, 8, seed=2)
    grad = gradient_of(logits, weights, num_iters=CONVERGED)
    assert torch.allclose(grad[:3, :3], gradient_of(logits[:3, :3], weights[:3, :3], num_iters=CONVERGED))
    assert torch.allclose(grad[3:, 3:], gradient_of(logits[3:, 3:], weights[3:, 3:], num_iters=CONVERGED))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20])
@pytest.mark.parametrize("shape", [(20, 20), (2, 20, 20)])
def test_gradient_is_linear_in_gradients_of_any_size(shape, size):
    logits, weights = normal(*shape, dtype=torch.float32), normal(*shape, seed=1, dtype=torch.float32)
    grad = gradient_of(logits, weights)
    assert torch.allclose(gradient_of(logits, weights * size) / size, grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.5, 8, 500])
def test_code_paths_agree(scale, dtype):
    """The masked loops, for batches and for graph capture, compute what the loop of a single problem does."""
    grad = normal(3, 20, 20, seed=1, dtype=dtype)
    plan, column_sums, _ = run_rounds(normal(3, 20, 20, scale=scale, dtype=dtype), 0.9, 24, 1e-3)
    batch = implicit_gradient(plan, column_sums, grad, 0.9)
    assert torch.equal(batch, implicit_gradient(plan, column_sums, grad, 0.9, read_every=0))
    singles = [implicit_gradient(*problem, 0.9) for problem in zip(plan, column_sums, grad, strict=True)]
    assert torch.allclose(batch, torch.stack(singles), atol=1e4 * torch.finfo(dtype).eps)


def test_every_step_of_the_solver_lowers_the_error():
    logits = 6 * torch.randn(2, 24, 24, dtype=torch.float64)
    weights = torch.randn(2, 24, 24, dtype=torch.float64)

    def gradient(steps: int) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        (sinkhorn(leaf, num_iters=100, solver_steps=steps) * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    exact = gradient(200)
    errors = [float((gradient(steps) - exact).norm() / exact.norm()) for steps in (1, 3, 10, 30)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-2
    with pytest.raises(ValueError, match="solver_steps"):
        sinkhorn(logits, solver_steps=0)
