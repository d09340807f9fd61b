"""Is a network derived from another one: ``python -m benchmarks.provenance``.

Five families of small networks, and one whose training forgets its start. For each, networks are trained apart, and all
their pairs are tested: p-values must be uniform. From some of them others are derived in fifteen ways:
p-values must be at most 1e-6. Beside it, on the same pairs, the cosine of the weights, and the tests of model-tracing as
they are described (`benchmarks.peer_model_tracing`). Text is read from the folder that ONEBASIN_DATA names.

    python -m benchmarks.provenance --networks 12 --bases 3 --out results/provenance

writes provenance.jsonl, a row per pair, provenance.md and provenance.png. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kstest
from torch import nn

import onebasin as ob
from benchmarks import peer_model_tracing
from benchmarks.measuring import find_commit
from benchmarks.provenance_networks import (
    FAMILIES,
    FORGETFUL,
    Symmetries,
    add_lora,
    average,
    example,
    fine_tune,
    prune,
    quantise,
    train,
)
from onebasin.lineage.chance import combine, count_by_chance, tail

LEVEL = 1e-6
Record = dict[str, Any]


def derive(family: str, base: nn.Module, stranger: nn.Module, symmetries: Symmetries, seed: int) -> dict[str, nn.Module]:
    """Networks that are derived from a base, in every way."""
    tuned, adapted = fine_tune(family, base, seed), add_lora(family, base, seed)

    def moved(model: nn.Module) -> nn.Module:
        return symmetries.move(model, seed)

    return {
        "permuted": symmetries.move(base, seed, "permutation"),
        "rescaled": symmetries.move(base, seed, "scales"),
        "moved by all kinds": moved(base),
        "fine-tuned": tuned,
        "LoRA merged": adapted,
        "pruned": prune(base),
        "8 bits": quantise(base),
        "averaged": average(base, stranger),
        "fine-tuned, moved": moved(tuned),
        "LoRA merged, moved": moved(adapted),
        "pruned, moved": moved(prune(base)),
        "8 bits, moved": moved(quantise(base)),
        "averaged, moved": moved(average(base, stranger)),
        "fine-tuned, pruned, 8 bits, moved": moved(quantise(prune(tuned))),
        "fine-tuned, averaged, pruned, 8 bits, moved": moved(quantise(prune(average(tuned, stranger)))),
    }


def cosine(a: nn.Module, b: nn.Module) -> float:
    """Of all parameters as one vector."""
    one, other = (torch.cat([value.detach().flatten() for value in model.parameters()]) for model in (a, b))
    return float(nn.functional.cosine_similarity(one, other, dim=0))


def measure(family: str, a: nn.Module, b: nn.Module, symmetries: Symmetries, seed: int) -> Record:
    """All tests on one pair."""
    folded = [symmetries.fold(model) for model in (a, b)]
    begin = time.perf_counter()
    found = ob.provenance(*folded, symmetry=symmetries.canonical, seed=seed)
    seconds = time.perf_counter() - begin
    return {
        "family": family, "relation": found.relation, "p": found.p_value, **found.p_values, "change": found.change,
        "cosine": cosine(a, b), "constrained": peer_model_tracing.constrained(family, a, b),
        "unconstrained": peer_model_tracing.unconstrained(family, a, b), "seconds": seconds,
        "evidence": [[e.test, e.group, e.num_units, e.num_agreeing, e.p_value] for e in found.evidence],
    }  # fmt: skip


def run(trial: tuple[str, int, int]) -> list[Record]:
    """One family."""
    family, num_networks, num_bases = trial
    torch.set_num_threads(1)
    networks = [train(family, seed) for seed in range(num_networks)]
    symmetries = Symmetries(networks[0], example(family))
    records = []
    for number in range(num_bases):
        base, stranger = networks[number], networks[-1 - number]
        for how, model in derive(family, base, stranger, symmetries, number).items():
            record = measure(family, base, model, symmetries, number)
            records.append({"derived": how, "pair": [number, number], **record})
    for one, other in itertools.combinations(range(num_networks), 2):
        record = measure(family, networks[one], networks[other], symmetries, one * num_networks + other)
        records.append({"derived": "", "pair": [one, other], **record})
    return records


def without_tolerance(record: Record) -> float:
    """The p-value of the residual test if nothing that was learned could reach the residuals."""
    draws = np.random.default_rng(record["pair"])
    counts = [(units, agreeing) for test, _, units, agreeing, _ in record["evidence"] if test == "residual"]
    return combine([tail(agreeing, count_by_chance(units), draws.random()) for units, agreeing in counts])


def write_tables(records: list[Record]) -> str:
    """The page of results."""
    lines = ["# Provenance of small networks", ""]
    null, derived = ([r for r in records if bool(r["derived"]) is is_derived] for is_derived in (False, True))
    counts = []
    for is_forgetful in (False, True):
        chosen = [[r for r in rows if (r["family"] == FORGETFUL) is is_forgetful] for rows in (derived, null)]
        counts += [f"{sum(r['p'] <= LEVEL for r in rows)} of {len(rows)}" for rows in chosen]
    lines += [
        f"P-values of at most 1e-6: {counts[0]} derived pairs, {counts[1]} independent pairs. Where training forgets the "
        f"start: {counts[2]} derived pairs, {counts[3]} independent pairs.", "",
        f"`python -m benchmarks.provenance`, torch {torch.__version__} on a CPU, commit {find_commit()}; every pair is in "
        "provenance.jsonl.", "",
        "## Independent pairs", "",
        "All pairs of networks that were trained apart on the same data. A network is in many pairs, so that pairs are not "
        "independent of each other; the p-values of the order test are independent for any two pairs. KS is the p-value of "
        "a Kolmogorov-Smirnov test against the uniform distribution. The residual test allows for shared features and is "
        "conservative by design: its p-values are larger than uniform ones; without its tolerance they would be as shown.",
        "", "| family | pairs | order: KS | smallest | residual: KS above uniform | smallest | residual, no tolerance: KS | "
        "smallest | units that agree, mean | smallest p of both | largest cosine | model-tracing constrained: KS | "
        "smallest | unconstrained: KS | smallest |",
        "|" + "---|" * 15,
    ]  # fmt: skip
    chosen = {family: [r for r in null if r["family"] == family] for family in dict.fromkeys(r["family"] for r in records)}
    chosen["all but the last"] = [r for r in null if r["family"] != FORGETFUL]
    for family, rows in chosen.items():
        order, residual = ([r[test] for r in rows] for test in ("order", "residual"))
        strict = [without_tolerance(r) for r in rows]
        agreeing = [e[3] for r in rows for e in r["evidence"] if e[0] == "residual"]
        peers = [[r[name] for r in rows if r[name] is not None] for name in ("constrained", "unconstrained")]
        cells = [
            family, str(len(rows)), _ks(order), f"{min(order):.1e}", _ks(residual, "greater"), f"{min(residual):.1e}",
            _ks(strict), f"{min(strict):.1e}", f"{np.mean(agreeing):.2f}", f"{min(r['p'] for r in rows):.1e}",
            f"{max(r['cosine'] for r in rows):.3f}",
            *(text for p in peers for text in ((_ks(p), f"{min(p):.1e}") if p else ("", ""))),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", "## Derived pairs", "",
        "P-values of each base, and the relation that was found. Cosine: how many are above the largest of all independent "
        "pairs of the family. Model-tracing: how many p-values are at most 1e-6.",
        "", "| family | derived by | p, each | relation | changed by at most | found by cosine | "
        "model-tracing constrained | unconstrained |", "|" + "---|" * 8,
    ]  # fmt: skip
    for family, how in dict.fromkeys((r["family"], r["derived"]) for r in derived):
        rows = [r for r in derived if (r["family"], r["derived"]) == (family, how)]
        largest = max(r["cosine"] for r in null if r["family"] == family)
        changes = [r["change"] for r in rows if r["change"] is not None]
        cells = [
            family, how, ", ".join(f"{r['p']:.0e}" for r in rows), ", ".join(dict.fromkeys(r["relation"] for r in rows)),
            f"{max(changes):.1%}" if changes else "", f"{sum(r['cosine'] > largest for r in rows)} of {len(rows)}",
            *(_count(rows, name) for name in ("constrained", "unconstrained")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ks(values: list[float], alternative: str = "two-sided") -> str:
    """The p-value of a test against uniform ones; "greater": only values that are too small count."""
    return f"{kstest(values, 'uniform', alternative=alternative).pvalue:.2g}"


def _count(rows: list[Record], name: str) -> str:
    values = [r[name] for r in rows if r[name] is not None]
    return f"{sum(p <= LEVEL for p in values)} of {len(values)}" if values else ""


def draw(records: list[Record], path: Path) -> None:
    """P-values of independent pairs in order, beside those of a uniform distribution."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    null = [r for r in records if not r["derived"]]
    columns: dict[str, Callable[[Record], float]] = {
        "order": lambda r: r["order"], "residual, no tolerance": without_tolerance, "residual": lambda r: r["residual"],
    }  # fmt: skip
    for axis, (title, read) in zip(axes, columns.items(), strict=True):
        for family in dict.fromkeys(r["family"] for r in null):
            values = sorted(read(r) for r in null if r["family"] == family)
            axis.plot((np.arange(len(values)) + 0.5) / len(values), values, label=family)
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="share of independent pairs", ylabel="p-value" if axis is axes[0] else "")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, derive, test, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=12, help="of each family (default 12: 66 pairs)")
    parser.add_argument("--bases", type=int, default=3, help="of them that others are derived from (default 3)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/provenance"), help="without its suffix")
    options = parser.parse_args()
    trials = [(family, options.networks, options.bases) for family in options.families]
    records = []
    with (
        multiprocessing.get_context("spawn").Pool(min(options.processes, len(trials))) as pool,
        options.out.with_suffix(".jsonl").open("w") as file,
    ):
        for some in pool.imap(run, trials):
            records += some
            file.write("".join(f"{json.dumps(record)}\n" for record in some))
            file.flush()
    options.out.with_suffix(".md").write_text(page := write_tables(records))
    draw(records, options.out.with_suffix(".png"))
    print(page)


if __name__ == "__main__":
    main()
