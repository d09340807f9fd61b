"""The Triton kernels against the plain path: compiled on a GPU, else interpreted if it is installed."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
    pytest.skip("Triton's interpreter needs NumPy below 2.4", allow_module_level=True)
tl = pytest.importorskip("triton.language")

from onebasin.operator import launching  # noqa: E402
from onebasin.operator.adjoint import MAX_STEPS, implicit_gradient  # noqa: E402
from onebasin.operator.kernels import team as kernels  # noqa: E402
from onebasin.operator.kernels.strip import strip_gradient, strip_rounds  # noqa: E402
from onebasin.operator.launching import Team, choose_strips, choose_team, launch_gradient, launch_rounds  # noqa: E402
from onebasin.operator.rounds import run_rounds  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALONE = Team(size=1, num_teams=2, rows=4, num_warps=4)
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # NumPy, inside the interpreter
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def normal(*shape, scale=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def assert_same_rounds(logits, tau, num_iters, tol, team):
    actual = launch_rounds(logits, tau, num_iters, tol, team)
    expected = run_rounds(logits.double(), tau, num_iters, tol)
    room = 1e-5 * max(1.0, logits[logits.isfinite()].abs().max().item() / tau)
    assert torch.equal(actual.rounds, expected.rounds)
    assert torch.allclose(actual.plan.double(), expected.plan, atol=room)
    assert torch.allclose(actual.columns, actual.plan.sum(-2), atol=1e-5)
    assert torch.allclose(actual.plan.sum(-1), torch.ones_like(actual.columns), atol=1e-5)


def assert_same_gradient(logits, team, tolerance=1e-4):
    plan, columns, _ = run_rounds(logits, 0.8, 20, None)
    grad = normal(*logits.shape, seed=1)
    before = grad.clone()
    actual = launch_gradient(plan, columns, grad, 0.8, team)
    expected = implicit_gradient(plan.double(), columns.double(), grad.double(), 0.8)
    assert (actual - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(grad, before)


@pytest.mark.parametrize("team", [None, ALONE])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("n", [2, 13, 32, 50])
def test_rounds(n, scale, team):
    assert_same_rounds(normal(3, n, n, scale=scale), 0.7, 6, None, team)


@pytest.mark.parametrize("team", [None, ALONE])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("n", [2, 13, 32, 50])
def test_gradient(n, scale, team):
    assert_same_gradient(normal(3, n, n, scale=scale), team)


@pytest.mark.parametrize("team", [None, ALONE])
def test_tolerance(team):
    logits = torch.stack([normal(20, 20, scale=scale) for scale in (0.1, 1.0, 20.0)])
    assert_same_rounds(logits, 1.0, 14, 1e-3, team)


@pytest.mark.parametrize("team", [None, ALONE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, team):
    logits = normal(2, 20, 20, scale=3).to(dtype)
    actual = launch_rounds(logits, 1.0, 10, None, team)
    expected = run_rounds(logits.float(), 1.0, 10, None)
    assert torch.allclose(actual.plan, expected.plan, atol=1e-5)
    grad = normal(2, 20, 20, seed=1).to(dtype)
    assert torch.allclose(
        launch_gradient(expected.plan, expected.columns, grad, 1.0, team),
        implicit_gradient(expected.plan, expected.columns, grad.float(), 1.0),
        atol=1e-5,
    )


@pytest.mark.parametrize("team", [None, ALONE])
def test_masks(team):
    logits = normal(2, 10, 10)
    logits[:, 0, 1:] = logits[:, 2:, 4] = -torch.inf
    assert_same_rounds(logits, 1.0, 12, None, team)
    assert_same_gradient(logits, team)


@pytest.mark.parametrize("team", [None, ALONE])
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1e-30, 1e5, 1e30])
def test_any_size(scale, tau, team):
    plan, columns, _ = launch_rounds(normal(2, 12, 12, scale=scale), tau, 10, None, team)
    assert torch.allclose(plan.sum(-1), torch.ones_like(columns), atol=1e-5)
    assert launch_gradient(plan, columns, normal(2, 12, 12), tau, team).isfinite().all()


@pytest.mark.parametrize("team", [None, ALONE])
def test_hard_plans_and_zero_gradients(team):
    plan = torch.eye(12, device=DEVICE).expand(2, 12, 12)
    columns = torch.ones(2, 12, device=DEVICE)
    grad = normal(2, 12, 12)
    assert launch_gradient(plan, columns, grad, 1.0, team).abs().max() <= 1e-6 * grad.abs().max()
    assert not launch_gradient(plan, columns, torch.zeros_like(grad), 1.0, team).any()


@pytest.mark.parametrize("team", [None, ALONE])
@pytest.mark.parametrize("kind", ["nan", "inf", "row", "column"])
def test_logits_without_a_plan_show_in_the_column_sums(kind, team):
    logits = normal(2, 12, 12)
    if kind in ("nan", "inf"):
        logits[1, 3, 4] = float(kind)
    elif kind == "row":
        logits[1, 3] = -torch.inf
    else:
        logits[1, :, 3] = -torch.inf
    columns = launch_rounds(logits, 1.0, 8, None, team).columns
    assert columns[0].isfinite().all()
    assert not columns[1].isfinite().all()


def test_teams_fit_the_device():
    for num_processors in (1, 20, 132):
        for n in (129, 200, 512, 1000, 4096, 8192):
            for batch in (1, 3, 32, 500):
                team = choose_team(n, batch, num_processors)
                assert 1 <= team.size * team.num_teams <= 2 * num_processors
                assert team.num_teams <= batch


def test_strips_fit_the_device_and_cover_the_rows():
    for num_processors in (1, 20, 132):
        for n in (2, 64, 128, 129, 200, 256, 300, 512, 513, 1024, 1025):
            for batch in (1, 2, 3, 32, 500):
                team = choose_strips(n, batch, num_processors)
                if team is None:
                    assert n > 128
                    continue
                assert team.num_teams == batch
                assert (team.size - 1) * team.rows < n <= team.size * team.rows
                assert n <= 1024
                if team.size > 1:
                    programs = -(-team.size * batch // num_processors)  # a processor
                    assert 255 * 32 * team.num_warps * programs <= launching.NUM_REGISTERS
                    assert 32 * team.num_warps <= launching._pad(n)  # no two threads read one word of the mail
    assert choose_strips(512, 2, 132) is not None
    assert choose_strips(1024, 2, 132) is not None


def _run_member(rank, kernel, arguments, options):
    """One program of a launch, in a process of its own."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_index, set_dim = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_index(rank, 0, 0)
    builder.set_grid_dim = lambda *_: set_dim(64, 1, 1)
    np.seterr(all="ignore")
    kernel[(1,)](*arguments, **options)


