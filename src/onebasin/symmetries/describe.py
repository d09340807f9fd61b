"""A symmetry as a table that a person can read, as text and as HTML, and the parts such a table is made of."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from onebasin.plots.tables import html_table
from onebasin.symmetries.layout import Factor, factors, write
from onebasin.symmetries.structure import Basis, Group, Scale, Structure

_SHOWN = 3


def describe(symmetry: Structure) -> str:
    """Groups with the axes they move, scales and bases, then what is pinned and why, then what was never used."""
    lines = [symmetry.summary()]
    for rows in _tables(symmetry):
        lines += ["", *_columns(rows)]
    reasons = dict.fromkeys(front_end.reason for front_end in symmetry.front_ends if front_end.name == "export")
    lines += [line for reason in reasons for line in ("", f"exported, because it could not be recorded: {reason}")]
    lines += [line for limit in symmetry.limits for line in ("", limit)]
    if symmetry.unreached:
        lines += ["", f"never used by these calls, left alone: {_shorten(symmetry.unreached)}"]
    if symmetry.unread:
        axes = [f"{key}[{axis}]" for key, axis in symmetry.unread]
        lines += ["", f"read in part by these calls, the rest left alone: {_shorten(axes)}"]
    return "\n".join(lines)


def describe_in_html(symmetry: Structure) -> str:
    """The same for notebooks."""
    tables = "".join(html_table(body, header) for header, *body in _tables(symmetry))
    return f"<p><b>Symmetry</b>: {html.escape(symmetry.summary())}</p>{tables}"


def _tables(symmetry: Structure) -> Iterator[list[tuple[str, ...]]]:
    """The rows of each table, the header first."""
    rows: list[tuple[str, ...]] = [("group", "size", "moves")]
    for name, group in symmetry.groups.items():
        per_parent = f" [for each {', '.join(group.parents)}]" if group.parents else ""
        rows.append((name, str(group.size or "?"), _shorten(places(symmetry, name)) + per_parent))
    yield rows
    if symmetry.scales:
        yield [("scale", "of", "multiplies"), *((s.name, s.group, _shorten(_powers(s))) for s in symmetry.scales.values())]
    if symmetry.bases:
        rows = [(b.name, b.group, b.kind, _shorten(_mixed(b))) for b in symmetry.bases.values()]
        yield [("basis", "of", "kind", "multiplies"), *rows]
    reasons = pin_reasons(symmetry)
    if reasons:
        yield [("not free", "because"), *((_shorten(axes), why) for why, axes in reasons.items())]


def summarise(symmetry: Structure) -> list[tuple[str, int, Group, list[str]]]:
    """Groups that differ in nothing but the numbers of their layers as one row: name, how many, one of them, its axes.

    Such numbers are written ``*``. Axes are key[axis], without the patterns that `places` has.
    """
    alike: dict[Any, list[str]] = {}
    for name, group in symmetry.groups.items():
        axes = merge_layers(place.partition(" as ")[0] for place in places(symmetry, name))
        alike.setdefault(
            (star_layer(name), group.size, *(tuple(map(star_layer, x)) for x in (group.parents, axes))), []
        ).append(name)
    return [
        (star if len(names) > 1 else names[0], len(names), symmetry.groups[names[0]], list(axes))
        for (star, _, _, axes), names in alike.items()
    ]


def merge_layers(entries: Iterable[str]) -> list[str]:
    """Entries that differ in nothing but the numbers of their layers as one, with their count.

    >>> merge_layers(["h.0.fc.weight[0]", "h.1.fc.weight[0]", "head.weight[1]"])
    ['h.*.fc.weight[0] x2', 'head.weight[1]']
    """
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(star_layer(entry), []).append(entry)
    return [f"{star} x{len(alike)}" if len(alike) > 1 else alike[0] for star, alike in found.items()]


def star_layer(name: str) -> str:
    """A name without the number of its layer: the first one in it, as further numbers are places inside a layer.

    >>> star_layer("model.layers.12.mlp.0.weight[0]")
    'model.layers.*.mlp.0.weight[0]'
    """
    return name if "*" in name else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name, count=1)


def pin_reasons(symmetry: Structure, modules: bool = True) -> dict[str, list[str]]:
    """For each reason why axes are not free, those axes as key[axis]; `modules`: a reason names the module it arises in."""
    reasons: dict[str, list[str]] = {}
    for (key, axis), pin in symmetry.pinned.items():
        part = " in part" if any(f.name in symmetry.groups for f in factors(symmetry.layouts[key][axis])) else ""
        reasons.setdefault(str(pin if modules else replace(pin, module="")), []).append(f"{key}[{axis}]{part}")
    return reasons


def places(symmetry: Structure, name: str) -> list[str]:
    """key[axis] for every axis the group moves, with its pattern where the axis is more than the group."""
    found = []
    for key, layout in symmetry.layouts.items():
        for axis, term in enumerate(layout):
            if any(f.name == name for f in factors(term)):
                pattern = "" if isinstance(term, Factor) else f" as {write((term,))}"
                found.append(f"{key}[{axis}]{pattern}")
    return found


def _powers(scale: Scale) -> list[str]:
    """key[axis] for every axis that a scale multiplies, with its power where that is not one."""
    return [
        f"{key}[{power.axis}]{'' if power.exponent == 1 else f' to the power {power.exponent:g}'}"
        for key, powers in scale.powers.items()
        for power in powers
    ]


def _mixed(basis: Basis) -> list[str]:
    """key[axis] for every axis that a basis changes, saying where by the dual matrix."""
    return [
        f"{key}[{place.axis}]{' by the dual' if place.is_dual else ''}"
        for key, places in basis.places.items()
        for place in places
    ]


def _shorten(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    header, *body = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [header, "-" * len(header), *body]
