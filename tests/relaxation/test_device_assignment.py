import pytest
import torch
from scipy.optimize import linear_sum_assignment

from onebasin.relaxation import device_assignment
from onebasin.relaxation.device_assignment import find_paths, solve_on_device

INF = float("inf")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def best_total(scores):
    rows, columns = linear_sum_assignment(scores.double().numpy(), maximize=True)
    return scores.double().numpy()[rows, columns].sum()


def assert_solved(scores, columns, prices):
    for problem, chosen, price in zip(scores, columns, prices, strict=True):
        assert chosen.sort().values.tolist() == list(range(scores.shape[-1]))
        value = problem.double().gather(1, chosen[:, None]).sum().item()
        assert value == pytest.approx(best_total(problem), rel=1e-12)
        assert ((problem - price).amax(1).sum() + price.sum()).item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("n", [2, 9, 64])
def test_problems_of_a_batch_are_solved_together(n):
    scores = torch.cat([normal(3, n, n), normal(2, n, n, seed=1).round(), torch.zeros(1, n, n), torch.eye(n)[None]])
    columns, prices, is_complete = solve_on_device(scores)
    assert is_complete.all()
    assert_solved(scores, columns, prices)


def test_prices_of_a_similar_problem_save_phases(monkeypatch):
    factors, phases = normal(2, 100, 10), []
    scores = (factors[0] @ factors[1].T)[None]
    monkeypatch.setattr(device_assignment, "_find_paths", lambda *args: (phases.append(1), find_paths(*args))[1])
    _, prices, _ = solve_on_device(scores)
    cold = len(phases)
    phases.clear()
    scores = scores + 1e-3 * normal(1, 100, 100, seed=1)
    columns, prices, _ = solve_on_device(scores, prices)
    assert len(phases) <= cold / 2
    assert_solved(scores, columns, prices)


def test_prices_that_match_fewer_rows_are_not_used(monkeypatch):
    scores, starts = torch.eye(30)[None] + 0.01 * normal(1, 30, 30), []
    choose = device_assignment._choose_start
    monkeypatch.setattr(device_assignment, "_choose_start", lambda *args: starts.append(choose(*args)) or starts[-1])
    solve_on_device(scores, 10 * normal(1, 30).double())
    assert (starts[0][2] >= 0).all()


def test_problems_without_an_assignment_are_left():
    scores = normal(3, 12, 12)
    scores[1, :, 3] = -INF
    scores[2, :2, 1:] = -INF
    columns, prices, is_complete = solve_on_device(scores)
    assert is_complete.tolist() == [True, False, False]
    assert_solved(scores[:1], columns[:1], prices[:1])


def test_too_many_phases_leave_rows_free(monkeypatch):
    monkeypatch.setattr(device_assignment, "MAX_PHASES", 1)
    assert not solve_on_device(normal(1, 60, 60))[2].any()


def test_paths_are_the_shortest_ones():
    """Against the distances between all columns, by squaring."""
    scores = normal(1, 20, 20).double()
    prices, row_duals, columns, rows = device_assignment._choose_start(scores, None)
    is_free = columns[0] < 0
    distances, parents = find_paths(scores, row_duals, prices, rows, torch.where(columns < 0, 0.0, INF).double())
    missing = (row_duals[0, :, None] + prices[0] - scores[0]).clamp_min(0)
    steps = torch.full((20, 20), INF, dtype=torch.float64).fill_diagonal_(0.0)
    steps[columns[0, ~is_free]] = missing[~is_free]
    for _ in range(5):
        steps = (steps[:, :, None] + steps).amin(1)
    assert torch.allclose(distances[0], (missing[is_free].amin(0)[:, None] + steps).amin(0))
    assert (missing[parents[0], torch.arange(20)] <= distances[0] + 1e-12).all()
