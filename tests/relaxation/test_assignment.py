import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linear_sum_assignment

from onebasin.relaxation import assignment
from onebasin.relaxation.assignment import assign, assign_all

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


@pytest.mark.parametrize("n", [128, 200])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "product"])
def test_large_problems_have_the_total_of_scipy(n, kind):
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, n, generator=generator)
    scores = {
        "normal": normal,
        "ties": normal.round(),
        "constant": torch.full((n, n), -3.0),
        "product": normal @ normal.flip(0).T,
    }[kind]
    assert total(scores, assign(scores)).item() == pytest.approx(best_total(scores), rel=1e-9)


@pytest.mark.parametrize("lapx", [True, False])
def test_both_solvers_serve(monkeypatch, lapx):
    if lapx:
        pytest.importorskip("lap")
    else:
        monkeypatch.setattr(assignment, "_lapx_solver", lambda: None)
    scores = torch.randn(150, 150, generator=torch.Generator().manual_seed(0))
    assert total(scores, assign(scores)).item() == pytest.approx(best_total(scores), rel=1e-9)


def test_nothing_is_solved_where_the_best_columns_differ(monkeypatch):
    monkeypatch.setattr(assignment, "_solve", lambda *_: pytest.fail("solved a settled problem"))
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


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (INF, r"\+inf")])
def test_scores_that_are_no_numbers_are_refused(value, name):
    scores = torch.zeros(2, 3, 3)
    scores[1, 2, 0] = value
    with pytest.raises(ValueError, match=rf"{name}, the first at \(2, 0\) \(problem \(1,\)"):
        assign(scores)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5,)])
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


def test_problems_of_several_shapes_are_solved_together():
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(*shape, generator=generator) for shape in ((3, 70, 70), (5, 5), (2, 2, 90, 90), (0, 4, 4))]
    found = assign_all(matrices)
    for scores, columns in zip(matrices, found, strict=True):
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
