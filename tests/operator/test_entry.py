import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onebasin.operator import sinkhorn
from onebasin.relaxation.assignment import assign

INF = float("inf")


def normal(*shape, scale=1.0, seed=0, dtype=torch.float64):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def naive_plan(logits, tau, num_iters):
    """The definition, in float64: columns, then rows, of exp(logits / tau), in logarithms."""
    log_plan = logits.double() / tau
    for _ in range(num_iters):
        log_plan = log_plan - log_plan.logsumexp(-2, keepdim=True)
        log_plan = log_plan - log_plan.logsumexp(-1, keepdim=True)
    return log_plan.exp()


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("num_iters", [1, 2, 20, 33])
@pytest.mark.parametrize("scale", [0.1, 10, 1000])
def test_plan_follows_the_definition_round_for_round(scale, num_iters, gradient):
    for shape in [(9, 9), (3, 9, 9), (2, 130, 130)]:
        logits = normal(*shape, scale=scale, seed=num_iters)
        plan = sinkhorn(logits, 0.7, num_iters, gradient=gradient)
        assert torch.allclose(plan, naive_plan(logits, 0.7, num_iters), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1, 10, 100, 1000])
def test_float32_is_close_to_float64(scale):
    logits = normal(40, 40, scale=scale, dtype=torch.float32)
    assert torch.allclose(sinkhorn(logits).double(), naive_plan(logits, 1, 20), atol=3e-6 * max(1, scale))


