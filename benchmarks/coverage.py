"""Which real architectures are traced, how much of each is free, and whether it is right at other inputs.

    python -m benchmarks.coverage [--only PATTERN] [--again] [--jobs N] [--seconds S] [--peer FILE] [--out FOLDER]

Each architecture is traced at one example in a process of its own, and checked at inputs of other values, batch sizes and
lengths, for permutations and, the norms as they are made, for all kinds of symmetry; a text model is also traced at a single
token. Writes a record (coverage.json) and the table of the documentation
(coverage.md) into the folder. A run that was interrupted goes on where it was: rows that this very code measured are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import onebasin as ob
from benchmarks.architectures import LIBRARIES, Architecture, Example, NotMade
from benchmarks.coverage_oracle import calls_to_check, check
from benchmarks.coverage_tables import Record, cells, is_wrong, markdown, row, summary
from benchmarks.isolated_processes import Report, run_isolated
from benchmarks.measuring import find_commit

ROOT = Path(__file__).parents[1]
_BATCH = 2


def measure(architecture: Architecture, report: Report) -> None:
    """Trace and check one architecture; whatever is known is reported at once."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report({"stage": "making it"})
    try:
        example = make(architecture)
    except NotMade as error:
        return report({"verdict": "not made", "why": _first_line(error)})
    report({"parameters": sum(p.numel() for p in example.model.parameters()), "kind": example.kind or architecture.kind})
    with next(example.model.parameters()).device:
        inputs = example.inputs(_BATCH, example.length)
    trace_and_check(example, inputs, [] if architecture.unverified else list(_other_calls(example)), report)
    if architecture.unverified:
        report({"verdict": "not checked", "why": architecture.unverified})
    else:
        report({"stage": "all kinds", "all": check_all_kinds(architecture, inputs, list(_other_calls(example)))})
    if example.is_text:
        single: Record = {}
        trace_and_check(make(architecture), *_single_token(example), single.update)
        report({"single": single | {"all": check_all_kinds(architecture, *_single_token(example))}})


def check_all_kinds(architecture: Architecture, inputs: Any, others: list[tuple[str, Any]]) -> Record:
    """The scales and bases of a fresh model, its gains one, traced at some inputs and checked at others."""
    example, start = make(architecture), time.process_time()
    try:
        symmetry = ob.symmetry(example.model, inputs, kinds="all")
    except Exception as error:
        return _explain(error) | {"seconds": time.process_time() - start}
    record: Record = {
        "seconds": time.process_time() - start,
        "bases": dict(Counter(basis.kind for basis in symmetry.bases.values())),
        "scales": len(symmetry.scales),
    }
    example.before_check()
    return record | judge([(where, check(symmetry, example.model, call)) for where, call in others])


def trace_and_check(example: Example, inputs: Any, others: list[tuple[str, Any]], report: Report) -> None:
    """Trace at some inputs, with verification and without, and check both at others; if there are none, verify nothing."""
    report({"stage": "tracing"})
    symmetry, record = trace(example, inputs, verify=bool(others))
    report(record)
    if symmetry is None or not others:
        return
    report({"stage": "tracing without verification"})
    unverified, _ = trace(example, inputs, verify=False)
    report({"stage": "checking"})
    example.before_check()
    report(judge([(where, check(symmetry, example.model, call)) for where, call in others]))
    if unverified is not None and unverified.layouts != symmetry.layouts:
        found = judge([(where, check(unverified, example.model, call)) for where, call in others])
        report({"unverified": {key: found[key] for key in ("verdict", "why") if key in found}})


def trace(example: Example, inputs: Any, verify: bool = True) -> tuple[ob.Symmetry | None, Record]:
    """A symmetry, or none, and what to record. Seconds are of the processor, so that a busy machine does not count."""
    start = time.process_time()
    try:
        symmetry = ob.symmetry(example.model, inputs, verify)
    except Exception as error:
        return None, _explain(error) | {"seconds": time.process_time() - start}
    return symmetry, {
        "seconds": time.process_time() - start,
        "groups": len(symmetry.groups),
        "nested": sum(bool(group.parents) for group in symmetry.groups.values()),
        "hidden": symmetry.num_hidden,
        "free": symmetry.num_free,
        "unreached": len(symmetry.unreached),
        "exported": [f.reason for f in symmetry.front_ends if f.reason],
        "pinned": pins(symmetry),
    }


def _explain(error: Exception) -> Record:
    """A ValueError is our refusal; anything else is a crash."""
    kind = "refused" if isinstance(error, ValueError) else f"crashed with {type(error).__name__}"
    return {"verdict": kind, "why": _first_line(error)}


def _single_token(example: Example) -> tuple[Any, list[tuple[str, Any]]]:
    """One token, the one that texts begin with; and nine others to check at."""
    inputs = {key: torch.ones_like(value) for key, value in example.inputs(1, 1).items()}
    torch.manual_seed(2)
    return inputs, [("nine tokens", example.inputs(_BATCH, 9))]


def _other_calls(example: Example) -> Iterator[tuple[str, Any]]:
    return calls_to_check(example.inputs, example.length, example.others, _BATCH)


def judge(found: list[tuple[str, Record]]) -> Record:
    """The verdict on a row from those on its calls."""
    wrong = [(where, f) for where, f in found if f["verdict"] == "wrong"]
    right = [where for where, f in found if f["verdict"] == "right"]
    errors = [f["error"] for _, f in found if "error" in f]
    record: Record = {"checked": right, "error": max(errors, default=None)}
    if wrong:
        guilty = wrong[0][1]["guilty"]
        why = f"other {', '.join(where for where, _ in wrong)}: {', '.join(guilty[:3])}" + (
            " ..." if len(guilty) > 3 else ""
        )
        return record | {"verdict": "WRONG", "why": why, "num_guilty": len(guilty)}
    if right:
        return record | {"verdict": "right"}
    return record | {"verdict": "not checked", "why": "; ".join(f.get("why", f["verdict"]) for _, f in found)[:200]}


