"""The checks of ``onebasin doctor``: small runs whose right answer is known beforehand."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.reporting import Report


@dataclass(frozen=True)
class Check:
    """What became of one check.

    Attributes:
        name: what was tried.
        passed: whether the answer was right; None if the check was left out.
        detail: what was found, or why the check was left out.
        seconds: that it took.
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float


def run_checks(devices: list[str]) -> Iterator[Check]:
    """Run all checks, those of the operator on every device. An exception in one is a check that failed."""
    yield _time("a planted permutation is found", find_planted_permutation)
    for device in devices:
        yield _time(f"the gradient of the operator is right ({device})", lambda device=device: compare_gradients(device))
    name = "a report is drawn"
    if importlib.util.find_spec("matplotlib") is None:
        yield Check(name, None, "left out: curves need matplotlib, pip install 'onebasin[plots]'", 0.0)
    else:
        yield _time(name, draw_report)


def find_planted_permutation() -> tuple[bool, str]:
    """Permute a small network at random, and align it back by the descent of the paper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    inputs = torch.randn(32, 8, dtype=torch.float64)
    symmetry = ob.symmetry(model, inputs)
    planted = symmetry.random(torch.Generator().manual_seed(1))
    moved = planted.apply(model)
    with torch.no_grad():
        change = float((torch.func.functional_call(model, moved, inputs) - model(inputs)).abs().max())
    result = ob.align(moved, to=model.state_dict(), symmetry=symmetry, method="sinkhorn", detect_copy=False, polish=False)
    found = (result.permutation @ planted) == symmetry.identity()
    detail = f"{'found' if found else 'not found'}; the outputs of the permuted network differ by {change:.0e}"
    return found and change < 1e-12, detail


def compare_gradients(device: str) -> tuple[bool, str]:
    """The implicit gradient of the Sinkhorn operator, beside central differences in float64."""
    generator = torch.Generator().manual_seed(0)
    logits, weight = (torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(2))

    def evaluate(values: Tensor) -> Tensor:
        plan = ob.sinkhorn(values.to(device), tau=0.5, num_iters=1000, tol=1e-13)
        return (plan * weight.to(device)).sum().cpu()

    leaf = logits.clone().requires_grad_()
    (implicit,) = torch.autograd.grad(evaluate(leaf), leaf)
    step = 1e-5
    numerical = torch.zeros_like(logits)
    for place in range(logits.numel()):
        shift = torch.zeros_like(logits)
        shift.view(-1)[place] = step
        numerical.view(-1)[place] = (evaluate(logits + shift) - evaluate(logits - shift)) / (2 * step)
    error = float((implicit - numerical).abs().max() / numerical.abs().max())
    return error < 1e-6, f"differs from finite differences by {error:.0e} of its size"


def draw_report() -> tuple[bool, str]:
    """Write the report of a line between two networks, and look that the picture is in it."""
    path = ob.LinearPath(torch.linspace(0, 1, 5).tolist(), {"loss": [0.1, 0.4, 0.5, 0.4, 0.1]})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        Report("Self-check", paths={"a line": path}).save(file)
        text = file.read_text(encoding="utf-8")
    return "<svg" in text and text.rstrip().endswith("</html>"), f"one file of {len(text) // 1000} kB"


def _time(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    begin = time.perf_counter()
    try:
        passed, detail = check()
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, passed, detail, time.perf_counter() - begin)