@pytest.mark.parametrize("tau", [1e-4, 1e-2, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("scale", [0, 1e-30, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_sum_to_one_and_gradients_are_finite_at_any_size(dtype, scale, tau):
    logits = normal(2, 12, 12, scale=scale, dtype=dtype).requires_grad_()
    plan = sinkhorn(logits, tau)
    plan.backward(normal(2, 12, 12, seed=1, dtype=dtype))
    assert torch.allclose(plan.sum(-1), torch.ones(2, 12, dtype=dtype), atol=1e-5)
    assert plan.min() >= 0
    assert logits.grad.isfinite().all()


def test_columns_sum_to_one_once_converged():
    plan = sinkhorn(normal(4, 30, 30), num_iters=100)
    assert torch.allclose(plan.sum(-2), torch.ones(4, 30, dtype=torch.float64), atol=1e-12)


def test_rows_are_normalised_last():
    plan = sinkhorn(normal(8, 8, scale=10), num_iters=3)
    assert torch.allclose(plan.sum(-1), torch.ones(8, dtype=torch.float64), atol=1e-12)
    assert (plan.sum(-2) - 1).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_by_one(dtype):
    logits = torch.full((3, 1, 1), -6e4, dtype=dtype, requires_grad=True)
    plan = sinkhorn(logits)
    assert plan.dtype == dtype
    assert torch.equal(plan, torch.ones(3, 1, 1, dtype=dtype))
    plan.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(3, 1, 1, dtype=dtype))


def test_flat_logits_give_a_uniform_plan():
    assert torch.allclose(sinkhorn(torch.full((5, 5), 1e20)), torch.full((5, 5), 0.2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype):
    logits, weights = normal(3, 20, 20, scale=3, dtype=dtype), normal(3, 20, 20, seed=1, dtype=dtype)
    low, high = logits.clone().requires_grad_(), logits.float().requires_grad_()
    sinkhorn(low, tau=0.5).backward(weights)
    plan = sinkhorn(high, tau=0.5)
    plan.backward(weights.float())
    assert torch.equal(sinkhorn(logits, tau=0.5), plan.detach().to(dtype))
    assert low.grad.dtype == dtype
    assert torch.allclose(low.grad, high.grad.to(dtype), rtol=1e-2, atol=1e-6)


def test_a_constant_added_to_a_row_or_column_changes_nothing():
    logits = normal(15, 15, scale=2)
    plan = sinkhorn(logits, num_iters=300)
    rows, columns = normal(15, 1, scale=5, seed=1), normal(1, 15, scale=5, seed=2)
    assert torch.allclose(sinkhorn(logits + rows, num_iters=300), plan, atol=1e-10)
    assert torch.allclose(sinkhorn(logits + columns, num_iters=300), plan, atol=1e-10)
    assert torch.allclose(sinkhorn(logits + columns, num_iters=3), sinkhorn(logits, num_iters=3), atol=1e-12)


def test_masked_entries_are_zero_and_get_no_gradient():
    logits = normal(2, 6, 6, scale=2)
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[0, 1:] = mask[2:, 4] = mask[3, 3] = True
    for gradient in ("implicit", "unrolled"):
        masked = logits.masked_fill(mask, -INF).requires_grad_()
        plan = sinkhorn(masked, num_iters=400, gradient=gradient)
        plan.backward(normal(2, 6, 6, seed=3))
        assert (plan[:, mask] == 0).all()
        assert (masked.grad[:, mask] == 0).all()
        assert masked.grad.isfinite().all()
        assert torch.allclose(plan, naive_plan(masked.detach(), 1, 400))


def test_mask_without_an_assignment_stays_finite():
    logits = torch.zeros(4, 4)
    logits[:2, 1:] = -INF  # two rows that can only have the same column
    plan, info = sinkhorn(logits, num_iters=2000, return_info=True)
    assert torch.allclose(plan.sum(-1), torch.ones(4))
    assert info.marginal_error > 0.5


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 12), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
@example(12, 194, torch.float32)
def test_planted_permutations_are_recovered_as_tau_vanishes(n, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    planted = torch.randperm(n, generator=generator)
    logits = torch.rand(n, n, generator=generator, dtype=dtype)
    logits[torch.arange(n), planted] += 2.0
    logits += torch.randn(n, 1, generator=generator, dtype=dtype)  # and rows and columns shifted at will
    logits += torch.randn(1, n, generator=generator, dtype=dtype)
    errors = []
    for tau in (0.3, 0.1, 0.03, 0.001):
        plan = sinkhorn(logits, tau, num_iters=500)
        errors.append((1 - plan[torch.arange(n), planted]).max().item())
        # The plan's own distance from the permutation, and what the rounds leave: it falls like 1 / rounds, and the factor
        # is not quite one for every matrix (1.007 for the example above).
        assert errors[-1] < n * math.exp(-1 / tau) + 2 / 500
    assert torch.equal(plan.argmax(-1), planted)


def test_tolerance_stops_each_problem_by_itself():
    logits = torch.stack([normal(20, 20, scale=scale) for scale in (0.1, 1, 3, 20)])
    plans = {}
    for gradient in ("implicit", "unrolled"):
        plans[gradient], info = sinkhorn(logits, num_iters=200, tol=1e-6, gradient=gradient, return_info=True)
        assert info.rounds[0] == 4
        assert info.rounds.tolist() == sorted(info.rounds.tolist())
        assert info.rounds[3] == 200
        assert (info.marginal_error[:3] <= 1e-6).all()
        for index in range(4):
            alone = sinkhorn(logits[index], num_iters=int(info.rounds[index]), gradient=gradient)
            assert torch.allclose(plans[gradient][index], alone, atol=1e-12)
    assert torch.allclose(plans["implicit"], plans["unrolled"], atol=1e-12)


def test_tolerance_with_sharp_problems_beside_flat_ones():
    logits = torch.stack([normal(20, 20, scale=scale) for scale in (0.1, 300, 1000)])
    plan, info = sinkhorn(logits, num_iters=50, tol=1e-6, return_info=True)
    assert info.rounds.tolist() == [4, 50, 50]
    for index in range(3):
        expected = naive_plan(logits[index], 1, int(info.rounds[index]))
        assert torch.allclose(plan[index], expected, atol=1e-9)


def test_info_tells_of_error_and_saturation():
    logits = torch.stack([torch.zeros(6, 6), torch.eye(6) * 100])
    plan, info = sinkhorn(logits, return_info=True)
    assert info.saturation.tolist() == [0, 1]
    assert info.rounds.tolist() == [20, 20]
    assert torch.allclose(info.marginal_error, (plan.sum(-2) - 1).abs().amax(-1), atol=1e-6)


def test_empty_batch():
    assert sinkhorn(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


def test_strided_logits_are_read_as_they_are():
    logits = normal(6, 5, 6).movedim(1, 0)
    assert not logits.is_contiguous()
    before = logits.clone()
    assert torch.equal(sinkhorn(logits), sinkhorn(logits.contiguous()))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize(("value", "message"), [(math.nan, "1 of 32 are NaN, the first at"), (INF, r"are \+inf")])
def test_logits_that_are_no_numbers_are_refused(value, message, gradient):
    logits = torch.zeros(2, 4, 4)
    logits[1, 2, 3] = value
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits, gradient=gradient)
    assert not sinkhorn(logits, gradient=gradient, check=False)[1].isfinite().all()
    assert torch.allclose(sinkhorn(logits, check=False)[0], torch.full((4, 4), 0.25))


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_masks_that_empty_a_line_are_refused(gradient):
    logits = torch.zeros(2, 4, 4)
    logits[1, 2] = -INF
    with pytest.raises(ValueError, match=r"the first is row \(1, 2\)"):
        sinkhorn(logits, gradient=gradient)
    with pytest.raises(ValueError, match=r"the first is column \(1, 2\)"):
        sinkhorn(logits.mT, gradient=gradient)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "tau must be positive"),
        ({"tau": math.inf}, "tau must be positive"),
        ({"tau": math.nan}, "tau must be positive"),
        ({"num_iters": 0}, "num_iters must be at least 1"),
        ({"tol": 0.0}, "tol must be positive"),
        ({"gradient": "exact"}, "gradient must be"),
        ({"logits": torch.zeros(4, 3)}, r"\(\*batch, m, n\)"),
        ({"logits": torch.zeros(3)}, r"\(\*batch, m, n\)"),
        ({"logits": torch.zeros(2, 0, 0)}, "1 <= m <= n"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn(**{"logits": torch.zeros(3, 3), **arguments})


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="int64"):
        sinkhorn(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="list"):
        sinkhorn([[0.0]])  # pyright: ignore


def test_fewer_rows_than_columns():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    plan = sinkhorn(logits, num_iters=300)
    assert torch.allclose(plan.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert (plan.sum(-2) <= 1 + 1e-9).all()
    # The plan of the widened problem, whatever constants its further rows have.
    wide = torch.cat([logits, torch.tensor([3.0, -2.0]).expand(2, 2).unsqueeze(-1).expand(2, 2, 5)], -2)
    assert torch.allclose(plan, sinkhorn(wide, num_iters=300)[:, :3], atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 0.7, 300), (logits,), atol=1e-6)
    sharp = sinkhorn(20 * logits.detach(), num_iters=500)
    assert torch.equal(sharp.argmax(-1), assign(logits.detach()))


def test_spare_columns_may_be_forbidden_but_no_row():
    logits = torch.zeros(2, 4)
    logits[:, 1] = -torch.inf
    plan, info = sinkhorn(logits, num_iters=100, return_info=True)
    assert (plan[:, 1] == 0).all()
    assert info.marginal_error < 1e-5
    logits[0] = -torch.inf
    with pytest.raises(ValueError, match="the first is row"):
        sinkhorn(logits)
    with pytest.raises(ValueError, match="exchange rows and columns"):
        sinkhorn(torch.zeros(4, 2))
