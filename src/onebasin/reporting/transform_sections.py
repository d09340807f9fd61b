"""The sections of a report about changes of basis and positive scales."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from onebasin.reporting import markup
from onebasin.reporting.figures import heat_png
from onebasin.symmetries import Transform
from onebasin.symmetries.transform_sizes import BasisSize, measure_bases, measure_scales

_OPEN_PICTURES = 12
_NUM_BINS = 25
_ABOUT_BASES = (
    "Units are permuted, and then multiplied by a matrix M. The distance is the norm of M \N{MINUS SIGN} 1 over that of 1: "
    "zero where units are only permuted, at most two for rotations and signs. The condition is the largest stretch over the "
    "smallest one. Of several members, such as heads, each has a matrix; the highest condition is shown."
)
_ABOUT_PICTURES = (
    "The first matrix of each basis: a row is a new unit, a column a unit that it is made of. Blue entries are positive, "
    "orange ones negative, and strong ones large."
)
_ABOUT_SCALES = (
    "What makes a unit is multiplied by a factor, and what reads it is divided by it. Bars show how the logarithms of the "
    "factors are distributed, on one axis for all rows; the line is at a factor of one."
)


def render_bases(title: str, transform: Transform) -> str:
    """A table of all changes of basis, and pictures of their matrices; empty if there are none."""
    sizes = measure_bases(transform)
    if not sizes:
        return ""
    rows = [
        [
            markup.dotted_name(each.name),
            markup.escape(each.kind),
            markup.dotted_name(each.group),
            str(each.size),
            str(each.num_members),
            markup.number(each.distance),
            markup.number(each.condition),
        ]
        for each in sizes
    ]
    header = ["basis", "kind", "group", "units", "members", "distance", "condition"]
    table = markup.table(header, rows, ["name", "word", "word", *["number"] * 4], "changes of basis")
    heading = f"Changes of basis of {markup.escape(title)}" if title else "Changes of basis"
    return markup.section(heading, f"<p>{_ABOUT_BASES}</p>{table}{_render_pictures(transform, sizes)}")


def _render_pictures(transform: Transform, sizes: list[BasisSize]) -> str:
    cards = []
    for each in sizes:
        if each.kind in ("signed", "rotary"):
            continue  # a diagonal, and matrices of two units: there is nothing to see
        matrix = transform.matrices[each.name].reshape(-1, each.size, each.size)[0]
        caption = f"<b>{markup.dotted_name(each.name)}</b>{each.kind}"
        image = f'<img src="{heat_png(matrix)}" alt="matrix of {markup.escape(each.name)}">'
        cards.append(f"<figure class='matrix heat'><div>{image}</div><figcaption>{caption}</figcaption></figure>\n")
    if not cards:
        return ""
    shown, folded = (
        f"<div class='matrices'>\n{''.join(part)}</div>" for part in (cards[:_OPEN_PICTURES], cards[_OPEN_PICTURES:])
    )
    rest = len(cards) - _OPEN_PICTURES
    return f"<p>{_ABOUT_PICTURES}</p>{shown}{markup.fold(f'{rest} more', folded) if rest > 0 else ''}"


def render_scales(title: str, transform: Transform) -> str:
    """A table of all positive scales with the range of their factors; empty if there are none."""
    sizes = measure_scales(transform)
    if not sizes:
        return ""
    largest = max(float(value.abs().max()) for value in transform.logarithms.values()) or 1.0
    rows = [
        [
            markup.dotted_name(each.name),
            markup.dotted_name(each.group),
            str(each.size),
            str(each.num_members),
            markup.number(each.lowest),
            markup.number(each.highest),
            markup.histogram(_count(transform.logarithms[each.name], largest)),
        ]
        for each in sizes
    ]
    header = ["scale", "group", "units", "members", "lowest factor", "highest factor", ""]
    table = markup.table(header, rows, ["name", "word", *["number"] * 4, "bars"], "positive scales")
    heading = f"Positive scales of {markup.escape(title)}" if title else "Positive scales"
    return markup.section(heading, f"<p>{_ABOUT_SCALES}</p>{table}")


def _count(logarithms: Tensor, largest: float) -> list[int]:
    """How many numbers lie in each of equal parts of the range around zero."""
    return np.histogram(logarithms.flatten().numpy(), _NUM_BINS, (-largest, largest))[0].tolist()
