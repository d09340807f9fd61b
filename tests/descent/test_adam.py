"""Our Adam is PyTorch's. Its kernel is compiled on a GPU, else interpreted if Triton is installed."""

import os

import numpy as np
import pytest
import torch

from onebasin.descent.adam import TritonAdam, make_adam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported


def follow(optimizer, params, num_steps=30, seed=0):
    """Walk with gradients of several sizes; the last tensor has none."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for i, p in enumerate(params[:-1]):
            p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (3 * i - 3)).to(p)
        optimizer.step()
    return params


def start():
    torch.manual_seed(0)
    return [torch.randn(shape).to(DEVICE).requires_grad_() for shape in ((2, 30, 30), (7,), (1, 5, 5))]


def test_kernel_is_adam():
    pytest.importorskip("triton")
    if DEVICE == "cpu" and tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
        pytest.skip("Triton's interpreter needs NumPy below 2.4")
    rates = [0.1, 0.2, 0.3]
    ours, theirs = start(), start()
    follow(TritonAdam(ours, rates), ours)
    follow(torch.optim.Adam([{"params": [p], "lr": r} for p, r in zip(theirs, rates, strict=True)]), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fastest_form_is_adam(dtype):
    ours, theirs = ([p.detach().to(dtype).requires_grad_() for p in start()] for _ in range(2))
    follow(make_adam(ours, [0.1, 0.2, 0.3]), ours)
    follow(torch.optim.Adam([{"params": [p], "lr": r} for p, r in zip(theirs, (0.1, 0.2, 0.3), strict=True)]), theirs)
    assert not torch.equal(ours[0], start()[0].to(dtype))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_it_is_the_kernel_and_can_be_captured():
    params = start()
    optimizer = make_adam(params, [0.1] * 3)
    assert isinstance(optimizer, TritonAdam)
    assert not isinstance(make_adam([p.detach().double() for p in params], [0.1] * 3), TritonAdam)
    expected = torch.optim.Adam(copies := [p.detach().clone().requires_grad_() for p in params], lr=0.1)
    for p, q in zip(params, copies, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(9):
        graph.replay()
    for _ in range(10):
        expected.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_moments_can_be_taken_out_and_put_back():
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4), torch.randn(6, 4, 4)

    def descend(param, optimizer, chosen):
        for gradient in chosen:
            param.grad = gradient.clone()
            optimizer.step()
        return param

    whole = torch.nn.Parameter(start.clone())
    descend(whole, make_adam([whole], [0.1]), gradients)
    first = torch.nn.Parameter(start.clone())
    optimizer = make_adam([first], [0.1])
    assert optimizer.moments() == {}
    descend(first, optimizer, gradients[:3])
    second = torch.nn.Parameter(first.detach().clone())
    following = make_adam([second], [0.1])
    following.load_moments(optimizer.moments())
    assert torch.equal(descend(second, following, gradients[3:]), whole)
