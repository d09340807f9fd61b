"""Benchmarks that are drawn from records: a line of JSON for each trial, measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import append, describe_machine
from experiments.frame import identify, read_records

Config = dict[str, Any]
Record = dict[str, Any]


def complete(path: Path, configs: Iterable[Config], measure: Callable[[Config], Record]) -> list[Record]:
    """Measure what `path` has no record of, append each record as it is made, and return those of all configurations.

    An interrupted run goes on where it stopped. Delete the file to measure everything again.
    """
    configs, machine = list(configs), describe_machine("cpu")  # the code that runs is what was there when it was imported
    done = {identify(record["config"]): record for record in read_records(path)}
    for config in configs:
        if identify(config) not in done:
            record = {"config": config, "result": _round(measure(config)), **machine}
            append(path, record)
            done[identify(config)] = record
            print(f"{config}: {record['result']}", flush=True)
    return [done[identify(config)] for config in configs]


def write_page(path: Path, lines: Sequence[str], records: Sequence[Record]) -> None:
    """Write a page of results, with where its records come from as the last line, and print it."""
    made = sorted({f"torch {record['torch']}, commit {record['commit']}" for record in records})
    text = "\n".join([*lines, "", f"{len(records)} records; {'; '.join(made)}."])
    path.write_text(text + "\n")
    print(text)


def tabulate(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    return [_round(entry) for entry in value] if isinstance(value, (list, tuple)) else value
