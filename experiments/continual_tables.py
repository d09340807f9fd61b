"""Tables of continual learning, from records alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from onebasin.continual import AccuracyMatrix
from onebasin.tensors.files import write_atomically

Run = dict[str, Any]
BENCHMARKS = {"mnist": "Rotated MNIST", "cifar": "Split CIFAR-100"}
STAGES = {
    "rebasin": "re-basin with the authors' settings, and without its parts",
    "seeds": "re-basin with the authors' settings, more seeds",
    "tuned": "settings chosen on validation data",
    "authors": "baselines with the authors' settings",
    "kinds": "re-basin with permutations, and with positive scales beside them",
}
PAIRS = [
    ("rebasin", "as the authors", "no permutation"),
    ("rebasin", "all permuted", "as the authors"),
    ("seeds", "as the authors", "no permutation"),
    ("tuned", "re-basin", "residual alone"),
    ("tuned", "re-basin, stored outputs", "residual alone, stored outputs"),
    ("tuned", "re-basin, stored outputs, late steps", "residual alone, stored outputs"),
    ("tuned", "re-basin, stored outputs, late steps", "DER++"),
    ("tuned", "DER++", "CLeWI"),
    ("tuned", "CLeWI", "replay"),
    ("tuned", "Stable SGD", "LwF"),
    *(("tuned", "re-basin", row) for row in ("replay", "A-GEM", "LwF", "EWC")),
    ("kinds", "as the authors, with scales", "as the authors"),
    ("kinds", "stored outputs, late steps, with scales", "stored outputs, late steps"),
]
MIN_SEEDS = 5
"""With fewer pairs a difference is not tested."""
_OWN_MEMORY = frozenset({("mnist", "CLeWI")})
"""Rows whose seeds are no stack of networks, where those of the others are: for the same seed they have other memories."""
_WITHOUT_MEMORY = frozenset({"finetune", "ewc", "lwf", "stable_sgd"})
_NUM_CLASSES = {"mnist": 10, "cifar": 5}
"""Of each task."""
_ABOUT_TESTS = (
    "Differences are means over paired seeds, with their standard error. p is of a two-sided paired t-test on the n seeds "
    f"that both rows have, not corrected for the number of comparisons; with fewer than {MIN_SEEDS} seeds there is none. "
    "There is none for CLeWI on Rotated MNIST either: for the same seed its memory holds other examples than that of the "
    "others. *Memory* is what is stored at the end of the stream, *to joint training* the accuracy less that of joint "
    "training, by the authors' settings."
)
# Accuracy in percent and forgetting, as the paper prints them.
PAPER = {
    "mnist": {
        "finetune": "46.28 ± 1.01, 0.52",
        "ewc": "59.92 ± 1.71, 0.34",
        "lwf": "61.86 ± 3.66, 0.29",
        "agem": "68.47 ± 0.90, 0.28",
        "as the authors": "78.14 ± 0.50, 0.12",
        "joint": "90.84 ± 4.30, 0",
    },
    "cifar": {
        "finetune": "35.41 ± 0.95, 0.49",
        "ewc": "50.50 ± 1.33, 0.24",
        "lwf": "41.43 ± 4.06, 0.51",
        "agem": "44.42 ± 1.46, 0.36",
        "as the authors": "51.34 ± 0.74, 0.07",
        "joint": "60.48 ± 0.54, 0",
    },
}


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Print and write the tables."""
    good = drop_superseded(records)
    for record in records:
        if "error" in record["result"]:
            print(f"a trial of the stage {record['config']['stage']!r} failed: {record['result']['error'].splitlines()[-1]}")
    verdicts = [_verdict(rows, title) for key, title in BENCHMARKS.items() if (rows := collect(good, "tuned", key))]
    parts = ["# Continual learning", *(["\n".join(verdicts)] if verdicts else []), _ABOUT_TESTS]
    for benchmark, title in BENCHMARKS.items():
        for stage, about in STAGES.items():
            for layers in (1, 2):
                rows = collect(good, stage, benchmark, layers)
                if rows:
                    hidden = f", {layers} hidden layer{'s' if layers > 1 else ''}" if benchmark == "mnist" else ""
                    shown = Shown(find_memories(good, stage, benchmark, layers), _find_joint(good, benchmark, layers))
                    parts += [f"## {title}{hidden}: {about}", _table(rows, benchmark, shown)]
        parts += _difference_table(good, benchmark, title)
        parts += _front_table(good, benchmark, title)
        parts += _tuning_table(good, benchmark, title) + _cost_table(good, benchmark, title)
    seconds = sum(record["seconds"] for record in good)
    parts.append(f"{len(good)} trials, {seconds:.0f} s in all, several of them at a time; {_describe_machines(good)}.")
    parts += sorted({record["note"] for record in good if "note" in record})
    text = "\n\n".join(parts) + "\n"
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "continual.md", lambda file: _write(file, text))


