"""One step of a descent beside one step of training: ``python -m benchmarks.steps [--device cuda]``.

An MLP 784-w-w-10 and a batch of 1,000. Training is a step of Adam on its weights; on CUDA with PyTorch's fused Adam and with
ours, and the faster of the two is what other steps are compared with. Ours is a step of the Sinkhorn descent on
L2, on the middle of the line (Mid) or on a random point of it (Rnd); "Mid, light" takes half the rounds and solver steps.
The authors' is the same by their package, where ``--authors PYTHON`` names an interpreter that has it. Plain steps are
compared with plain ones; on CUDA every step is also captured in a graph and replayed, and compared with training captured
likewise. The plans are as sharp as in the middle of a descent, so that the gradient takes all the solver steps it may.

The floor is that of the matrix products (forward and backward, of network and permutation) at the speed of a large product
in the same run and precision.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onebasin as ob
from benchmarks import measuring
from benchmarks.measuring import Record, append, attempt, measure_bytes, run_sizes, say, time_call
from onebasin.descent.adam import make_adam
from onebasin.descent.cuda_graphs import NUM_WARMUP, CapturedStep
from onebasin.matching.methods.sinkhorn import make_optimizer, make_step
from onebasin.matching.problem import Problem
from onebasin.tensors.states import read_state

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCH, INPUTS, CLASSES = 1000, 784, 10
KINDS = ("L2", "Mid", "Rnd")
LIGHT = "Mid, light"
TRAINING = ("training", "training, PyTorch's Adam")
SOLVER_STEPS, ROUNDS = 10, 20
Run = Callable[[Any], Tensor]


def make_mlp(width: int, depth: int = 2, seed: int = 0) -> nn.Sequential:
    """An MLP with `depth` hidden layers."""
    torch.manual_seed(seed)
    sizes = [INPUTS, *[width] * depth, CLASSES]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_pair(width: int, depth: int, device: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The network to permute and the one to align it to."""
    return make_mlp(width, depth, 1).to(device), make_mlp(width, depth, 0).to(device)


def make_batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(BATCH, INPUTS, generator=generator)
    return x.to(device), torch.randint(CLASSES, (BATCH,), generator=generator).to(device)


# ------------------------------------------------------------------------------------------------------------- the steps


def training_step(width: int, device: str, kind: str = "training") -> Run:
    """A step of Adam on the weights; `kind` is one of `TRAINING`."""
    model = make_mlp(width).to(device)
    weights = list(model.parameters())
    fused = torch.optim.Adam(weights, fused=True, capturable=device.startswith("cuda"))
    optimizer = make_adam(weights, [1e-3] * len(weights)) if kind == "training" else fused

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        cost = cross_entropy(model(batch[0]), batch[1])
        cost.backward()
        optimizer.step()
        return cost.detach()

    return step


def make_net(model: nn.Module, symmetry: ob.Symmetry, share: float = 1.0) -> ob.RebasinNet:
    """Plans that hold much of their mass in one place, and noise, as in the middle of a descent."""
    return ob.RebasinNet(
        model, symmetry, num_iters=int(share * ROUNDS), init=symmetry.identity(), noise=1.0, mass=0.9,
        generator=torch.Generator().manual_seed(0), solver_steps=int(share * SOLVER_STEPS),
    )  # fmt: skip


def our_step(model: nn.Module, to: nn.Module, symmetry: ob.Symmetry, kind: str) -> Run:
    """The step of ``align(method="sinkhorn")``."""
    objectives = {"L2": ob.WeightDistance(), "Mid": ob.Midpoint(cross_entropy), "Rnd": ob.RandomPoint(cross_entropy)}
    objective: Any = objectives[kind.split(",")[0]]
    source, target = read_state(model), read_state(to)
    problem = Problem(symmetry, source, target, tuple(source), objective.bind(to), model=to)
    net = make_net(model, symmetry, 0.5 if kind == LIGHT else 1.0)
    net = net.to(problem.device)
    return make_step(problem, net, make_optimizer(net, "adam", lr=0.01))


