"""The Sinkhorn operator against its peers, side by side in one run: time, gradient error, peak memory, floor.

    python -m benchmarks.sinkhorn [--quick] [--device cuda] [--out FOLDER]

Peers are used where they can be imported: the authors' operator (PyPI `sinkhorn-rebasin`) and OTT-JAX. Times
are of one call, device work included; the competitors take turns, so that a busy machine is busy for all.
Ratios are of the shortest times on the CPU, whose cores may be shared, and of medians on CUDA.
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring import find_commit
from benchmarks.peak_memory import PeakMemory
from benchmarks.sinkhorn_peers import load_authors, load_ott
from onebasin.operator import adjoint, sinkhorn
from onebasin.operator.implicit import compute_gradient, compute_plan
from onebasin.operator.rounds import run_rounds

ROUNDS = 20
TARGETS = {"cpu": {256: 4, 512: 6, 1024: 8}, "cuda": {64: 15, 512: 20, 4096: 34}}
SHARPNESS = 1.0  # the scale of the normal logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--sizes", type=int, nargs="+", help="only problems of these sizes")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="folder for the record and the plot")
    options = parser.parse_args()
    record = {"environment": describe_environment(options.device), "rounds": ROUNDS, "cases": []}
    print(json.dumps(record["environment"], indent=1))
    for batch, n, dtype in choose_cases(options.device, options.quick):
        if options.sizes and n not in options.sizes:
            continue
        case = measure_case(batch, n, dtype, options.device, options.quick, record["environment"]["copy_gbytes_s"])
        record["cases"].append(case)
        print_case(case)
    record["verdicts"] = list(judge(record["cases"], options.device))
    print("\n".join(record["verdicts"]))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"sinkhorn-{options.device}.json"
        path.write_text(json.dumps(record, indent=1))
        plot(record, options.out / f"sinkhorn-{options.device}.svg")
        print(f"record: {path}")


def choose_cases(device: str, quick: bool) -> list[tuple[int, int, torch.dtype]]:
    largest = (4096 if device == "cuda" else 1024) if quick else 4096
    sizes = [n for n in (16, 64, 128, 200, 256, 512, 1024, 2048, 4096) if n <= largest]
    if quick:
        sizes = [n for n in sizes if n in (64, 256, 512, 1024, 4096)]
    cases = [(1, n, torch.float32) for n in sizes]
    cases += [(32, 64, torch.float32), (32 if device == "cuda" else 4, 512, torch.float32)]
    return cases + [(1, n, torch.bfloat16) for n in sizes if n in (512, 2048)]


def competitors(logits: Tensor, grad: Tensor, quick: bool) -> dict[str, tuple[Callable, Callable]]:
    """Name to (forward, forward and backward); the latter returns the gradient as a tensor."""
    float32 = logits.dtype == torch.float32
    found: dict[str, tuple[Callable, Callable]] = {}

    def differentiate(forward: Callable[[Tensor], Tensor]) -> tuple[Callable, Callable]:
        leaf = logits.detach().clone().requires_grad_()

        def both() -> Tensor:
            leaf.grad = None
            forward(leaf).backward(grad)
            return leaf.grad

        return lambda: forward(logits), both

    found["onebasin"] = differentiate(lambda x: sinkhorn(x, num_iters=ROUNDS))
    found["onebasin, check=False"] = differentiate(lambda x: sinkhorn(x, num_iters=ROUNDS, check=False))
    if logits.is_cuda:
        found["onebasin, CUDA graph"] = capture(*found["onebasin, check=False"])
        if float32:
            found["onebasin, plain PyTorch"] = plain(logits, grad)
    if authors := load_authors() if float32 else None:  # it refuses bfloat16
        found["authors"] = authors(logits, grad, ROUNDS)
    if logits.numel() <= 2048**2 and not (quick and logits.numel() > 1024**2):
        found["unrolled"] = differentiate(lambda x: sinkhorn(x, num_iters=ROUNDS, gradient="unrolled", check=False))
    if float32 and logits.ndim == 2 and (ott := load_ott()):
        found["OTT-JAX"] = ott(logits, grad, ROUNDS)
    return found


def capture(forward: Callable, both: Callable) -> tuple[Callable, Callable]:
    """The same calls as CUDA graphs: what is left when Python and launches cost nothing."""
    replays = []
    for call in (forward, both):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        replays.append(functools.partial(lambda graph, output: (graph.replay(), output)[1], graph, output))
    return replays[0], replays[1]


def plain(logits: Tensor, grad: Tensor) -> tuple[Callable, Callable]:
    def forward() -> Tensor:
        return compute_plan(logits, 1.0, ROUNDS, None, "torch").plan

    def both() -> Tensor:
        plan, column_sums, _ = compute_plan(logits, 1.0, ROUNDS, None, "torch")
        return compute_gradient(plan, column_sums, grad, 1.0, "torch")

    return forward, both


def measure_case(batch: int, n: int, dtype: torch.dtype, device: str, quick: bool, bandwidth: float) -> dict:
    generator = torch.Generator().manual_seed(n)
    shape = (n, n) if batch == 1 else (batch, n, n)
    logits = (torch.randn(shape, generator=generator) * SHARPNESS).to(device, dtype)
    grad = torch.randn(shape, generator=generator).to(device, dtype)
    reference, steps = reference_gradient(logits, grad)
    calls = competitors(logits, grad, quick)
    repeats = 2 if n > 2048 and device == "cpu" else 5 if n * n * batch > 1024**2 else 15 if quick or n > 256 else 50
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    results = {}
    for name, (forward, both) in calls.items():
        error = float((both().to(reference) - reference).norm() / reference.norm())
        results[name] = {"gradient_error": error, "peak_matrices": peak_matrices(both, logits)}
        forward()
    for _ in range(repeats):
        for name, pair in calls.items():
            for call, samples in zip(pair, seconds[name], strict=True):
                samples.append(time_call(call, device))
    for name, (forward, both) in seconds.items():
        results[name] |= {"forward_ms": summarise(forward), "both_ms": summarise(both)}
    size = logits.element_size()
    floor = batch * n * n * (ROUNDS * size + 2 * size + (steps + 2) * 4 + 3 * size)
    return {
        "statistic": "median" if device == "cuda" else "least",
        "batch": batch,
        "n": n,
        "dtype": str(dtype).removeprefix("torch."),
        "gradient_steps": steps,
        "floor_bytes": floor,
        "floor_ms": floor / bandwidth / 1e6,
        "results": results,
    }


def reference_gradient(logits: Tensor, grad: Tensor) -> tuple[Tensor, int]:
    """The gradient in float64, and how many steps of conjugate gradients float32 takes for it."""
    plan, column_sums, _ = run_rounds(logits.double(), 1.0, ROUNDS, None)
    exact = adjoint.implicit_gradient(plan, column_sums, grad.double(), 1.0)
    products = 0

    def counted(matrix: Tensor, vector: Tensor, out: Tensor | None = None) -> Tensor:
        nonlocal products
        products += 1
        return multiply(matrix, vector, out)

    multiply, adjoint.multiply = adjoint.multiply, counted
    try:
        batch = [t.float().reshape(-1, *t.shape[-2:]) for t in (plan, grad)]
        adjoint.implicit_gradient(batch[0], batch[0].sum(-2), batch[1], 1.0)
    finally:
        adjoint.multiply = multiply
    return exact, (products - 2) // 2


def time_call(call: Callable, device: str) -> float:
    """Seconds of one call: on CUDA of a burst of them, as in a training loop, where launches run ahead of the device."""
    burst = 10 if device == "cuda" else 1
    for _ in range(burst):  # untimed, so that no one pays for the caches the one before it filled
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(burst):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / burst


def summarise(samples: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * sample for sample in samples)
    return {"least": ordered[0], "median": ordered[len(ordered) // 2]}


def peak_matrices(call: Callable, logits: Tensor) -> float | None:
    """Peak memory of a call beyond what was there before, in float32 matrices of the problem's size."""
    if not logits.is_cuda:
        with PeakMemory() as memory:
            call()
        return memory.peak / (4 * logits.numel()) or None  # another library's memory is not seen
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (4 * logits.numel())