def _verdict(rows: dict[str, dict[int, Run]], title: str) -> str:
    """The most accurate tuned row of a stream, beside the best without a permutation and DER++, where these were run."""
    found = {row: scores(runs.values())[:2] for row, runs in rows.items()}
    first = max(found, key=lambda row: float(found[row][0].mean()))
    shown = dict.fromkeys((first, "re-basin, stored outputs, late steps", "residual alone, stored outputs", "DER++"))
    told = [
        f"{row} {found[row][0].mean():.2f} ± {deviation(found[row][0]):.2f} %, forgetting {found[row][1].mean():.3f}"
        for row in shown
        if row in found
    ]
    return f"- {title}, tuned, the most accurate row first: {'; '.join(told)}."


def drop_superseded(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without failures, and without rows that were run again later, on the same seeds or more, with other settings or grids.

    A row of the stage "front" is one of the stage "tuned" too: its best setting is chosen in the same way, from more.
    """
    good = [record for record in records if "error" not in record["result"]]

    def replaces(other: int, one: int) -> bool:
        a, b = good[other]["config"], good[one]["config"]
        same = all(a.get(key) == b.get(key) for key in ("benchmark", "layers", "row", "capture"))
        again = (a["stage"] == b["stage"] and other > one) or (a["stage"], b["stage"]) == ("front", "tuned")
        return same and again and set(a.get("seeds", ())) >= set(b.get("seeds", ()))

    return [good[one] for one in range(len(good)) if not any(replaces(other, one) for other in range(len(good)))]


def is_of(config: dict[str, Any], stage: str, benchmark: str, layers: int) -> bool:
    """Whether a trial is in a table; that of the stage "tuned" has the best settings of the fronts too."""
    stages = (stage, "front") if stage == "tuned" else (stage,)
    return config["stage"] in stages and (config["benchmark"], config["layers"]) == (benchmark, layers)


def collect(records: Iterable[dict[str, Any]], stage: str, benchmark: str, layers: int = 1) -> dict[str, dict[int, Run]]:
    """For each row of a table its runs by seed."""
    rows: dict[str, dict[int, Run]] = {}
    for record in records:
        config = record["config"]
        if is_of(config, stage, benchmark, layers):
            rows.setdefault(config["row"], {}).update({run["seed"]: run for run in record["result"]["runs"]})
    return rows


class Shown(NamedTuple):
    """What a table shows beside the runs: the memory of each row, and the accuracy of joint training if it was run."""

    memories: dict[str, str]
    joint: float | None


def find_memories(records: Iterable[dict[str, Any]], stage: str, benchmark: str, layers: int) -> dict[str, str]:
    """What each row stores of a stream: so many examples, and the outputs of the network on them."""
    memories = {}
    for record in records:
        config = record["config"]
        if is_of(config, stage, benchmark, layers):
            strategy, variant = config.get("strategy"), record["result"]["runs"][0]["variant"]
            count = variant.get("memory_per_class", 5) * _NUM_CLASSES[benchmark] * config.get("num_tasks", 20)
            has_outputs = strategy == "derpp" or variant.get("recall", 0) > 0
            stored = f"{count:,}, with outputs" if has_outputs else f"{count:,}"
            stored = "all" if strategy == "joint" else stored
            memories[config["row"]] = "none" if strategy in _WITHOUT_MEMORY or not count else stored
    return memories


def _find_joint(records: Iterable[dict[str, Any]], benchmark: str, layers: int) -> float | None:
    found = collect(records, "authors", benchmark, layers).get("joint")
    return float(scores(found.values())[0].mean()) if found else None


def scores(runs: Iterable[Run]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accuracy in percent, forgetting and Avalanche's forgetting of each run; 0 of joint training, which has one row."""
    values = []
    for run in runs:
        last = run["rows"][-1]
        if len(run["rows"]) < len(last):
            values.append((100 * float(np.mean(last)), 0.0, 0.0))
        else:
            matrix = AccuracyMatrix(run["rows"])
            values.append((100 * matrix.average, matrix.forgetting, matrix.drop))
    accuracy, forgetting, drop = np.array(values).T
    return accuracy, forgetting, drop


class Difference(NamedTuple):
    """A difference in accuracy, in points, or in forgetting.

    Attributes:
        mean: Over the seeds that both have.
        error: Its standard error.
        num_seeds: n.
        p_value: Of a two-sided paired t-test; None if n is too small, or the difference is the same on all seeds.
    """

    mean: float
    error: float
    num_seeds: int
    p_value: float | None

    def __format__(self, numbers: str) -> str:
        test = f"n = {self.num_seeds}" if self.p_value is None else f"p = {self.p_value:.2g}, n = {self.num_seeds}"
        return f"{self.mean:+{numbers}} ± {self.error:{numbers}} ({test})"

    def __str__(self) -> str:
        return format(self, ".2f")


def compare(
    ours: dict[int, Run],
    theirs: dict[int, Run],
    num_tasks: int | None = None,
    measure: Literal["accuracy", "forgetting"] = "accuracy",
) -> Difference:
    """The mean difference over the seeds that both have.

    Args:
        ours: runs by seed.
        theirs: likewise.
        num_tasks: look at the network after so many tasks; at the last one if None.
        measure: What is compared.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    index = 0 if measure == "accuracy" else 1
    first, second = (
        scores({**runs[seed], "rows": runs[seed]["rows"][:num_tasks]} for seed in seeds)[index] for runs in (ours, theirs)
    )
    difference = first - second
    error = deviation(difference) / len(seeds) ** 0.5
    is_tested = len(seeds) >= MIN_SEEDS and difference.std() > 0
    p_value = float(stats.ttest_rel(first, second).pvalue) if is_tested else None
    return Difference(float(difference.mean()), error, len(seeds), p_value)


def _difference_table(records: list[dict[str, Any]], benchmark: str, title: str) -> list[str]:
    """What the permutation does to the accuracy, over the stream, and to the forgetting; and other pairs of rows."""
    lines, header = [], []
    for stage, with_it, without in PAIRS:
        for layers in (1, 2):
            rows = collect(records, stage, benchmark, layers)
            if with_it not in rows or without not in rows:
                continue
            last = len(next(iter(rows[with_it].values()))["rows"])
            places = [*range(5, last, 5), last]
            header = ["", *(f"after {place} tasks" for place in places), "forgetting"]
            hidden = f", {layers} hidden" if benchmark == "mnist" else ""
            found = [compare(rows[with_it], rows[without], place) for place in places]
            found.append(compare(rows[with_it], rows[without], measure="forgetting"))
            if {(benchmark, with_it), (benchmark, without)} & _OWN_MEMORY:
                found = [difference._replace(p_value=None) for difference in found]
            *accuracies, forgetting = found
            lines.append([f"{stage}: {with_it} - {without}{hidden}", *map(str, accuracies), f"{forgetting:.3f}"])
    return [f"## {title}: differences in accuracy, and in forgetting at the end", markdown(header, lines)] if lines else []


def _table(rows: dict[str, dict[int, Run]], benchmark: str, shown: Shown) -> str:
    reference = next((row for row in ("as the authors", "re-basin") if row in rows), None)
    header = ["", "accuracy %", "to joint training", "forgetting", "since learned", "memory, examples", "units moved"]
    header += ["seeds", "difference to re-basin", "paper"]
    lines = []
    for row, found in rows.items():
        accuracy, forgetting, drop = scores(found.values())
        moved = [share for run in found.values() for share in run["moved"]]
        cells = [row, f"{accuracy.mean():.2f} ± {deviation(accuracy):.2f}"]
        cells.append("" if shown.joint is None else f"{accuracy.mean() - shown.joint:+.2f}")
        cells += [f"{forgetting.mean():.3f} ± {deviation(forgetting):.3f}", f"{drop.mean():.3f}", shown.memories[row]]
        cells += [f"{100 * float(np.mean(moved)):.0f} %" if moved else "", str(len(found))]
        if reference is None or row == reference:
            cells.append("")
        else:
            difference = compare(found, rows[reference])
            paired = (benchmark, row) not in _OWN_MEMORY
            cells.append(str(difference if paired else difference._replace(p_value=None)))
        lines.append([*cells, PAPER[benchmark].get(row, "")])
    return markdown(header, lines)


def find_fronts(records: Iterable[dict[str, Any]], benchmark: str) -> dict[str, dict[str, Any]]:
    """The results of the stage "front" by row."""
    found = (r for r in records if (r["config"]["stage"], r["config"]["benchmark"]) == ("front", benchmark))
    return {record["config"]["row"]: record["result"] for record in found}


def _front_table(records: list[dict[str, Any]], benchmark: str, title: str) -> list[str]:
    """For each strategy the best setting, and the best of those that forgot little on validation data, on test data."""
    fronts, lines = find_fronts(records, benchmark), []
    peer = {run["seed"]: run for run in fronts.get("DER++", {}).get("runs", ())}
    for row, result in fronts.items():
        points = [("best accuracy", result["runs"])]
        points += [(f"forgets at most {point['limit']}", point["runs"]) for point in result["front"]]
        for chosen, runs in points:
            accuracy, forgetting, _ = scores(runs)
            difference = str(compare({run["seed"]: run for run in runs}, peer)) if peer and row != "DER++" else ""
            numbers = [f"{v.mean():.{d}f} ± {deviation(v):.{d}f}" for v, d in ((accuracy, 2), (forgetting, 3))]
            lines.append([row, chosen, *numbers, difference, f"`{json.dumps(runs[0]['variant'])}`"])
    header = ["", "chosen on validation data", "accuracy %", "forgetting", "difference to DER++ at its best", "setting"]
    return [f"## {title}: accuracy against forgetting", markdown(header, lines)] if lines else []


def _tuning_table(records: list[dict[str, Any]], benchmark: str, title: str) -> list[str]:
    """For each strategy what was chosen, and by how much; settings beyond the grid were tried once that was known."""
    lines = []
    for record in records:
        config = record["config"]
        if config["benchmark"] != benchmark or config["stage"] == "beyond" or not record["result"].get("tuning"):
            continue
        beyond = find_beyond(records, config)
        extra = [run for each in beyond for run in each["result"]["tuning"]]
        grid = [variant for each in (record, *beyond) for variant in each["config"]["variants"]]
        tuning = record["result"]["tuning"] + extra
        common = set.intersection(*(set(map(str, run["variant"].items())) for run in tuning))
        name = config["row"] + (", two hidden layers" if config["layers"] == 2 else "")
        for run in sorted(tuning, key=lambda run: -AccuracyMatrix(run["rows"]).average):
            matrix = AccuracyMatrix(run["rows"])
            own = {key: value for key, value in run["variant"].items() if str((key, value)) not in common}
            numbers = [f"{100 * matrix.average:.2f}", f"{matrix.forgetting:.3f}"]
            chosen = "beyond the grid" if run in extra else ""
            if run["variant"] == record["result"]["runs"][0]["variant"]:
                edges = find_edges(run["variant"], grid)
                chosen = f"yes, at an edge of {', '.join(edges)}" if edges else "yes"
            lines.append([name, f"`{json.dumps(own)}`", *numbers, chosen])
    header = ["", "setting", "accuracy %", "forgetting", "chosen"]
    return [f"## {title}: grids on validation data", markdown(header, lines)] if lines else []


def find_beyond(records: Iterable[dict[str, Any]], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of settings beyond the grid of a row."""
    same = ("benchmark", "layers", "row")
    return [r for r in records if r["config"]["stage"] == "beyond" and all(r["config"][key] == config[key] for key in same)]


def find_edges(chosen: dict[str, Any], grid: Sequence[dict[str, Any]]) -> list[str]:
    """The options of which a grid has several values, all numbers, and the chosen setting the least or the greatest."""
    edges = []
    for option, value in chosen.items():
        numbers = [variant[option] for variant in grid if isinstance(variant.get(option), (int, float))]
        if len(numbers) == len(grid) and min(numbers) < max(numbers) and value in (min(numbers), max(numbers)):
            edges.append(option)
    return edges


def _cost_table(records: list[dict[str, Any]], benchmark: str, title: str) -> list[str]:
    costs: dict[str, dict[bool, dict[str, Any]]] = {}
    for record in records:
        config = record["config"]
        if config["stage"] == "cost" and config["benchmark"] == benchmark:
            costs.setdefault(config["row"], {})[config["capture"]] = record["result"]
    if "replay" not in costs:
        return []
    lines = []
    for row, found in costs.items():
        cells = [row]
        for capture in (True, False):
            if capture in found and capture in costs["replay"]:
                now, other = found[capture]["milliseconds"], costs["replay"][capture]["milliseconds"]
                peak = found[capture].get("peak_memory")
                cells += [f"{now:.3f} ({now / other:.1f})", "" if peak is None else f"{peak / 2**20:.0f}"]
            else:
                cells += ["", ""]
        lines.append(cells)
    header = ["", "captured, ms per step (times replay)", "memory, MiB", "not captured", "memory, MiB"]
    return [f"## {title}: cost of a step", markdown(header, lines)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def deviation(values: np.ndarray) -> float:
    """Between runs; 0 of a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _describe_machines(records: list[dict[str, Any]]) -> str:
    machines = sorted({f"{record['machine']}, torch {record['torch']}" for record in records})
    return f"commit {', '.join(sorted({record['commit'] for record in records}))}; {'; '.join(machines)}"


def _write(file: Path, text: str) -> None:
    file.write_text(text)
