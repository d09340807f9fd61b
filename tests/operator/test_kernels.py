"""The Triton kernels against the plain path: compiled on a GPU, else interpreted if it is installed."""

import multiprocessing

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
    pytest.skip("Triton's interpreter needs NumPy below 2.4", allow_module_level=True)
tl = pytest.importorskip("triton.language")

from onebasin.operator.adjoint import MAX_STEPS, implicit_gradient  # noqa: E402
from onebasin.operator.kernels import streaming_gradient, streaming_rounds  # noqa: E402
from onebasin.operator.kernels.resident import resident_gradient, resident_rounds  # noqa: E402
from onebasin.operator.kernels.shortest_paths import shortest_paths  # noqa: E402
from onebasin.operator.launch import LaunchConfig, _pad, launch_gradient, launch_paths, launch_rounds  # noqa: E402
from onebasin.operator.rounds import run_rounds  # noqa: E402
from onebasin.relaxation import device_assignment  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAMING = LaunchConfig(num_ranks=1, num_slots=2, rows=4, num_warps=4)
both_kinds = pytest.mark.parametrize("streaming", [None, STREAMING], ids=["resident", "streaming"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # NumPy, inside the interpreter
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def normal(*shape, scale=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def assert_same_rounds(logits, tau, num_iters, tol, streaming):
    actual = launch_rounds(logits, tau, num_iters, tol, streaming)
    expected = run_rounds(logits.double(), tau, num_iters, tol)
    room = 1e-5 * max(1.0, logits[logits.isfinite()].abs().max().item() / tau)
    assert torch.equal(actual.rounds, expected.rounds)
    assert torch.allclose(actual.plan.double(), expected.plan, atol=room)
    assert torch.allclose(actual.column_sums, actual.plan.sum(-2), atol=1e-5)
    assert torch.allclose(actual.plan.sum(-1), torch.ones_like(actual.column_sums), atol=1e-5)


def assert_same_gradient(logits, streaming, tolerance=1e-4):
    plan, column_sums, _ = run_rounds(logits, 0.8, 20, None)
    grad = normal(*logits.shape, seed=1)
    before = grad.clone()
    actual = launch_gradient(plan, column_sums, grad, 0.8, streaming)
    expected = implicit_gradient(plan.double(), column_sums.double(), grad.double(), 0.8)
    assert (actual - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(grad, before)


@both_kinds
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("n", [2, 13, 32, 50])
def test_rounds(n, scale, streaming):
    assert_same_rounds(normal(3, n, n, scale=scale), 0.7, 6, None, streaming)


@both_kinds
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("n", [2, 13, 32, 50])
def test_gradient(n, scale, streaming):
    assert_same_gradient(normal(3, n, n, scale=scale), streaming)


@both_kinds
def test_tolerance(streaming):
    logits = torch.stack([normal(20, 20, scale=scale) for scale in (0.1, 1.0, 20.0)])
    assert_same_rounds(logits, 1.0, 14, 1e-3, streaming)


@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, streaming):
    logits = normal(2, 20, 20, scale=3).to(dtype)
    actual = launch_rounds(logits, 1.0, 10, None, streaming)
    expected = run_rounds(logits.float(), 1.0, 10, None)
    assert torch.allclose(actual.plan, expected.plan, atol=1e-5)
    grad = normal(2, 20, 20, seed=1).to(dtype)
    assert torch.allclose(
        launch_gradient(expected.plan, expected.column_sums, grad, 1.0, streaming),
        implicit_gradient(expected.plan, expected.column_sums, grad.float(), 1.0),
        atol=1e-5,
    )


@both_kinds
def test_masks(streaming):
    logits = normal(2, 10, 10)
    logits[:, 0, 1:] = logits[:, 2:, 4] = -torch.inf
    assert_same_rounds(logits, 1.0, 12, None, streaming)
    assert_same_gradient(logits, streaming)


@both_kinds
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1e-30, 1e5, 1e30])
def test_any_size(scale, tau, streaming):
    plan, column_sums, _ = launch_rounds(normal(2, 12, 12, scale=scale), tau, 10, None, streaming)
    assert torch.allclose(plan.sum(-1), torch.ones_like(column_sums), atol=1e-5)
    assert launch_gradient(plan, column_sums, normal(2, 12, 12), tau, streaming).isfinite().all()


@both_kinds
def test_hard_plans_and_zero_gradients(streaming):
    plan = torch.eye(12, device=DEVICE).expand(2, 12, 12)
    column_sums = torch.ones(2, 12, device=DEVICE)
    grad = normal(2, 12, 12)
    assert launch_gradient(plan, column_sums, grad, 1.0, streaming).abs().max() <= 1e-6 * grad.abs().max()
    assert not launch_gradient(plan, column_sums, torch.zeros_like(grad), 1.0, streaming).any()


@both_kinds
@pytest.mark.parametrize("kind", ["nan", "inf", "row", "column"])
def test_logits_without_a_plan_show_in_the_column_sums(kind, streaming):
    logits = normal(2, 12, 12)
    if kind in ("nan", "inf"):
        logits[1, 3, 4] = float(kind)
    elif kind == "row":
        logits[1, 3] = -torch.inf
    else:
        logits[1, :, 3] = -torch.inf
    column_sums = launch_rounds(logits, 1.0, 8, None, streaming).column_sums
    assert column_sums[0].isfinite().all()
    assert not column_sums[1].isfinite().all()


def _run_rank(rank, kernel, arguments, options):
    """One program of a launch, in a process of its own."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_index, set_dim = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_index(rank, 0, 0)
    builder.set_grid_dim = lambda *_: set_dim(64, 1, 1)
    np.seterr(all="ignore")
    kernel[(1,)](*arguments, **options)


def _run_side_by_side(kernel, num_ranks, arguments, options):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run_rank, args=(rank, kernel, arguments, options)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * num_ranks


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU programs run side by side anyway")
@pytest.mark.parametrize(("scale", "tol"), [(1.0, None), (4.0, 1e-2), (60.0, None)])
def test_resident_programs_that_cooperate(scale, tol):
    """Three programs on two problems, each in a process of its own, with the message buffer in shared memory."""
    n, rows, num_ranks, tau = 40, 16, 3, 0.8
    options = {"N": _pad(n), "ROWS": rows, "RANKS": 4}
    exponent = 1.4426950408889634 / tau

    def shared(tensor):
        return tensor.clone().share_memory_()

    def messages():  # of one slot, which takes the problems in turn
        return shared(torch.zeros(2 * 5 * options["N"], dtype=torch.int64))

    x, plan, column_sums = shared(normal(2, n, n, scale=scale)), shared(torch.zeros(2, n, n)), shared(torch.zeros(2, n))
    rounds = shared(torch.zeros(2, dtype=torch.int64))
    scalars = (2, n, exponent, 1 / exponent, 9, tol or 0.0, 4, num_ranks, 1)
    arguments = (x, plan, column_sums, rounds, messages(), *scalars)
    _run_side_by_side(resident_rounds, num_ranks, arguments, {**options, "HAS_TOL": tol is not None})
    expected = run_rounds(x.double(), tau, 9, tol)
    assert torch.equal(rounds, expected.rounds)
    assert torch.allclose(plan.double(), expected.plan, atol=1e-5)
    assert torch.allclose(column_sums, plan.sum(-2), atol=1e-5)
    grad, result = shared(normal(2, n, n, seed=1)), shared(torch.zeros(2, n, n))
    arguments = (plan, column_sums, grad, result, messages(), 2, n, 1 / tau, MAX_STEPS, num_ranks, 1)
    _run_side_by_side(resident_gradient, num_ranks, arguments, options)
    wanted = implicit_gradient(plan.double(), plan.double().sum(-2), grad.double(), tau)
    assert (result - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6 * grad.norm()


@triton.jit
def run_phase(
    x, plan, column_sums, grad, result, work, num_ranks, n, scale, unscale, rate, step, last, max_steps,
    PHASE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0)
    if PHASE == 0:
        streaming_rounds.start_columns(x, work, rank, num_ranks, n, scale, unscale, N, BLOCK, ROWS)
    elif PHASE == 1:
        streaming_rounds.normalise_rows(x, plan, work, rank, num_ranks, n, scale, unscale, step, last == 1, N, ROWS)
    elif PHASE == 2:
        streaming_rounds.reduce_columns(x, column_sums, work, rank, num_ranks, n, scale, unscale, step, N, BLOCK, ROWS)
    elif PHASE == 3:
        streaming_gradient.start_gradient(plan, grad, work, rank, num_ranks, n, N, ROWS)
    elif PHASE == 4:
        streaming_gradient.reduce_start(work, rank, num_ranks, n, N, BLOCK)
    elif PHASE == 5:
        running, direction = streaming_gradient.update_solver(work, rank, n, step, max_steps, N)
        if running:
            streaming_gradient.multiply_rows(plan, work, direction, rank, num_ranks, n, N, ROWS)
    elif PHASE == 6:
        streaming_gradient.reduce_image(column_sums, work, rank, num_ranks, n, step, N, BLOCK)
    else:
        streaming_gradient.finish_gradient(plan, grad, result, work, rank, num_ranks, n, rate, step, N, ROWS)


@pytest.mark.parametrize(("n", "num_ranks"), [(20, 3), (50, 4), (50, 7)])
@pytest.mark.parametrize("scale", [1.0, 6.0, 300.0])
def test_phases_of_the_streaming_kernels(n, num_ranks, scale):
    """One launch per phase, so that cooperating programs can be tested where programs run one after the other."""
    x, grad, tau, num_iters = normal(n, n, scale=scale), normal(n, n, seed=1), 0.8, 5
    plan, result, column_sums = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x[0])
    work = torch.full(((streaming_gradient.PARTIALS.value + 2 * num_ranks) * _pad(n),), torch.nan, device=DEVICE)
    exponent = 1.4426950408889634 / tau

    def run(phase, step=0, last=False):
        run_phase[(num_ranks,)](
            x, plan, column_sums, grad, result, work, num_ranks, n, exponent, 1 / exponent, 1 / tau, step, int(last),
            MAX_STEPS,
            PHASE=phase, N=_pad(n), BLOCK=16, ROWS=4,
        )  # fmt: skip

    run(0)
    for step in range(num_iters):
        run(1, step, step == num_iters - 1)
        run(2, step)
    expected = run_rounds(x.double(), tau, num_iters, None)
    room = 1e-5 * max(1.0, x.abs().max().item())
    assert torch.allclose(plan.double(), expected.plan, atol=room)
    assert torch.allclose(column_sums, plan.sum(0), atol=1e-5)
    if scale < 10:
        run(3)
        run(4)
        scalars = work[streaming_gradient.SCALARS.value * _pad(n) :]
        for step in range(MAX_STEPS):
            run(5, step)
            if not scalars[2 + step % 2] > scalars[1]:  # the squared residual against its target
                break
            run(6, step)
        run(7, step)
        wanted = implicit_gradient(plan.double(), plan.double().sum(0), grad.double(), tau)
        assert (result - wanted).norm() <= 1e-4 * wanted.norm()


def path_problem(kind, batch, n):
    """Arguments of `launch_paths`: in the first phase of an assignment."""
    scores = normal(batch, n, n)
    if kind == "integers":
        scores = scores.round().long()
    elif kind == "bfloat16":
        scores = scores.bfloat16()
    elif kind == "masked":
        scores[normal(batch, n, n, seed=1) > 1] = -torch.inf
    elif kind == "float64":
        scores = scores.double()
    prices, row_duals, columns, rows = device_assignment._choose_start(scores, None)
    return scores, row_duals, prices, rows, torch.where(columns < 0, 0.0, torch.inf).double()


PATH_CONFIGS = [None, LaunchConfig(1, 1, 16, 4), LaunchConfig(1, 2, 16, 4)]


@pytest.mark.parametrize("config", PATH_CONFIGS, ids=["chosen", "one slot", "two slots"])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "integers", "masked"])
def test_shortest_paths(kind, config):
    problem = path_problem(kind, 3, 21)
    distances, parents = launch_paths(*problem, config)
    expected, _ = device_assignment.find_paths(*problem)
    assert torch.equal(distances, expected)
    scores, row_duals, prices, rows, reach = problem
    lengths = torch.where(rows < 0, 21, rows)  # the row before a column is as far away as its own column
    padded = torch.cat([reach, reach[:, :1]], 1).scatter(1, lengths, distances)
    before = padded.gather(1, parents)
    missing = (row_duals[:, :, None] + prices[:, None, :] - scores).clamp_min(0)
    assert torch.equal(before + missing.gather(1, parents[:, None, :])[:, 0], distances)


@pytest.mark.parametrize("config", PATH_CONFIGS[:2], ids=["chosen", "one slot"])
@pytest.mark.parametrize("kind", ["float32", "integers", "masked"])
def test_assignments_by_the_kernel(monkeypatch, kind, config):
    scores = path_problem(kind, 2, 24)[0]
    expected, _, _ = device_assignment.solve_on_device(scores)
    monkeypatch.setattr(device_assignment, "_find_paths", lambda *problem: launch_paths(*problem, config))
    columns, _, is_complete = device_assignment.solve_on_device(scores)
    assert is_complete.all()
    totals = [scores.double().gather(2, each[:, :, None]).sum((1, 2)) for each in (columns, expected)]
    assert torch.allclose(*totals, rtol=1e-12)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU programs run side by side anyway")
@pytest.mark.parametrize("kind", ["float32", "integers"])
def test_programs_that_share_the_shortest_paths(kind):
    """Three programs on three problems, each in a process of its own, with everything they write in shared memory."""
    batch, n, num_ranks = 3, 40, 3
    problem = path_problem(kind, batch, n)
    scores, row_duals, prices, rows, reach = (tensor.clone().contiguous().share_memory_() for tensor in problem)
    lengths = reach.repeat_interleave(3, 0).share_memory_()
    distances = torch.full_like(prices, torch.inf).share_memory_()
    parents = torch.zeros_like(rows).share_memory_()
    last_changes, counters = (torch.zeros(batch, dtype=torch.int32).share_memory_() for _ in range(2))
    arguments = (scores, row_duals, prices, rows, lengths, distances, parents, last_changes, counters)
    _run_side_by_side(shortest_paths, num_ranks, (*arguments, batch, n, num_ranks, 1), {"ROWS": 16, "BLOCK": 16})
    assert torch.equal(distances, device_assignment.find_paths(*problem)[0])
