"""A symmetry as a table that a person can read, and the parts such a table is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onebasin.layout import Factor, factors, write
from onebasin.structure import Symmetry

_SHOWN = 3


def describe(symmetry: Symmetry) -> str:
    """Groups with the axes they move, then what is pinned and why, then what was never used."""
    rows = [("group", "size", "moves")]
    for name, group in symmetry.groups.items():
        of_each = f" [for each {', '.join(group.parents)}]" if group.parents else ""
        rows.append((name, str(group.size or "?"), _shorten(places(symmetry, name)) + of_each))
    lines = [symmetry.summary(), "", *_columns(rows)]
    reasons = pin_reasons(symmetry)
    if reasons:
        lines += [
            "",
            *_columns([("not free", "because"), *((_shorten(axes), why) for why, axes in reasons.items())]),
        ]
    if symmetry.unreached:
        lines += ["", f"never used by these calls, left alone: {_shorten(symmetry.unreached)}"]
    return "\n".join(lines)


def pin_reasons(symmetry: Symmetry, modules: bool = True) -> dict[str, list[str]]:
    """For each reason why axes are not free, those axes as key[axis]; `modules`: a reason names the module it arises in."""
    reasons: dict[str, list[str]] = {}
    for (key, axis), pin in symmetry.pinned.items():
        part = " in part" if any(f.name in symmetry.groups for f in factors(symmetry.layouts[key][axis])) else ""
        reasons.setdefault(str(pin if modules else replace(pin, module="")), []).append(f"{key}[{axis}]{part}")
    return reasons


def places(symmetry: Symmetry, name: str) -> list[str]:
    """key[axis] for every axis the group moves, with its pattern where the axis is more than the group."""
    found = []
    for key, layout in symmetry.layouts.items():
        for axis, term in enumerate(layout):
            if any(f.name == name for f in factors(term)):
                pattern = "" if isinstance(term, Factor) else f" as {write((term,))}"
                found.append(f"{key}[{axis}]{pattern}")
    return found


def _shorten(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    header, *body = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [header, "-" * len(header), *body]
