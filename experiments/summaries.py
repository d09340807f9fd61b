"""Numbers as people read them: mean and deviation, paired tests, Markdown tables with where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from onebasin.tensors.files import write_atomically

_LONG_SOLVES = frozenset({"1eadf3d", "068e332", "ce9201e", "0f1b12a", "7f31e99", "8ae0c08", "c481fca", "0ffaeb1"})
"""Commits of records whose implicit gradients were solved in up to 200 steps; today the default is ten."""
_MARK = " †"
_NOTE = "† Made when the implicit gradient was solved in up to 200 steps; today it is solved in at most ten."


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and the standard deviation over the values, e.g. ``0.270 ± 0.040``."""
    array = np.asarray(values, float)
    return f"{array.mean():.{digits}g} ± {array.std():.2g}"


def paired_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Wilcoxon's signed-rank test of paired values; 1 if all are equal."""
    difference = np.asarray(a, float) - np.asarray(b, float)
    return 1.0 if not difference.any() else float(stats.wilcoxon(difference).pvalue)


def mark_long_solves(label: str, records: Iterable[dict[str, Any]]) -> str:
    """The label of a row of descents with a mark if some of its records solved their gradients further than today.

    >>> mark_long_solves("Sinkhorn Mid", [{"commit": "ce9201e"}])
    'Sinkhorn Mid †'
    """
    return label + _MARK if any(record["commit"] in _LONG_SOLVES for record in records) else label


def write_markdown(
    path: Path,
    title: str,
    tables: Iterable[tuple[Sequence[str], Sequence[Sequence[str]]]],
    records: list[dict[str, Any]],
    verdicts: Sequence[str] = (),
) -> None:
    """Verdicts and tables, printed and written, with the commits and machines of the records they were drawn from."""
    parts, is_marked = [f"# {title}", "", *(f"- {verdict}" for verdict in verdicts), *([""] if verdicts else [])], False
    for header, rows in tables:
        is_marked = is_marked or any(row[0].endswith(_MARK) for row in rows)
        parts += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        parts += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    parts += [_NOTE, ""] if is_marked else []
    commits = sorted({record["commit"] for record in records})
    machines = sorted({f"{record['machine']}, torch {record['torch']}" for record in records})
    seconds = sum(record["seconds"] for record in records)
    parts.append(f"{len(records)} trials, {seconds:.0f} s in all; commit {', '.join(commits)}; {'; '.join(machines)}.")
    text = "\n".join(parts) + "\n"
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: _write(file, text))


def _write(file: Path, text: str) -> None:
    file.write_text(text)
