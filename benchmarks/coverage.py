"""Which real architectures are traced, how much of each is free, and whether it is right.

    python -m benchmarks.coverage [--only LIBRARY] [--match TEXT] [--peer FILE] [--out FOLDER]

Writes a record (coverage.json) and the table of the documentation (coverage.md), both into the folder. What is measured
again replaces its own rows in a record that is there already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures import LIBRARIES, Architecture
from onebasin.programs.graph import read_calls
from onebasin.symmetries import Symmetry
from onebasin.symmetries.verification import verify_programs
from onebasin.tracing import trace_calls

Record = dict[str, Any]


def measure(architecture: Architecture) -> Record:
    """Trace and verify one architecture. Seconds are of the processor, so that a busy machine does not count."""
    record: Record = {"library": architecture.library, "name": architecture.name, "counted": architecture.counted}
    torch.manual_seed(0)
    try:
        model, inputs = make(architecture)
        calls = read_calls(inputs)
        start = time.process_time()
        symmetry, programs = trace_calls(model, calls)
    except Exception as error:
        return record | {"verdict": "not traced", "why": str(error).splitlines()[0]}
    record |= {
        "trace_seconds": time.process_time() - start,
        "parameters": sum(p.numel() for p in model.parameters()),
        "groups": len(symmetry.groups),
        "nested": sum(bool(group.parents) for group in symmetry.groups.values()),
        "hidden": symmetry.num_hidden,
        "free": symmetry.num_free,
        "unreached": len(symmetry.unreached),
        "pinned": pins(symmetry),
    }
    if architecture.unverified:
        return record | {"verdict": "not verified", "why": architecture.unverified}
    start = time.process_time()
    try:
        state = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        error = verify_programs(symmetry, programs, state)
    except ValueError as wrong:
        verdict = "not verified" if "cannot verify" in str(wrong) else "WRONG"
        return record | {"verdict": verdict, "why": str(wrong).splitlines()[0]}
    return record | {"verdict": "right", "error": error, "verify_seconds": time.process_time() - start}


def make(architecture: Architecture) -> tuple[nn.Module, Any]:
    """The model and its inputs; without weights if they are not needed and its constructor can do without."""
    if architecture.unverified:
        with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
            return architecture.make()
    return architecture.make()


def pins(symmetry: Symmetry) -> list[str]:
    """Why axes of parameters are not free, most frequent first; that inputs and outputs are fixed goes without saying."""
    counts = Counter(
        f"{pin.reason} ({pin.operation})" if pin.operation else pin.reason
        for pin in symmetry.pinned.values()
        if pin.reason not in ("model input", "model output")
    )
    return [f"{reason}: {number}" for reason, number in counts.most_common()]


# -------------------------------------------------------------------------------------------------------------- tables


def row(record: Record) -> list[str]:
    """The cells of one architecture."""
    if "groups" not in record:
        return [record["name"], "", "", "", "", "", "", f"{record['verdict']}: {record['why']}", ""]
    counted = record["counted"]
    groups = str(record["groups"]) + (f" ({record['nested']} nested)" if record["nested"] else "")
    if counted is not None:
        groups += " =" if counted == record["groups"] else f" != {counted}"
    share = 100 * record["free"] / record["hidden"] if record["hidden"] else 0.0
    error = f"{record['error']:.0e}" if "error" in record else ""
    verify = f"{record['verify_seconds']:.1f}" if "verify_seconds" in record else ""
    verdict = record["verdict"] + (f": {record['why']}" if "why" in record else "")
    return [
        record["name"],
        f"{record['parameters'] / 1e6:.2f}",
        f"{record['trace_seconds']:.1f}",
        verify,
        groups,
        f"{share:.1f}%",
        error,
        verdict,
        "; ".join(_short(text) for text in record["pinned"][:3]),
    ]


HEADER = [
    "architecture",
    "parameters (M)",
    "trace (s)",
    "verify (s)",
    "groups",
    "free",
    "error",
    "verdict",
    "pinned, and why",
]


def _short(text: str, length: int = 90) -> str:
    text = text.replace("the rule does not cover this use: ", "not covered: ")
    return text if len(text) <= length else text[: length - 3] + "..."


def markdown(records: list[Record], command: str, machine: str) -> str:
    """The page of the documentation."""
    lines = [_INTRODUCTION.format(command=command, machine=machine)]
    for library in LIBRARIES:
        rows = [r for r in records if r["library"] == library]
        if rows:
            peer = any("peer" in r for r in rows)
            header = [*HEADER, "`rebasin` 0.0.47"] if peer else HEADER
            lines += [f"## {library}", "", summary(rows), "", _cells(header), _cells(["---"] * len(header))]
            lines += [_cells([*row(r), r.get("peer", "")] if peer else row(r)) for r in rows]
            lines.append("")
    return "\n".join(lines)


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def summary(records: list[Record]) -> str:
    """One line on a library."""
    verdicts = Counter(r["verdict"] for r in records)
    free, hidden = (sum(r.get(key, 0) for r in records) for key in ("free", "hidden"))
    whole = sum(r.get("free") == r.get("hidden", -1) for r in records)
    counted = [r for r in records if r["counted"] is not None]
    return (
        f"{len(records)} architectures: "
        + ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
        + f". {free / max(hidden, 1):.1%} of hidden units free, all of them in {whole}. "
        + f"Groups counted by hand for {len(counted)}, {sum(r['counted'] == r.get('groups') for r in counted)} match."
    )


_INTRODUCTION = """\
# Coverage

