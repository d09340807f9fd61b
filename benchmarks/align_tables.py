"""Tables and pictures from the records of `benchmarks.align`: ``python -m benchmarks.align_tables RECORDS --plot FILE``.

``--beside RECORDS`` prints one table of the copies on two devices, and nothing else; with ``--plot`` it draws that table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
REFERENCES = {
    "authors": "ours, default",
    "authors, L2": "ours, Sinkhorn L2",
    "authors, Mid": "ours, Sinkhorn Mid",
    "rebasin": "ours, weight matching",
    "plain weight matching": "ours, weight matching",
}
"""Whom a peer is compared with: the same kind of method."""


def load_records(path: Path) -> list[Record]:
    """The records of a file; ends with a sentence if it has none."""
    try:
        records = json.loads(path.read_text())["records"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {path} is no file of records: {error}")
    if not all({"task", "network", "solver"} <= record.keys() for record in records):
        sys.exit(f"error: {path} has records of another benchmark")
    return records


def print_tables(records: list[Record]) -> None:
    """One table per task, in Markdown, with a row per network and solver."""
    for task in ("copy", "pair"):
        chosen = [record for record in records if record["task"] == task]
        if not chosen:
            continue
        reached = ["exact"] if task == "copy" else ["L2 distance", "barrier"]
        header = [
            "network",
            "solver",
            "seconds",
            "tracing",
            "solving",
            "assigning",
            "steps",
            "ms per step",
            "CPU seconds",
            "MiB",
        ]
        header += [*reached, "seconds / ours", "CPU / ours", "step / ours", "memory / ours"]
        print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
        for record in chosen:
            reference = find_reference(record, chosen)
            print("| " + " | ".join(_cells(record, reference, find_descent(record, chosen), len(header))) + " |")


def find_reference(record: Record, records: Iterable[Record]) -> Record | None:
    """Our record for the same network by the same kind of method."""
    return _find(records, record["network"], REFERENCES.get(record["solver"]))


def find_descent(record: Record, records: Iterable[Record]) -> Record | None:
    """Our descent on the same network: a step of it is compared with a step of theirs."""
    if not record["solver"].startswith("authors"):
        return None
    own = "ours, descent alone" if record["task"] == "copy" else REFERENCES[record["solver"]]
    return _find(records, record["network"], own)


def _find(records: Iterable[Record], network: str, solver: str | None) -> Record | None:
    found = [r for r in records if (r["network"], r["solver"]) == (network, solver) and "seconds" in r]
    return found[0] if found else None


def seconds_per_step(record: Record) -> float | None:
    """Everything after tracing, shared out among the steps; None for solvers that take none."""
    if not record.get("steps") or record.get("solving") is None:
        return None
    share = record[_kind_of_seconds([record])] / record["seconds"]
    return share * record["solving"] / record["steps"]


def _cells(record: Record, reference: Record | None, descent: Record | None, width: int) -> list[str]:
    if "failed" in record:
        return [record["network"], record["solver"], _tell_failure(record), *[""] * (width - 3)]
    step = seconds_per_step(record)
    cells = [record["network"], record["solver"], f"{record['seconds']:.3g}"]
    cells += ["" if record[part] is None else f"{record[part]:.3g}" for part in ("tracing", "solving", "assigning")]
    cells += [str(record["steps"] or ""), "" if step is None else f"{1e3 * step:.3g}"]
    cells += [f"{record['cpu_seconds']:.3g}", f"{record['bytes'] / 2**20:.0f}"]
    if "exact" in record:
        cells.append("yes" if record["exact"] else "no")
    else:
        cells.append(f"{record['distance_before']:.4g} to {record['distance_after']:.4g}")
        cells.append(f"{record['barrier_before']:.3f} to {record['barrier_after']:.3f}")
    theirs = seconds_per_step(descent) if descent else None
    cells += [f"{record[kind] / reference[kind]:.1f}" if reference else "" for kind in ("seconds", "cpu_seconds")]
    cells.append(f"{step / theirs:.1f}" if step and theirs else "")
    cells.append(f"{record['bytes'] / max(reference['bytes'], 1):.1f}" if reference else "")
    return cells


def print_summary(records: list[Record]) -> None:
    """The copies in one small table, a row per network: seconds, memory, and how many times ours that is."""
    copies = [record for record in records if record["task"] == "copy"]
    kind = _kind_of_seconds(copies)
    solvers = list(dict.fromkeys(record["solver"] for record in copies))
    labels = [COPY_LABELS.get(solver, solver) for solver in solvers]
    print("\n| network | " + " | ".join(labels) + " |\n|" + "---|" * (len(solvers) + 1))
    for network in dict.fromkeys(record["network"] for record in copies):
        cells = []
        for solver in solvers:
            found = [r for r in copies if (r["network"], r["solver"]) == (network, solver)]
            cells.append(_summarise(found[-1], find_reference(found[-1], copies), kind) if found else "")
        print(f"| {NETWORKS.get(network, network)} | " + " | ".join(cells) + " |")


def _round(number: float | None) -> str:
    """Two digits, or all those of a larger number."""
    return "" if number is None else f"{number:.2g}" if number < 10 else f"{number:.0f}"


COMPARED = {
    "ours by default (copy detection)": "ours, default",
    "ours by the descent": "ours, descent alone",
    "ours by the descent by entries": "ours, descent by entries",
    "authors' descent": "authors",
}
"""The columns of the comparison. Of copies the default does not descend: comparing units finds them."""
SHOWN = {label: solver for label, solver in COMPARED.items() if solver != "ours, descent by entries"}
COLORS = dict(zip(SHOWN, ("tab:green", "tab:blue", "tab:red"), strict=True))
COPY_LABELS = {
    "ours, default": "ours by default: copy detection",
    "ours, weight matching": "ours, weight-matching by default: copy detection",
    "ours, descent alone": "ours, Sinkhorn descent alone",
    "ours, descent by entries": "ours, Sinkhorn descent alone, by entries",
    "ours, sweeps alone": "ours, weight-matching sweeps alone",
    "authors": "authors' Sinkhorn descent",
}
"""What the solvers of the records do on a copy: by default no method of ours runs there."""
NETWORKS = {
    **{"mlp": "MLP 2 x 512", "resnet18": "ResNet-18", "resnet50": "ResNet-50", "vit_b_16": "ViT-B/16"},
    **{"gpt2": "GPT-2 small", "vgg11": "VGG11", "vgg13": "VGG13", "vgg16": "VGG16", "vgg19": "VGG19"},
}
"""What the networks of the records are called elsewhere."""


def print_comparison(records: list[Record]) -> None:
    """Copies: seconds of the authors' descent, of our default and our descents, and how many times as fast ours are."""
    copies = [record for record in records if record["task"] == "copy"]
    kind = _kind_of_seconds(copies)
    default, descent, by_entries, authors = COMPARED
    header = ["network", authors, *(word for ours in (default, descent, by_entries) for word in (ours, "times as fast"))]
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for network in dict.fromkeys(record["network"] for record in copies):
        *found, theirs = (_find_last(copies, network, solver) for solver in COMPARED.values())
        cells = [_tell_seconds(theirs, kind)]
        for ours in found:
            cells += [_tell_seconds(ours, kind), _tell_ratio(ours, theirs, kind)]
        print(f"| {NETWORKS.get(network, network)} | " + " | ".join(cells) + " |")


