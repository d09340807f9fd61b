import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linear_sum_assignment

from onebasin.relaxation import assignment
from onebasin.relaxation.assignment import AssignmentInfo, assign, assign_all
from onebasin.relaxation.device_assignment import solve_on_device

INF = float("inf")


def total(scores, columns):
    return scores.gather(-1, columns.unsqueeze(-1)).double().sum((-2, -1))


def best_total(scores):
    rows, columns = linear_sum_assignment(scores.double().numpy(), maximize=True)
    return scores.double().numpy()[rows, columns].sum()


def square(elements):
    return st.integers(1, 9).flatmap(lambda n: hnp.arrays(np.float64, (n, n), elements=elements))


@settings(deadline=None)
@given(square(st.floats(-1e6, 1e6, width=32) | st.sampled_from([-1.0, 0.0, 1.0])))
def test_total_is_that_of_scipy(array):
    scores = torch.from_numpy(array)
    columns = assign(scores)
    assert columns.sort().values.tolist() == list(range(len(array)))
    assert total(scores, columns).item() == pytest.approx(best_total(scores), rel=1e-12, abs=1e-9)


@settings(deadline=None)
@given(square(st.sampled_from([-INF, -INF, 0.0, 1.0, 2.0])))
def test_masks_are_kept_or_refused(array):
    scores = torch.from_numpy(array)
    try:
        expected = best_total(scores)
    except ValueError:
        with pytest.raises(ValueError, match="leaves no assignment"):
            assign(scores)
    else:
        assert total(scores, assign(scores)).item() == expected