Real architectures, traced without weights of their own. Made by `{command}`, on {machine}; seconds are of the processor.

- *groups*: permutations (with families, one for each element of a parent, counted as one and named nested); `=` where a
  person counted the same number from the architecture.
- *free*: the share of hidden units, the output channels of weight operations that are not model outputs, that can move.
- *error*: the largest relative difference that a random permutation makes to the output, on random weights in float64.
- *verdict*: `right` is below 1e-9. `WRONG` must not occur.
- *pinned*: axes of parameters that cannot move and are neither model input nor output, by reason.
- *`rebasin`*: the same oracle on that package, by `python -m benchmarks.peer_rebasin` in a venv of its own.
"""


def run(libraries: Iterable[str], match: str) -> Iterator[Record]:
    """Measure architectures one by one."""
    for library in libraries:
        for architecture in LIBRARIES[library]():
            if match in architecture.name:
                yield measure(architecture)


def write(records: list[Record], folder: Path, peer: dict[str, str]) -> None:
    """Bring the record and the page of a folder up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "coverage.json"
    known = json.loads(path.read_text())["records"] if path.exists() else []
    rows = {(r["library"], r["name"]): r for r in known}
    for r in records:
        rows[r["library"], r["name"]] = {**_peer_of(rows.get((r["library"], r["name"]), {})), **r}
    for name, verdict in peer.items():
        if ("torchvision", name) in rows:
            rows["torchvision", name]["peer"] = verdict
    threads = torch.get_num_threads()
    machine = f"{platform.machine()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
    merged = sorted(rows.values(), key=lambda r: (r["library"], r["name"].lower()))
    path.write_text(json.dumps({"machine": machine, "records": merged}, indent=1) + "\n")
    (folder / "coverage.md").write_text(markdown(merged, "make coverage", machine))


def _peer_of(record: Record) -> Record:
    return {"peer": record["peer"]} if "peer" in record else {}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=LIBRARIES, help="one library")
    parser.add_argument("--match", default="", help="only names that contain this")
    parser.add_argument("--peer", type=Path, help="verdicts on a peer, as benchmarks.peer_rebasin writes them")
    parser.add_argument("--out", type=Path, help="folder for coverage.json and coverage.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    records = []
    for record in run([arguments.only] if arguments.only else LIBRARIES, arguments.match):
        records.append(record)
        print(" | ".join(row(record)), flush=True)
    for library in LIBRARIES:
        if chosen := [r for r in records if r["library"] == library]:
            print(f"{library}: {summary(chosen)}")
    if arguments.out:
        write(records, arguments.out, json.loads(arguments.peer.read_text()) if arguments.peer else {})
    if any(r["verdict"] == "WRONG" or r["counted"] not in (None, r.get("groups")) for r in records):
        raise SystemExit("a network is wrong, or its groups are not those counted by hand")


if __name__ == "__main__":
    main()
