import pytest
import torch

from onebasin.operator.rounds import run_log_rounds, run_rounds


def normal(*shape, scale=1.0, seed=0, dtype=torch.float64):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.5, 8, 500])
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_code_paths_agree(scale, dtype, tol):
    """The rounds in the log domain, for graph capture, compute what those with scaling vectors do."""
    logits, eps = normal(3, 20, 20, scale=scale, dtype=dtype), torch.finfo(dtype).eps
    fast, slow = run_rounds(logits, 0.9, 24, tol), run_log_rounds(logits, 0.9, 24, tol)
    assert torch.equal(fast.rounds, slow.rounds)
    assert torch.allclose(fast.plan, slow.plan, atol=50 * eps * max(1, scale))
    assert torch.allclose(fast.column_sums, slow.column_sums, atol=500 * eps * max(1, scale))
