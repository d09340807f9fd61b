"""Numbers as people read them: mean and deviation, paired tests, Markdown tables with where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from onebasin.tensors.files import write_atomically


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and the standard deviation over the values, e.g. ``0.270 ± 0.040``."""
    array = np.asarray(values, float)
    return f"{array.mean():.{digits}g} ± {array.std():.2g}"


def paired_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Wilcoxon's signed-rank test of paired values; 1 if all are equal."""
    difference = np.asarray(a, float) - np.asarray(b, float)
    return 1.0 if not difference.any() else float(stats.wilcoxon(difference).pvalue)


def write_markdown(
    path: Path, title: str, tables: Iterable[tuple[Sequence[str], Sequence[Sequence[str]]]], records: list[dict[str, Any]]
) -> None:
    """Tables, printed and written, with the commits and machines of the records they were drawn from."""
    parts = [f"# {title}", ""]
    for header, rows in tables:
        parts += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        parts += ["| " + " | ".join(row) + " |" for row in rows] + [""]
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