def _run_side_by_side(kernel, team, arguments, options):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    members = [context.Process(target=_run_member, args=(rank, kernel, arguments, options)) for rank in range(team)]
    for process in members:
        process.start()
    for process in members:
        process.join(60)
    codes = [process.exitcode for process in members]
    for process in members:
        process.kill()
    assert codes == [0] * team


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU programs run side by side anyway")
@pytest.mark.parametrize(("scale", "tol"), [(1.0, None), (4.0, 1e-2), (60.0, None)])
def test_strips_side_by_side(scale, tol):
    """A team of three on two problems, one process a member, its mail and counter in shared memory."""
    n, rows, team, tau = 40, 16, 3, 0.8
    options = {"N": launching._pad(n), "ROWS": rows, "TEAM": 4}
    exponent = 1.4426950408889634 / tau

    def shared(tensor):
        return tensor.clone().share_memory_()

    def mail():  # for one team, which takes the problems in turn
        return shared(torch.zeros(2 * 5 * options["N"], dtype=torch.int64))

    x, plan, columns = shared(normal(2, n, n, scale=scale)), shared(torch.zeros(2, n, n)), shared(torch.zeros(2, n))
    rounds = shared(torch.zeros(2, dtype=torch.int64))
    numbers = (2, n, exponent, 1 / exponent, 9, tol or 0.0, 4, team, 1)
    arguments = (x, plan, columns, rounds, mail(), *numbers)
    _run_side_by_side(strip_rounds, team, arguments, {**options, "HAS_TOL": tol is not None})
    expected = run_rounds(x.double(), tau, 9, tol)
    assert torch.equal(rounds, expected.rounds)
    assert torch.allclose(plan.double(), expected.plan, atol=1e-5)
    assert torch.allclose(columns, plan.sum(-2), atol=1e-5)
    grad, result = shared(normal(2, n, n, seed=1)), shared(torch.zeros(2, n, n))
    arguments = (plan, columns, grad, result, mail(), 2, n, 1 / tau, MAX_STEPS, team, 1)
    _run_side_by_side(strip_gradient, team, arguments, options)
    wanted = implicit_gradient(plan.double(), plan.double().sum(-2), grad.double(), tau)
    assert (result - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6 * grad.norm()


@triton.jit
def run_phase(
    x, plan, columns, grad, result, work, team, n, scale, unscale, rate, step, last, max_steps,
    PHASE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0)
    if PHASE == 0:
        kernels.start_columns(x, work, member, team, n, scale, unscale, N, BLOCK, ROWS)
    elif PHASE == 1:
        kernels.normalise_rows(x, plan, work, member, team, n, scale, unscale, step, last == 1, N, ROWS)
    elif PHASE == 2:
        kernels.reduce_columns(x, columns, work, member, team, n, scale, unscale, step, N, BLOCK, ROWS)
    elif PHASE == 3:
        kernels.start_gradient(plan, grad, work, member, team, n, N, ROWS)
    elif PHASE == 4:
        kernels.reduce_start(work, member, team, n, N, BLOCK)
    elif PHASE == 5:
        running, direction = kernels.advance(work, member, n, step, max_steps, N)
        if running:
            kernels.multiply_rows(plan, work, direction, member, team, n, N, ROWS)
    elif PHASE == 6:
        kernels.reduce_image(columns, work, member, team, n, step, N, BLOCK)
    else:
        kernels.finish_gradient(plan, grad, result, work, member, team, n, rate, step, N, ROWS)


@pytest.mark.parametrize(("n", "team"), [(20, 3), (50, 4), (50, 7)])
@pytest.mark.parametrize("scale", [1.0, 6.0, 300.0])
def test_phases_of_a_team(n, team, scale):
    """The phases one launch each: so a team of several members can be tried where programs run in turn."""
    x, grad, tau, num_iters = normal(n, n, scale=scale), normal(n, n, seed=1), 0.8, 5
    plan, result, columns = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x[0])
    work = torch.full(((kernels.GRADIENT_VECTORS + 2 * team) * launching._pad(n),), torch.nan, device=DEVICE)
    exponent = 1.4426950408889634 / tau

    def run(phase, step=0, last=False):
        run_phase[(team,)](
            x, plan, columns, grad, result, work, team, n, exponent, 1 / exponent, 1 / tau, step, int(last),
            MAX_STEPS,
            PHASE=phase, N=launching._pad(n), BLOCK=16, ROWS=4,
        )  # fmt: skip

    run(0)
    for step in range(num_iters):
        run(1, step, step == num_iters - 1)
        run(2, step)
    expected = run_rounds(x.double(), tau, num_iters, None)
    room = 1e-5 * max(1.0, x.abs().max().item())
    assert torch.allclose(plan.double(), expected.plan, atol=room)
    assert torch.allclose(columns, plan.sum(0), atol=1e-5)
    if scale < 10:
        run(3)
        run(4)
        scalars = work[kernels.SCALARS.value * launching._pad(n) :]
        for step in range(MAX_STEPS):
            run(5, step)
            if not scalars[2 + step % 2] > scalars[1]:  # the power of the residual against its target
                break
            run(6, step)
        run(7, step)
        wanted = implicit_gradient(plan.double(), plan.double().sum(0), grad.double(), tau)
        assert (result - wanted).norm() <= 1e-4 * wanted.norm()
