import pytest
import torch

from onebasin.operator import sinkhorn


def normal(*shape, scale=1.0, seed=0, dtype=torch.float64):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def gradient_of(logits, weights, **arguments):
    logits = logits.detach().requires_grad_()
    sinkhorn(logits, **arguments).backward(weights)
    return logits.grad


def test_gradcheck_of_the_unrolled_gradient_before_convergence():
    logits = normal(2, 4, 4, scale=3).requires_grad_()
    for order in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert order(lambda x: sinkhorn(x, num_iters=3, gradient="unrolled"), (logits,))


@pytest.mark.parametrize("n", [2, 17, 64, 150])
@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
def test_implicit_is_unrolled_at_convergence(n, scale):
    logits, weights = normal(2, n, n, scale=scale), normal(2, n, n, seed=1)
    implicit = gradient_of(logits, weights, tau=0.8, num_iters=3000, tol=1e-12)
    unrolled = gradient_of(logits, weights, tau=0.8, num_iters=3000, tol=1e-12, gradient="unrolled")
    assert (implicit - unrolled).norm() <= 1e-7 * unrolled.norm()
