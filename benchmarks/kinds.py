"""Which kinds of symmetry real architectures have beside permutations: positive scales and changes of basis, verified.

    python -m benchmarks.kinds [--only PATTERN] [--seconds S] [--out FILE]

Each architecture of `benchmarks.coverage` of up to 30 million parameters is traced with ``kinds="all"``, as it is made:
gains of norms are one. What is found is verified in float64 on random weights; a wrong symmetry would be an error here. Goes
on after the architectures that the file has already. Every row names its commit. `python -m benchmarks.coverage_tables`
puts what is found into the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import torch

import onebasin as ob
from benchmarks.architectures import Architecture, NotMade
from benchmarks.coverage import choose, make
from benchmarks.measuring import append, find_commit
from onebasin.symmetries.structure import BasisKind

_MOST_PARAMETERS = 30_000_000


class _TooLong(BaseException):
    """No exception that the library would catch."""


def measure(architecture: Architecture, seconds: int) -> dict[str, Any]:
    """What was found, or why nothing could be."""
    record: dict[str, Any] = {"library": architecture.library, "name": architecture.name, "commit": find_commit()}

    def give_up(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor, so that a busy machine does not count
    try:
        example = make(architecture)
        record["parameters"] = sum(p.numel() for p in example.model.parameters())
        if record["parameters"] > _MOST_PARAMETERS:
            return {**record, "left out": "too large"}
        with next(example.model.parameters()).device:
            inputs = example.inputs(2, example.length)
        begin = time.process_time()
        symmetry = ob.symmetry(example.model, inputs, kinds="all")
        kinds = Counter(basis.kind for basis in symmetry.bases.values())
        record |= {"bases": dict(kinds), "scales": len(symmetry.scales), "gains": len(symmetry.gains)}
        return {**record, "seconds": round(time.process_time() - begin, 2)}
    except NotMade:
        return {**record, "left out": "not made"}
    except _TooLong:
        return {**record, "left out": f"more than {seconds} s"}
    except ValueError as error:
        return {**record, "error": str(error)[:300]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def summarise(records: list[dict[str, Any]]) -> list[str]:
    """The counts, in sentences."""
    traced = [record for record in records if "bases" in record]
    refused = [record for record in records if "cannot trace" in record.get("error", "")]
    wrong = [record for record in records if "changes the function" in record.get("error", "")]
    others = [record for record in records if "error" in record and record not in refused + wrong]
    lines = [
        f"{len(traced)} architectures were traced and verified; {len(refused)} cannot be traced; {len(wrong)} are wrong; "
        f"{len(others)} could not be verified.",
        f"With positive scales: {sum(bool(record['scales']) for record in traced)}.",
    ]
    for kind in get_args(BasisKind):
        count = sum(kind in record["bases"] for record in traced)
        total = sum(record["bases"].get(kind, 0) for record in traced)
        lines.append(f"With a basis of kind {kind}: {count} ({total} bases).")
    return lines + [f"- {record['name']}: {record['error']}" for record in wrong + others]


def main() -> None:
    """Measure what the file does not have, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".", metavar="PATTERN", help="architectures whose names match (all)")
    parser.add_argument("--seconds", type=int, default=100, help="of the processor, the most that one may take (100)")
    parser.add_argument("--out", type=Path, default=Path("results/symmetries/kinds.jsonl"), help="the records")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    done = {(record["library"], record["name"]) for record in records}
    for architecture in choose(options.only):
        if (architecture.library, architecture.name) not in done:
            records.append(measure(architecture, options.seconds))
            append(options.out, records[-1])
    print("\n".join(summarise(records)))


if __name__ == "__main__":
    main()