def describe_environment(device: str) -> dict:
    size = 256 * 1024**2
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    best = min(time_call(lambda: target.copy_(source), device) for _ in range(10))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": find_commit(),
        "copy_gbytes_s": 2 * size / best / 1e9,
    }


def statistic(case: dict, name: str, what: str = "both_ms") -> float:
    return case["results"][name][what][case["statistic"]]


def print_case(case: dict) -> None:
    print(
        f"\nn = {case['n']}, batch {case['batch']}, {case['dtype']}: {case['gradient_steps']} gradient steps,"
        f" floor {case['floor_bytes']:.3g} bytes = {case['floor_ms']:.3f} ms"
    )
    ours = statistic(case, "onebasin")
    for name, result in case["results"].items():
        peak = f"{result['peak_matrices']:.1f} matrices" if result["peak_matrices"] is not None else ""
        forward, both = statistic(case, name, "forward_ms"), statistic(case, name)
        print(
            f"  {name:24} forward {forward:9.3f} ms   both {both:9.3f} ms   {both / ours:6.2f} x ours"
            f"   gradient error {result['gradient_error']:.1e}   {peak}"
        )


def judge(cases: list[dict], device: str) -> list[str]:
    """Against the targets: the plain call, and on CUDA also without the check and as a graph, which is free for the host."""
    names = ["onebasin"] + (["onebasin, check=False", "onebasin, CUDA graph"] if device == "cuda" else [])
    lines = ["", "against the authors' operator, forward and backward:"]
    for name in names:
        for case in cases:
            ours = statistic(case, name)
            single = case["batch"] == 1 and case["dtype"] == "float32"
            wanted = TARGETS[device].get(case["n"]) if single else None
            if wanted and "authors" in case["results"]:
                ratio = statistic(case, "authors") / ours
                verdict = "reached" if ratio >= wanted else "MISSED"
                lines.append(f"  {name:22} n = {case['n']:4}: {ratio:6.1f} x, wanted {wanted}: {verdict}")
            if device == "cuda" and (case["batch"], case["n"]) == (32, 512):
                verdict = "reached" if ours <= 1 else "MISSED"
                lines.append(f"  {name:22} 32 problems of n = 512: {ours:.3f} ms, wanted 1: {verdict}")
    if not any("authors" in case["results"] for case in cases):
        lines.append("  no ratios: it is not installed here (pip install --no-deps sinkhorn-rebasin==0.0.2)")
    return lines


def plot(record: dict, path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    cases = [case for case in record["cases"] if case["batch"] == 1 and case["dtype"] == "float32"]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(name for case in cases for name in case["results"]):
        points = [(case["n"], statistic(case, name)) for case in cases if name in case["results"]]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.loglog([c["n"] for c in cases], [c["floor_ms"] for c in cases], "k:", label="floor (bytes)")
    axes.set(xlabel="n", ylabel="forward and backward, ms", title=record["environment"]["device"])
    axes.legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()
