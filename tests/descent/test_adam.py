"""Our Adam is PyTorch's; by rows it is Adam on a row of one entry.

The kernel is compiled on a GPU, else interpreted if Triton is installed.
"""

import os

import numpy as np
import pytest
import torch

from onebasin.descent.adam import RowAdam, TritonAdam, make_adam

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


def test_by_rows_a_single_entry_moves_as_in_adam():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.ones(2, 5, 1, dtype=torch.float64).requires_grad_() for _ in range(2))
    optimizers = RowAdam([ours], [0.1]), torch.optim.Adam([theirs], lr=0.1, eps=0.0)
    for _ in range(30):
        ours.grad = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # the number of steps is a float32


def test_by_rows_entries_move_with_the_root_of_their_share():
    gradient = torch.tensor([[-4.0, 1.0, 2.0], [3e-20, 1e-20, 0.0], [0.0, 0.0, 0.0]])
    param = torch.zeros(3, 3, dtype=torch.float64).requires_grad_()
    param.grad = gradient.double()
    RowAdam([param], [0.5]).step()
    expected = torch.tensor([[0.5, -0.25, -0.5 * 0.5**0.5], [-0.5, -0.5 / 3**0.5, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(param.detach(), expected.double(), rtol=1e-4, atol=0.0)


def test_moments_of_one_kind_can_be_loaded_into_the_other():
    torch.manual_seed(0)
    param = torch.randn(2, 4, 4).requires_grad_()
    gradients = torch.randn(3, 2, 4, 4)
    by_entry, by_row = make_adam([param], [0.1]), RowAdam([param], [0.1])
    for optimizer in (by_entry, by_row):
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(by_entry.moments(), by_row.moments())
    by_row.load_moments(by_entry.moments())
    by_entry.load_moments(by_row.moments())
    for each in (by_entry, by_row):
        param.grad = gradients[0].clone()
        each.step()


@pytest.mark.parametrize("make", [make_adam, RowAdam])
def test_moments_can_be_taken_out_and_put_back(make):
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4), torch.randn(6, 4, 4)

    def descend(param, optimizer, chosen):
        for gradient in chosen:
            param.grad = gradient.clone()
            optimizer.step()
        return param

    whole = torch.nn.Parameter(start.clone())
    descend(whole, make([whole], [0.1]), gradients)
    first = torch.nn.Parameter(start.clone())
    optimizer = make([first], [0.1])
    descend(first, optimizer, gradients[:3])
    second = torch.nn.Parameter(first.detach().clone())
    following = make([second], [0.1])
    following.load_moments(optimizer.moments())
    assert torch.equal(descend(second, following, gradients[3:]), whole)


def test_before_the_first_step_there_are_no_moments():
    assert make_adam([torch.zeros(3, 3).requires_grad_()], [0.1]).moments() == {}