def print_devices(records: list[Record], others: list[Record]) -> None:
    """Copies on a CPU and on a GPU in one table: the authors' descent, our default and our descent.

    On the GPU the seconds of the first run, with kernels to load and to compile, stand in brackets.
    """
    *names, authors = SHOWN
    columns = {"CPU": (records, _tell_seconds), "GPU": (others, _tell_warm_and_cold)}
    header = ["network"]
    for device in columns:
        header += [f"{device}: {authors}", *(word for name in names for word in (name, "times as fast"))]
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for network in dict.fromkeys(record["network"] for record in records if record["task"] == "copy"):
        cells = [NETWORKS.get(network, network)]
        for found, tell in columns.values():
            copies = [record for record in found if record["task"] == "copy"]
            kind, theirs = _kind_of_seconds(copies), _find_last(copies, network, COMPARED[authors])
            cells.append(tell(theirs, kind))
            for name in names:
                ours = _find_last(copies, network, COMPARED[name])
                cells += [tell(ours, kind), _tell_ratio(ours, theirs, kind)]
        print("| " + " | ".join(cells) + " |")


def draw_devices(records: list[Record], others: list[Record], path: Path) -> None:
    """The table of `print_devices` as a picture: a panel for each device, hollow where the answer is not exact."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    copies = [record for record in records if record["task"] == "copy"]
    networks = [*dict.fromkeys(record["network"] for record in copies)][::-1]
    for axes, title, found in zip(panels, ("CPU, one core", "H200"), (records, others), strict=True):
        copies = [record for record in found if record["task"] == "copy"]
        kind = _kind_of_seconds(copies)
        for (label, solver), marker in zip(SHOWN.items(), "odX", strict=True):
            chosen = [r for network in networks if (r := _find_last(copies, network, solver)) and "seconds" in r]
            for exact, fill in ((True, {}), (False, {"markerfacecolor": "none"})):
                points = [(r[kind], networks.index(r["network"])) for r in chosen if r["exact"] is exact]
                axes.plot(*zip(*points, strict=True) if points else ([], []), marker, color=COLORS[label], ms=7, **fill)
        axes.set(xscale="log", xlabel="seconds", title=title)
        axes.set_yticks(range(len(networks)), [NETWORKS.get(name, name) for name in networks])
        axes.grid(axis="x", alpha=0.3)
    for label, marker in zip(SHOWN, "odX", strict=True):
        panels[0].plot([], [], marker, color=COLORS[label], label=label)
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)


def print_pairs(records: list[Record]) -> None:
    """Trained pairs: seconds, those of the first run and of assignments, memory, what is reached, and the commit."""
    pairs = [record for record in records if record["task"] == "pair" and "failed" not in record]
    if not pairs:
        return
    kind = _kind_of_seconds(pairs)
    header = ["pair", "solver", "seconds", "first run", "assigning", "ms per step", "MiB", "L2 distance", "barrier"]
    header.append("commit")
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for record in pairs:
        step = None if record["solver"].endswith("weight matching") else seconds_per_step(record)  # it has sweeps
        cells = [record["network"], record["solver"], _round(record[kind]), _tell_cold(record, kind)]
        cells += [_round(record["assigning"]), _round(None if step is None else 1e3 * step)]
        distances = (record[f"distance_{when}"] for when in ("before", "after"))
        cells += [f"{record['bytes'] / 2**20:.0f}", " to ".join(f"{d:.4g}" if d < 1e4 else f"{d:.0f}" for d in distances)]
        cells += [f"{record['barrier_before']:.3f} to {record['barrier_after']:.3f}", record.get("commit", "unknown")]
        print("| " + " | ".join(cells) + " |")


def print_details(records: list[Record]) -> None:
    """The same copies with seconds of the first run, memory beyond the models, and the commit that was measured."""
    copies = [record for record in records if record["task"] == "copy"]
    kind = _kind_of_seconds(copies)
    print("\n| network | " + " | ".join(COMPARED) + " |\n|" + "---|" * (len(COMPARED) + 1))
    for network in dict.fromkeys(record["network"] for record in copies):
        cells = [_tell_details(_find_last(copies, network, solver), kind) for solver in COMPARED.values()]
        print(f"| {NETWORKS.get(network, network)} | " + " | ".join(cells) + " |")


_QUIET = 1.1
"""Times the CPU seconds. A run that took longer by the clock shared its core, and so did its first run."""


def _find_last(records: Iterable[Record], network: str, solver: str) -> Record | None:
    found = [r for r in records if (r["network"], r["solver"]) == (network, solver)]
    return found[-1] if found else None


def _tell_seconds(record: Record | None, kind: str) -> str:
    if record is None or "failed" in record:
        return _tell_failure(record)
    return f"{'' if record['exact'] else 'not exact, '}{record[kind]:.2g}"


def _tell_warm_and_cold(record: Record | None, kind: str) -> str:
    told = _tell_seconds(record, kind)
    cold = (record or {}).get("first_seconds")
    return told if cold is None else f"{told} ({cold:.2g})"


def _tell_ratio(ours: Record | None, theirs: Record | None, kind: str) -> str:
    """How many times as fast; nothing for other numbers of threads, and a star for records of different commits."""
    if ours is None or theirs is None or "failed" in ours or "failed" in theirs or not _have_equal_threads(ours, theirs):
        return ""
    ratio = theirs[kind] / ours[kind]
    return _round(ratio) + _mark(ours, theirs)


def _have_equal_threads(record: Record, other: Record) -> bool:
    return record.get("threads") == other.get("threads")


def _mark(record: Record, other: Record) -> str:
    """A star where two records are not of one run."""
    return "" if record.get("commit") == other.get("commit") else "*"


def _tell_cold(record: Record, kind: str) -> str:
    """Seconds of the first run, if they were recorded on a core that did nothing else."""
    if record.get("first_seconds") is None:
        return "not recorded"
    is_busy = record.get("seconds", record[kind]) > _QUIET * record[kind]
    return "not known" if is_busy else f"{record['first_seconds']:.2g} s"


def _tell_details(record: Record | None, kind: str) -> str:
    if record is None or "failed" in record:
        return _tell_failure(record)
    size = f"{record['bytes'] / 2**20:.0f} MiB"
    cold = _tell_cold(record, kind)
    return f"{_tell_seconds(record, kind)} s, first run {cold}, {size} ({record.get('commit', 'commit unknown')})"


def _tell_failure(record: Record | None) -> str:
    """Words where there are no numbers."""
    if record is None:
        return "not run"
    kind, _, why = record["failed"].partition(": ")
    return (why if kind == "TimeoutError" else f"fails ({kind})").replace("|", "/")[:50]


def _kind_of_seconds(records: Iterable[Record]) -> str:
    """On the CPU those of the processor: the clock also counts what others do there."""
    return "cpu_seconds" if all(record.get("device") == "cpu" for record in records) else "seconds"


def _summarise(record: Record, reference: Record | None, kind: str) -> str:
    if "failed" in record:
        return _tell_failure(record)
    is_like = reference is not None and _have_equal_threads(record, reference)
    times = f" ({record[kind] / reference[kind]:.1f} x{_mark(record, reference)})" if reference and is_like else ""
    wrong = "" if record["exact"] else "not exact, "
    return f"{wrong}{record[kind]:.2g} s{times}, {record['bytes'] / 2**20:.0f} MiB"


def draw(records: list[Record], path: Path) -> None:
    """Seconds to the answer of every solver on every copy; hollow where it is not exact."""
    from matplotlib.figure import Figure

    copies = [record for record in records if record["task"] == "copy" and "seconds" in record]
    networks = list(dict.fromkeys(record["network"] for record in copies))
    solvers = list(dict.fromkeys(record["solver"] for record in copies))
    kind = _kind_of_seconds(copies)
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, solver in enumerate(solvers):
        chosen = [record for record in copies if record["solver"] == solver]
        places = [networks.index(r["network"]) + 0.09 * (number - len(solvers) / 2) for r in chosen]
        axes.plot([], [], "o", color=f"C{number}", label=COPY_LABELS.get(solver, solver))
        for place, record in zip(places, chosen, strict=True):
            fill = {} if record["exact"] else {"markerfacecolor": "none"}
            axes.plot(place, record[kind], "o", color=f"C{number}", **fill)
    axes.set_yscale("log")
    axes.set_xticks(range(len(networks)), [NETWORKS.get(name, name) for name in networks])
    axes.set_ylabel(f"{'CPU seconds' if kind == 'cpu_seconds' else 'seconds'} in all (hollow: not exact)")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the tables of a file of records, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the copies, or the table on both, into this file")
    parser.add_argument("--beside", type=Path, help="records of a GPU: print one table of the copies on both")
    options = parser.parse_args()
    records = load_records(options.records)
    if options.beside:
        others = load_records(options.beside)
        print_devices(records, others)
        if options.plot:
            draw_devices(records, others, options.plot)
        return
    print_comparison(records)
    print_details(records)
    print_pairs(records)
    print_tables(records)
    print_summary(records)
    if options.plot:
        draw(records, options.plot)


if __name__ == "__main__":
    main()