def make(architecture: Architecture) -> Example:
    """The model and its inputs; without weights if they are not needed and its constructor can do without."""
    torch.manual_seed(0)
    if architecture.unverified:
        with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
            return architecture.make()
    return architecture.make()


def pins(symmetry: ob.Symmetry) -> list[str]:
    """Why axes of parameters are not free, most frequent first; that inputs and outputs are fixed goes without saying."""
    counts = Counter(
        f"{pin.reason} ({pin.operation})" if pin.operation else pin.reason
        for pin in symmetry.pinned.values()
        if pin.reason not in ("model input", "model output")
    )
    return [f"{reason}: {number}" for reason, number in counts.most_common()]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# -------------------------------------------------------------------------------------------------------------- running


def fingerprint() -> str:
    """Of all the code that a row depends on."""
    rooms = [ROOT / "src" / "onebasin" / room for room in ("tensors", "programs", "symmetries", "tracing")]
    folders = [*rooms, ROOT / "benchmarks" / "architectures"]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    files += [ROOT / "benchmarks" / name for name in ("coverage.py", "coverage_oracle.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def choose(pattern: str) -> list[Architecture]:
    """Architectures whose "library/name" has the regular expression in it."""
    chosen = (architecture for make_all in LIBRARIES for architecture in make_all())
    return [a for a in chosen if re.search(pattern, f"{a.library}/{a.name}")]


def warm_up() -> None:
    """Trace and export once, so that what PyTorch imports at first use is not counted, nor done again in every process."""
    torch.set_num_threads(1)
    ob.symmetry(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))
    torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))


def run(architectures: list[Architecture], jobs: int, seconds: float) -> Iterator[Record]:
    """Measure architectures, a few at a time."""
    warm_up()
    for architecture, record, failure in run_isolated(architectures, measure, jobs, seconds):
        stage = record.pop("stage", "")
        if failure:
            record |= {"verdict": "not finished", "why": f"{failure}, {stage}"}
        about = {"library": architecture.library, "name": architecture.name, "kind": architecture.kind}
        yield {**about, "counted": architecture.counted, **record}


class Book:
    """The record of a folder: rows are kept from run to run, and replaced as they are measured again."""

    def __init__(self, folder: Path, code: str):
        self.folder, self.code, self.commit = folder, code, find_commit()
        path = folder / "coverage.json"
        known = json.loads(path.read_text())["records"] if path.exists() else []
        self.rows: dict[tuple[str, str], Record] = {(r["library"], r["name"]): r for r in known}

    def has(self, architecture: Architecture) -> bool:
        """Whether this code has measured it."""
        return self.rows.get((architecture.library, architecture.name), {}).get("code") == self.code

    def add(self, record: Record) -> None:
        """Keep a row, with what is known of a peer."""
        key = (record["library"], record["name"])
        peer = self.rows.get(key, {}).get("peer")
        self.rows[key] = {**record, "code": self.code, "commit": self.commit, **({"peer": peer} if peer else {})}
        self.write_record()

    def keep(self, architectures: list[Architecture]) -> None:
        """Drop the rows of architectures that are no longer in the list."""
        known = {(a.library, a.name) for a in architectures}
        self.rows = {key: r for key, r in self.rows.items() if key in known}

    @property
    def records(self) -> list[Record]:
        """Sorted by library and name."""
        return sorted(self.rows.values(), key=lambda r: (r["library"], r["name"].lower()))

    def write_record(self) -> None:
        """Write coverage.json at once or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / "coverage.json.part"
        fresh.write_text(json.dumps({"machine": _machine(), "records": self.records}, indent=1) + "\n")
        os.replace(fresh, self.folder / "coverage.json")

    def write_page(self) -> None:
        """Write coverage.md."""
        untried = [a.name for a in choose("") if (a.library, a.name) not in self.rows]
        (self.folder / "coverage.md").write_text(markdown(self.records, "make coverage", _machine(), untried))


def _machine() -> str:
    return f"{platform.machine()}, 1 thread, torch {torch.__version__}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only rows in whose library/name this regular expression is found")
    parser.add_argument("--again", action="store_true", help="measure rows again that this very code has measured")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a row is given up")
    parser.add_argument("--peer", type=Path, help="verdicts on a peer, as benchmarks.peer_rebasin writes them")
    parser.add_argument("--out", type=Path, default=Path("coverage-output"), help="folder for coverage.json and coverage.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    book = Book(arguments.out, fingerprint())
    chosen = choose(arguments.only)
    if not arguments.only:
        book.keep(chosen)
    left = [a for a in chosen if arguments.again or not book.has(a)]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(chosen), completed=len(chosen) - len(left))
        for record in run(left, arguments.jobs, arguments.seconds):
            book.add(record)
            progress.update(task, advance=1, description=record["name"])
            progress.print(cells([record["library"], *row(record)]), soft_wrap=True, markup=False, highlight=False)
    for name, said in (json.loads(arguments.peer.read_text()) if arguments.peer else {}).items():
        if ("torchvision", name) in book.rows:
            book.rows["torchvision", name]["peer"] = said
    book.write_record()
    book.write_page()
    rows = [book.rows[a.library, a.name] for a in chosen]
    print(summary(rows))
    if any(is_bad(r) for r in rows):
        raise SystemExit("a network is wrong, or its groups are not those counted by hand")


def is_bad(record: Record) -> bool:
    """Whether a row must not occur."""
    return is_wrong(record) or record["counted"] not in (None, record.get("groups"))


if __name__ == "__main__":
    main()
