"""Where the time of all workers went, as a picture: a row for each worker, in the colours of the page's theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from onebasin.engines.timeline import Timeline
from onebasin.reporting import markup

Value = TypeVar("Value")
KINDS = {
    "read": ("reading", "var(--line-5)"),
    "score": ("scoring", "var(--line-0)"),
    "reduce": ("summing", "var(--line-3)"),
    "assign": ("assigning", "var(--line-1)"),
    "write": ("writing", "var(--line-2)"),
    "other": ("the rest", "var(--line-grey)"),
}
"""What time is spent on, from the bottom of a row to its top: in words, and in which colour."""
_LEFT, _WIDTH, _ROW, _GAP = 132, 640, 18, 6
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)
"""Seconds between two marks of the axis."""


def render_timeline(timeline: Timeline | None) -> str:
    """A section with the picture and the seconds by what they were spent on; nothing if no time was recorded."""
    if timeline is None or not timeline.rows:
        return ""
    rows = timeline.rows
    length = max(len(next(iter(row.values()))) for row in rows.values())
    bars = "".join(_draw_row(number, name, row, timeline.width) for number, (name, row) in enumerate(rows.items()))
    height = len(rows) * (_ROW + _GAP)
    axis = _draw_axis(length * timeline.width, height)
    picture = (
        f'<svg class="timeline" role="img" aria-label="What each worker did, and when" style="display:block;width:100%;'
        f'min-width:40rem;height:auto;color:var(--ink)" viewBox="0 0 {_LEFT + _WIDTH + 24} {height + 24}">{axis}{bars}</svg>'
    )
    total = sum(timeline.seconds.values()) or 1.0
    known = [(KINDS.get(what, (what, "var(--line-grey)")), spent) for what, spent in _sort(timeline.seconds)]
    listed = [[_draw_square(color), word, f"{spent:.1f}", f"{spent / total:.0%}"] for (word, color), spent in known]
    table = markup.table(["", "time was spent on", "seconds", "share"], listed, ["swatch", "name", "number", "number"])
    note = "A row is a worker, from left to right the time. How full a row is tells how busy the worker was: in an empty "
    note += "stretch it waited."
    figure = f"<div class='scroll' tabindex='0'>{picture}</div>"
    return markup.section("Where the time went", f"<p>{note}</p>{figure}{table}")


def _sort(by_kind: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """In the order of the kinds."""
    order = {what: number for number, what in enumerate(KINDS)}
    return sorted(by_kind.items(), key=lambda each: order.get(each[0], len(order)))


def _draw_row(number: int, name: str, row: Mapping[str, Sequence[float]], width: float) -> str:
    """The name of a worker, and what it did: areas on top of each other, as high as the share of each interval."""
    bottom = (number + 1) * (_ROW + _GAP) - _GAP
    count = len(next(iter(row.values())))
    full = max(width, max(sum(each) for each in zip(*row.values(), strict=True)))  # many workers may share a row
    step, base, shapes = _WIDTH / count, [0.0] * count, []
    for what, intervals in _sort(row):
        top = [low + each / full for low, each in zip(base, intervals, strict=True)]
        color = KINDS.get(what, (what, "var(--line-grey)"))[1]
        shapes.append(f'<path fill="{color}" d="{_trace(base, top, step, bottom)}"/>')
        base = top
    label = markup.escape(name if len(name) <= 17 else f"{name[:7]}…{name[-8:]}")
    text = f'<text x="{_LEFT - 8}" y="{bottom - 4}" text-anchor="end" font-size="13" fill="currentColor">{label}</text>'
    frame = f'<rect x="{_LEFT}" y="{bottom - _ROW}" width="{_WIDTH}" height="{_ROW}" fill="var(--wash)"/>'
    return f"<g><title>{markup.escape(name)}</title>{frame}{''.join(shapes)}{text}</g>"


def _trace(base: Sequence[float], top: Sequence[float], step: float, bottom: int) -> str:
    """The outline of the area between two staircases; intervals in which it is empty are left out."""
    parts = []
    for place, (low, high) in enumerate(zip(base, top, strict=True)):
        if high - low > 0.004:
            x, end = _LEFT + place * step, _LEFT + (place + 1) * step
            parts.append(
                f"M{x:.1f} {bottom - _ROW * low:.1f}V{bottom - _ROW * high:.1f}H{end:.1f}V{bottom - _ROW * low:.1f}Z"
            )
    return "".join(parts)


def _draw_axis(seconds: float, height: int) -> str:
    """Marks at round numbers of seconds, minutes or hours."""
    step = next((each for each in _STEPS if seconds / each <= 8), _STEPS[-1])
    marks = []
    for number in range(int(seconds / step) + 1):
        x = _LEFT + _WIDTH * number * step / seconds
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="var(--rule)"/>'
        text = f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle" font-size="12" fill="var(--soft)">'
        marks.append(f"{line}{text}{_write(number * step)}</text>")
    return "".join(marks)


def _write(seconds: int) -> str:
    """A time for the axis.

    >>> _write(45), _write(120), _write(5400)
    ('45 s', '2 min', '1.5 h')
    """
    if seconds % 60 or not seconds:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 3600 else f"{seconds / 3600:g} h"


def _draw_square(color: str) -> str:
    return f'<svg viewBox="0 0 32 20" aria-hidden="true"><rect x="2" y="3" width="14" height="14" fill="{color}"/></svg>'