def our_parts(model: nn.Module, to: nn.Module, symmetry: ob.Symmetry, device: str) -> dict[str, Run]:
    """What a step on data is made of, each forward and backward by itself: where the time goes."""
    net = make_net(model, symmetry).to(device)
    plans = {name: plan.detach().requires_grad_() for name, plan in net.plans().items()}
    noise = {name: torch.randn_like(plan) for name, plan in plans.items()}
    state = {key: value.detach() for key, value in model.state_dict().items()}
    soft = {key: value.detach().requires_grad_() for key, value in net(state, plans).items()}
    gradients = {key: torch.randn_like(value) for key, value in soft.items()}
    objective = ob.Midpoint(cross_entropy).bind(to)
    target = {key: value.detach() for key, value in to.state_dict().items()}
    logits = list(net.parameters())
    optimizer = make_adam(logits, [1e-3] * len(logits))
    for p in logits:
        p.grad = torch.zeros_like(p)
    done = torch.zeros((), device=device)

    def run_rounds(_: Any) -> Tensor:
        with torch.no_grad():
            net.plans(check=False)
        return done

    def run_operator(_: Any) -> Tensor:
        made = net.plans(check=False)
        torch.autograd.grad(list(made.values()), logits, [noise[name] for name in made])
        return done

    def run_mixing(_: Any) -> Tensor:
        mixed = {key: value for key, value in net(state, plans).items() if value.requires_grad}
        torch.autograd.grad(list(mixed.values()), list(plans.values()), [gradients[key] for key in mixed])
        return done

    def run_network(batch: Any) -> Tensor:
        cost = objective(soft, target, batch)
        torch.autograd.grad(cost, list(soft.values()))
        return done

    def run_adam(_: Any) -> Tensor:
        optimizer.step()
        return done

    return {"rounds": run_rounds, "rounds and gradient": run_operator, "mixing": run_mixing, "network": run_network,
            "Adam": run_adam}  # fmt: skip


def authors_step(model: nn.Module, to: nn.Module, kind: str, device: str) -> Run:
    """The step of their examples, from the identity: its cost does not depend on the plans."""
    from experiments.authors import require_authors

    rebasin = require_authors()
    with contextlib.redirect_stdout(io.StringIO()):
        net = rebasin.RebasinNet(copy.deepcopy(model).cpu(), input_shape=(1, INPUTS))
    net.identity_init()
    net.to(device)
    net.reparamnet.to(device)
    target = copy.deepcopy(to)
    costs = {"Mid": rebasin.loss.MidLoss, "Rnd": rebasin.loss.RndLoss}
    criterion = rebasin.loss.DistL2Loss(target) if kind == "L2" else costs[kind](target, criterion=cross_entropy)
    optimizer = torch.optim.Adam(net.p.parameters(), lr=0.01)
    net.train()

    def step(batch: Any) -> Tensor:
        cost = criterion(net()) if kind == "L2" else criterion(net(), *batch)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        return cost.detach()

    return step


# ------------------------------------------------------------------------------------------------------------ the floors


def count_flops(width: int, kind: str, depth: int = 2) -> int:
    """Of the matrix products of a step; `kind` is one of `TRAINING` or of ours."""
    inner = depth - 1
    forward = INPUTS * width + inner * width**2 + CLASSES * width
    network = 2 * BATCH * (3 * forward - INPUTS * width)  # no gradient of the images
    # P W and its gradient; of P W Q^T two products forward and three backward; the vectors of a group together.
    mixing = 2 * (2 * INPUTS * width**2 + 5 * inner * width**3 + 2 * CLASSES * width**2 + 2 * depth * width**2)
    return network if kind in TRAINING else mixing if kind == "L2" else network + mixing


def count_bytes(width: int, depth: int = 2) -> int:
    """The least that plans read and write: a pass per round and per solver step, and logits and moments of Adam."""
    return depth * 4 * width**2 * (ROUNDS + 2 + SOLVER_STEPS + 5 + 7)


# ----------------------------------------------------------------------------------------------------------- measurements


def measure_step(make: Callable[[], Run], batch: Any, device: str, capture: bool) -> Record:
    """Seconds of a step, and the most memory that making and taking it held."""
    made: list[Run] = []

    def prepare() -> None:
        made.append(CapturedStep(make(), capture, torch.device(device)))
        for _ in range(NUM_WARMUP + 2 if capture else 2):
            made[0](batch)

    held = measure_bytes(prepare, device)
    if not device.startswith("cuda"):  # made anew: what counts memory makes the first calls slow
        made = []
        prepare()
    step = made[0]
    if capture and not (isinstance(step, CapturedStep) and step.is_captured):
        raise RuntimeError("the step was not captured")
    seconds = 0.15 if device.startswith("cuda") else 0.3  # where the clock is steady
    return {"seconds": time_call(lambda: step(batch), device, seconds), "bytes": held}


