"""CUDA against the CPU, and what only a GPU can show: graphs, streams, memory, no waiting for the device."""

import warnings

import pytest
import torch

from onebasin.operator import sinkhorn
from onebasin.operator.implicit import choose_backend, compute_gradient, compute_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = [1, 2, 16, 33, 64, 100, 128, 129, 200, 256, 500, 512, 1000, 1024, 2048]


def normal(*shape, scale=1.0, seed=0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def run(logits, weights, **arguments):
    logits = logits.detach().requires_grad_()
    plan, info = sinkhorn(logits, return_info=True, **arguments)
    plan.backward(weights)
    return plan.detach(), logits.grad, info


def assert_same(logits, weights, tolerance=1e-4, room=1e-5, **arguments):
    plan, grad, info = run(logits.double(), weights.double(), **arguments)
    cuda_plan, cuda_grad, cuda_info = run(logits.cuda(), weights.cuda(), **arguments)
    assert cuda_plan.is_cuda
    assert cuda_plan.dtype == logits.dtype
    assert torch.allclose(cuda_plan.cpu().double(), plan, atol=room)
    assert torch.equal(cuda_info.rounds.cpu(), info.rounds)
    assert (cuda_grad.cpu().double() - grad).norm() <= tolerance * grad.norm() + 1e-6 * weights.double().norm()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_cuda_is_cpu(n, scale):
    assert_same(normal(n, n, scale=scale), normal(n, n, seed=1), tau=0.9)


@pytest.mark.parametrize("shape", [(300, 20, 20), (3, 2, 100, 100), (5, 150, 150), (300, 130, 130), (32, 512, 512)])
def test_batches(shape):
    assert_same(normal(*shape), normal(*shape, seed=1))


@pytest.mark.parametrize("n", [64, 300])
def test_float64(n):
    logits, weights = normal(2, n, n).double(), normal(2, n, n, seed=1).double()
    assert choose_backend(logits.cuda()) == "torch"
    assert_same(logits, weights, tolerance=1e-9, room=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [64, 300])
def test_low_precision(n, dtype):
    assert_same(normal(2, n, n, dtype=dtype), normal(2, n, n, seed=1, dtype=dtype), tolerance=2e-2, room=1e-2)


@pytest.mark.parametrize("n", [60, 300])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backends_agree_on_sharp_logits(n, backend):
    logits, grad = normal(3, n, n, scale=200).cuda(), normal(3, n, n, seed=1).cuda()
    plan, column_sums, rounds = compute_plan(logits, 1.0, 30, None, backend)
    expected = compute_plan(logits.double(), 1.0, 30, None, "torch")
    assert torch.allclose(plan.double(), expected.plan, atol=5e-3)
    assert torch.equal(rounds, expected.rounds)
    assert compute_gradient(plan, column_sums, grad, 1.0, backend).isfinite().all()


@pytest.mark.parametrize("n", [40, 300])
def test_tolerance_and_masks(n):
    logits = torch.stack([normal(n, n, scale=scale) for scale in (0.1, 1.0, 12.0)])
    assert_same(logits, normal(3, n, n, seed=1), tol=1e-4, num_iters=30)
    logits[:, 0, 1:] = logits[:, 2:, 1] = -torch.inf
    assert_same(logits, normal(3, n, n, seed=1))


@pytest.mark.parametrize("n", [40, 300])
def test_what_has_no_plan_is_refused(n):
    logits = torch.zeros(2, n, n, device="cuda")
    logits[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        sinkhorn(logits)
    logits[1, 2] = -torch.inf
    with pytest.raises(ValueError, match="row"):
        sinkhorn(logits)


@pytest.mark.parametrize("shape", [(64, 64), (512, 512), (8, 300, 300), (2048, 2048)])
def test_results_are_the_same_bit_for_bit_each_time(shape):
    """A race between cooperating programs would show here."""
    logits, weights = normal(*shape).cuda(), normal(*shape, seed=1).cuda()
    first = run(logits, weights)
    for _ in range(50):
        again = run(logits, weights, check=False)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_streams_side_by_side():
    """Cooperative launches that wait for their programs at the same time must not keep each other from starting."""
    logits, weights = normal(1024, 1024).cuda(), normal(1024, 1024, seed=1).cuda()
    expected = run(logits, weights)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(logits, weights, check=False))
    torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result[1], expected[1])


@pytest.mark.parametrize("n", [64, 512])
def test_nothing_waits_for_the_device(n):
    logits, weights = normal(n, n).cuda().requires_grad_(), normal(n, n, seed=1).cuda()
    sinkhorn(logits, check=False).backward(weights)  # compiles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        sinkhorn(logits, check=False).backward(weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [64, 512])
@pytest.mark.parametrize("check", [True, False])
def test_graph_capture(n, dtype, check):
    logits = normal(2, n, n).to("cuda", dtype).requires_grad_()
    weights = normal(2, n, n, seed=1).to("cuda", dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(sinkhorn(logits, check=False), logits, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = sinkhorn(logits, check=check)  # the check turns itself off
        (grad,) = torch.autograd.grad(plan, logits, weights)
    for seed in (5, 6):
        with torch.no_grad():
            logits.copy_(normal(2, n, n, seed=seed))
        graph.replay()
        expected = run(logits, weights)
        assert torch.allclose(plan, expected[0], atol=1e-5)
        assert torch.allclose(grad, expected[1], atol=1e-5)


@pytest.mark.parametrize("n", [40, 300])
def test_transforms(n):
    logits, weights = normal(3, n, n).cuda(), normal(3, n, n, seed=1).cuda()
    derivative = torch.func.grad(lambda x, w: (sinkhorn(x) * w).sum())
    expected = run(logits, weights)[1]
    assert torch.allclose(derivative(logits, weights), expected, atol=1e-6)
    assert torch.allclose(torch.func.vmap(derivative)(logits, weights), expected, atol=1e-6)


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compile():
    logits, weights = normal(3, 300, 300).cuda().requires_grad_(), normal(3, 300, 300, seed=1).cuda()
    loss = torch.compile(lambda x, w: (sinkhorn(x.sin()) * w).sum(), fullgraph=True)
    (actual,) = torch.autograd.grad(loss(logits, weights), logits)
    (expected,) = torch.autograd.grad((sinkhorn(logits.sin()) * weights).sum(), logits)
    assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(("shape", "dtype"), [((2048, 2048), torch.float32), ((4, 1000, 1000), torch.bfloat16)])
def test_peak_memory_is_four_matrices(shape, dtype):
    logits = normal(*shape, dtype=dtype).cuda().requires_grad_()
    sinkhorn(logits).sum().backward()
    logits.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sinkhorn(logits).backward(torch.ones_like(logits))
    assert torch.cuda.max_memory_allocated() - before <= 4 * 4 * logits.numel()


def test_above_the_kernels():
    logits = normal(9000, 9000).cuda()
    assert choose_backend(logits) == "torch"
    plan, grad, _ = run(logits, logits)
    assert torch.allclose(plan.sum(0), torch.ones(9000, device="cuda"), atol=1e-4)
    assert grad.sum(1).abs().max() < 1e-3