def hard_case(kind, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, n, generator=generator, dtype=torch.float64)
    planted = torch.eye(n, dtype=torch.float64)[torch.randperm(n, generator=generator)]
    if kind == "weight matching":  # first layers of two networks whose units are noisy copies of the same features
        features, mixing = torch.randn(2, n // 2, 48, generator=generator, dtype=torch.float64)
        both = [torch.cat([features, mixing]) + torch.randn(n // 2 * 2, 48, generator=generator) for _ in range(2)]
        return (both[0] @ both[1].T).float()
    return {
        "normal": normal,
        "float32": normal.float(),
        "integers": (3 * normal).round().long(),
        "ties": normal.round(),
        "constant": torch.full((n, n), -3.0),
        "rank one": normal[:, :1] * normal[:1],
        "low rank": normal @ normal.flip(0).T,
        "equal rows": normal[torch.arange(n) // 3],
        "equal columns": normal[:, torch.arange(n) // 3],
        "sparse": torch.where((normal > 0.5) | (planted > 0), normal, -INF),
        "ranges of rows": normal * torch.logspace(-12, 12, n)[:, None].double(),
        "ranges of columns": normal * torch.logspace(-6, 6, n).double(),
        "outliers": torch.where(normal > 2, 1e9 * normal, normal),
        "all but forbidden": torch.where((normal > 0) | (planted > 0), normal, -1e15),
        "planted": planted + 0.3 * normal,
        "plan": torch.softmax(4 * planted + 2 * normal, -1).float(),
    }[kind]


KINDS = [
    "normal", "float32", "integers", "ties", "constant", "rank one", "low rank", "equal rows", "equal columns", "sparse",
    "ranges of rows", "ranges of columns", "outliers", "all but forbidden", "planted", "plan", "weight matching",
]  # fmt: skip


def assert_proven(scores, columns, info):
    """The duals bound every score and meet the value, which is that of SciPy."""
    room = 1e-12 * scores[scores.isfinite()].double().abs().max()
    best = best_total(scores)
    assert columns.unique().numel() == len(columns)
    assert info.value.item() == pytest.approx(best, rel=1e-11, abs=1e-12)
    assert (info.row_duals[:, None] + info.column_duals >= scores - room).all()
    assert info.bound.item() == pytest.approx((info.row_duals.sum() + info.column_duals.sum()).item(), rel=1e-9)
    assert 0 <= info.gap.item() <= 1e-9
    if not scores.is_floating_point():
        assert info.gap.item() == 0
        assert info.bound.item() == info.value.item() == best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [24, 130])
def test_hard_cases_have_the_total_of_scipy_and_a_proof(n, kind):
    scores = hard_case(kind, n)
    columns, info = assign(scores, return_info=True)
    assert torch.equal(columns, assign(scores))
    assert_proven(scores, columns, info)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_cases_by_the_method_of_the_device(kind):
    scores = hard_case(kind, 40)
    columns, prices, is_complete = solve_on_device(scores[None])
    assert is_complete.all()
    info = assignment._certify(scores, columns[0], prices[0], is_complete[0])
    assert_proven(scores, columns[0], info)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["own", "near", "wrong", "far", "not finite"])
def test_any_start_gives_the_same_total(kind, start):
    scores = hard_case(kind, 40)
    noise = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = assign(scores, return_info=True)[1]
    prices = {
        "own": own,
        "near": assign(scores + (0.01 * noise).to(scores.dtype), return_info=True)[1].column_duals,
        "wrong": 3 * noise.float(),
        "far": 1e18 * noise,
        "not finite": noise / 0.0,
    }[start]
    columns, info = assign(scores, start=prices, return_info=True)
    assert torch.equal(columns, assign(scores, start=prices))
    assert_proven(scores, columns, info)


def test_duals_of_the_same_problem_leave_nothing_to_solve(monkeypatch):
    scores = torch.stack([hard_case("normal", 50, seed) for seed in range(3)]).reshape(3, 1, 50, 50)
    columns, info = assign(scores, return_info=True)
    assert info.solved.all()
    monkeypatch.setattr(assignment, "solve_on_host", lambda *_: pytest.fail("solved a settled problem"))
    again, certified = assign(scores, start=info, return_info=True)
    assert torch.equal(again, columns)
    assert not certified.solved.any()
    assert certified.gap.max() <= 1e-12


def test_an_earlier_assignment_is_kept_problem_by_problem():
    scores = torch.stack([hard_case("normal", 30, seed)[:25] for seed in range(3)])
    columns, info = assign(scores, return_info=True)
    scores[1] = hard_case("normal", 30, 5)[:25]
    again, certified = assign(scores, start=info, return_info=True)
    assert certified.solved.tolist() == [False, True, False]
    assert torch.equal(again[[0, 2]], columns[[0, 2]])
    for i in range(3):
        assert_proven(scores[i], again[i], AssignmentInfo(**{k: v[i] for k, v in vars(certified).items()}))


def test_a_batch_has_a_proof_for_each_problem():
    scores = torch.stack([hard_case(kind, 20).double() for kind in ("normal", "planted", "sparse", "ties")]).reshape(
        2, 2, 20, 20
    )
    columns, info = assign(scores, return_info=True)
    for place in np.ndindex(2, 2):
        assert_proven(scores[place], columns[place], AssignmentInfo(**{k: v[place] for k, v in vars(info).items()}))


@settings(deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 12), st.sampled_from(["normal", "ties", "integers", "sparse"])
)
def test_more_columns_than_rows(seed, m, extra, kind):
    scores = hard_case(kind, m + extra, seed)[:m]
    for start in (None, torch.randn(m + extra), assign(scores, return_info=True)[1]):
        columns, info = assign(scores, start=start, return_info=True)
        assert_proven(scores, columns, info)
        if extra:
            assert (info.column_duals >= 0).all()


def test_starts_of_other_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match=r"start must have a price for each column, \(2, 4\), but got \(2, 3\)"):
        assign(torch.zeros(2, 3, 4), start=torch.zeros(2, 3))
    with pytest.raises(TypeError, match="start takes a tensor of prices or the info of an earlier call, but got list"):
        assign(torch.zeros(2, 2), start=[0.0, 0.0])  # pyright: ignore


def test_nothing_is_solved_where_the_best_columns_differ(monkeypatch):
    monkeypatch.setattr(assignment, "solve_on_host", lambda *_: pytest.fail("solved a settled problem"))
    planted = torch.stack([torch.randperm(7) for _ in range(3)])
    assert torch.equal(assign(torch.nn.functional.one_hot(planted).float()), planted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_batches_are_solved_one_by_one(dtype):
    scores = torch.randint(-5, 5, (2, 3, 6, 6), generator=torch.Generator().manual_seed(1)).to(dtype)
    columns = assign(scores)
    assert columns.shape == (2, 3, 6)
    assert columns.dtype == torch.int64
    for index in np.ndindex(2, 3):
        assert total(scores[index], columns[index]).item() == best_total(scores[index])


def test_scores_are_neither_changed_nor_differentiated():
    scores = torch.ones(4, 4, requires_grad=True)
    before = scores.detach().clone()
    assert not assign(scores).requires_grad
    assert torch.equal(scores.detach(), before)


def test_small_and_empty_problems():
    assert assign(torch.tensor([[-5.0]])).tolist() == [0]
    assert assign(torch.empty(0, 3, 3)).shape == (0, 3)
    assert assign(torch.empty(2, 0, 0)).shape == (2, 0)
    assert assign(torch.empty(0, 3)).shape == (0,)
    for shape in ((0, 3, 4), (2, 0, 0), (0, 3)):
        info = assign(torch.empty(shape), start=torch.empty(*shape[:-2], shape[-1]), return_info=True)[1]
        assert info.gap.shape == shape[:-2]
        assert not info.solved.any()


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (INF, r"\+inf")])
def test_scores_that_are_no_numbers_are_refused(value, name):
    scores = torch.zeros(2, 3, 3)
    scores[1, 2, 0] = value
    with pytest.raises(ValueError, match=rf"{name}, the first at \(2, 0\) \(problem \(1,\)"):
        assign(scores)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (5,)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="assign takes scores of shape"):
        assign(torch.zeros(shape))


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="list"):
        assign([[1.0]])  # pyright: ignore
    with pytest.raises(TypeError, match="complex"):
        assign(torch.zeros(2, 2, dtype=torch.complex64))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_indices_come_back_on_the_device():
    scores = torch.randn(4, 50, 50, generator=torch.Generator().manual_seed(0))
    columns = assign(scores.cuda())
    assert columns.is_cuda
    assert torch.allclose(total(scores, columns.cpu()), total(scores, assign(scores)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_hard_cases_on_the_device(monkeypatch, kind):
    scores = torch.stack([hard_case(kind, 200, seed) for seed in range(4)])
    if kind != "rank one":  # which takes too many phases
        monkeypatch.setattr(assignment, "solve_on_host", lambda *_: pytest.fail("solved on the CPU"))
    columns, info = assign(scores.cuda(), return_info=True)
    again, warm = assign(scores.cuda(), start=info.column_duals, return_info=True)
    for found, each in ((columns, info), (again, warm)):
        assert found.is_cuda
        for i in range(4):
            assert_proven(scores[i], found[i].cpu(), AssignmentInfo(**{k: v[i].cpu() for k, v in vars(each).items()}))


def test_problems_of_several_shapes_are_solved_together():
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(*shape, generator=generator) for shape in ((3, 70, 70), (5, 5), (2, 2, 90, 90), (0, 4, 4))]
    found = assign_all(matrices)
    for scores, (columns, *_) in zip(matrices, found, strict=True):
        assert columns.shape == scores.shape[:-1]
        for index in np.ndindex(scores.shape[:-2]):
            assert total(scores[index], columns[index]).item() == pytest.approx(best_total(scores[index]), rel=1e-12)


def test_threads_do_not_change_the_answer(monkeypatch):
    scores = torch.randn(6, 80, 80, generator=torch.Generator().manual_seed(0))
    answers = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        answers.append(assign(scores))
    assert torch.equal(*answers)
    scores[4, 7, 9] = float("nan")
    with pytest.raises(ValueError, match=r"NaN, the first at \(7, 9\) \(problem \(4,\)"):
        assign(scores)