def measure_width(width: int, device: str, who: str) -> Record:
    """Every step at one width, plain and captured."""
    batch = make_batch(device)
    model, to = make_pair(width, 2, device)
    symmetry = ob.symmetry(to, batch[0][:1], verify=False) if who == "ours" else None
    makers: dict[str, Callable[[], Run]] = {}
    if symmetry is not None:
        forms = TRAINING if device.startswith("cuda") else TRAINING[:1]
        makers |= {kind: lambda kind=kind: training_step(width, device, kind) for kind in forms}
        makers |= {kind: lambda kind=kind: our_step(model, to, symmetry, kind) for kind in (*KINDS, LIGHT)}
    else:
        makers |= {kind: lambda kind=kind: authors_step(model, to, kind, device) for kind in KINDS}
    rows = {}
    for kind, make in makers.items():
        rows[kind] = {"plain": attempt(lambda make=make: measure_step(make, batch, device, False))}
        if device.startswith("cuda") and who == "ours":
            rows[kind]["captured"] = attempt(lambda make=make: measure_step(make, batch, device, True))
    parts = {}
    if symmetry is not None:
        capture = device.startswith("cuda")
        for name, run in our_parts(model, to, symmetry, device).items():
            parts[name] = attempt(lambda run=run: measure_step(lambda: run, batch, device, capture)).get("seconds")
    floors = {"flops": {kind: count_flops(width, kind) for kind in makers}, "floor_bytes": count_bytes(width)}
    return {"rows": rows, "parts": parts, **floors}


def work(who: str, device: str, sizes: Sequence[int], tf32: bool) -> None:
    """A worker: a line per width."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for width in sizes:
            say(attempt(lambda width=width: measure_width(width, device, who)))


# -------------------------------------------------------------------------------------------------------------- the table


def seconds_of(record: Record | None, kind: str, mode: str) -> float | None:
    return (record or {}).get("rows", {}).get(kind, {}).get(mode, {}).get("seconds")


def describe(width: int, ours: Record, authors: Record | None, peaks: Record) -> str:
    """A row of the table for each way of running."""
    lines = []
    for mode in ("plain", "captured"):
        forms = [seconds for kind in TRAINING if (seconds := seconds_of(ours, kind, mode)) is not None]
        if not forms:
            continue
        training = min(forms)
        cells = [" / ".join(f"{1e3 * seconds:.3f}" for seconds in forms)]
        for kind in (*KINDS, LIGHT):
            own, theirs = seconds_of(ours, kind, mode), seconds_of(authors, kind, "plain")
            if own is None:
                cells.append(ours["rows"][kind][mode].get("failed", "-")[:40])
                continue
            floor = count_flops(width, kind) / peaks["flops_s"]
            times = "" if theirs is None else f", authors {theirs / own:.1f} x"
            cells.append(f"{1e3 * own:.3f} ({own / training:.2f} x training, {own / floor:.2f} x floor{times})")
        lines.append(f"| {width} | {mode} | " + " | ".join(cells) + " |")
    parts = [f"{name} {1e3 * value:.3f}" for name, value in ours.get("parts", {}).items() if value is not None]
    if parts:
        lines.append(f"| {width} | parts | " + ", ".join(parts) + " | | | | |")
    return "\n".join(lines) or f"| {width} | {ours.get('failed', 'failed')} |"


def main() -> None:
    """Measure all widths and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="*", type=int, default=WIDTHS, help="widths")
    parser.add_argument("--quick", action="store_true", help="widths up to 512, twenty seconds")
    parser.add_argument("--tf32", action="store_true", help="matrix products in TF32, of all steps")
    parser.add_argument("--authors", metavar="PYTHON", help="an interpreter that has sinkhorn-rebasin")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one width")
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    measuring.check_device(options.device)
    measuring.check_files(options.out, options.authors)
    if options.worker:
        work(options.worker, options.device, options.sizes, options.tf32)
        return
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    sizes = [w for w in options.sizes if w <= 512 or not options.quick]
    torch.set_num_threads(1)
    peaks = measuring.measure_peaks(options.device)
    head = {"what": "steps", **measuring.describe_machine(options.device), "tf32": options.tf32, **peaks}
    print(
        f"{head['device']}: {peaks['flops_s'] / 1e12:.2f} Tflop/s, {peaks['bytes_s'] / 1e9:.0f} GB/s; milliseconds per step"
    )
    print("\n| width | run | training (our Adam / PyTorch's) | " + " | ".join((*KINDS, LIGHT)) + " |\n" + "|---" * 7 + "|")
    flags = ["--device", options.device, *(["--tf32"] if options.tf32 else [])]
    pythons = {"authors": options.authors, "ours": sys.executable}
    found: dict[str, dict[int, Record]] = {"authors": {}, "ours": {}}
    for who in ("authors", "ours"):
        if not pythons[who]:
            continue
        for record in run_sizes(pythons[who], "benchmarks.steps", [who, *flags], sizes, options.limit):
            found[who][record["size"]] = record
            append(options.out, {**head, "who": who, **record})
            if who == "ours":
                print(describe(record["size"], record, found["authors"].get(record["size"]), peaks), flush=True)


if __name__ == "__main__":
    main()
