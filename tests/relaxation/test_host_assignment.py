import pytest
import torch

from onebasin.relaxation import host_assignment
from onebasin.relaxation.host_assignment import find_prices, solve_on_host


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(150, 150), (20, 70)])
@pytest.mark.parametrize("lapx", [True, False])
def test_both_solvers_serve(monkeypatch, lapx, shape):
    if lapx:
        pytest.importorskip("lap")
    expected = host_assignment._scipy_solver(-normal(*shape).numpy())
    if not lapx:
        monkeypatch.setattr(host_assignment, "_lapx_solver", lambda: None)
    assert (solve_on_host(normal(*shape).numpy()) == expected).all()


@pytest.mark.parametrize("start", [0.0, 5.0])
def test_under_the_prices_every_row_has_its_best_column(start):
    scores = normal(80, 80)
    columns = torch.from_numpy(solve_on_host(scores.numpy()))
    prices = find_prices(scores, columns, start * normal(80), 1e-14)
    reduced = scores - prices
    assert torch.allclose(reduced.gather(1, columns[:, None])[:, 0], reduced.amax(1), rtol=0, atol=1e-11)


def test_an_assignment_that_is_not_the_best_has_no_prices():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    columns = torch.tensor([1, 0])
    reduced = scores - find_prices(scores, columns, torch.zeros(2, dtype=torch.float64), 0.0)  # it ends all the same
    assert (reduced.amax(1) - reduced.gather(1, columns[:, None])[:, 0]).sum() > 0.5
