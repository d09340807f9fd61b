"""Pieces of HTML that a report is made of. Arguments named `content`, `picture` or `rows` are HTML already."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from onebasin.plots.style import COLORS, GREY, line_style

_OPEN_ROWS = 24
_OPEN_AXES = 3
_LISTED_AXES = 20
_LONGEST_AXIS = 72


def escape(text: object) -> str:
    """Text that is shown as it is."""
    return html.escape(str(text), quote=True)


def dotted_name(name: str) -> str:
    """A dotted name, in which a line may break after a dot."""
    return escape(name).replace(".", ".<wbr>")


def number(value: float) -> str:
    """A number with four digits and a proper minus sign."""
    return f"{value:#.4g}".replace("-", "\N{MINUS SIGN}", 1)


def section(heading: str, content: str) -> str:
    """A part of the page."""
    return f"<section>\n<h2>{heading}</h2>\n{content}\n</section>\n"


def fold(summary: str, content: str) -> str:
    """Content that is shown when the reader opens it."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def axes_list(names: Sequence[str]) -> str:
    """The first few axes are shown, more are folded, the rest is counted: a dense network has megabytes of them."""
    short = [name if len(name) <= _LONGEST_AXIS else name[:_LONGEST_AXIS] + "…" for name in names[:_LISTED_AXES]]
    shown, folded = (f"<code>{escape(', '.join(part))}</code>" for part in (short[:_OPEN_AXES], short[_OPEN_AXES:]))
    if len(names) <= _OPEN_AXES:
        return shown
    unlisted = f" and {len(names) - _LISTED_AXES} not listed" if len(names) > _LISTED_AXES else ""
    return shown + fold(f"and {len(names) - _OPEN_AXES} more", folded + unlisted)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str], what: str = "") -> str:
    """A table that scrolls in a box of its own; folded if `what` its rows are is given and there are many.

    On a narrow screen each row is a list of its cells, which are shown with their headings.
    """
    head = "".join(f"<th scope='col' class='{c}'>{escape(h)}</th>" for h, c in zip(header, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(*parts) for parts in zip(row, header, classes, strict=True)) + "</tr>\n" for row in rows
    )
    text = f"<div class='scroll' tabindex='0'><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    return fold(f"All {len(rows)} {what}", text) if what and len(rows) > _OPEN_ROWS else text


def _cell(content: str, heading: str, kind: str) -> str:
    label = f" data-label='{escape(heading)}'" if heading else ""
    return f"<td class='{kind}'{label}>{content}</td>"


def bars(first: float, second: float) -> str:
    """Two bars, one above the other; lengths are between zero and one."""
    lengths = [100 * value if math.isfinite(value) else 0.0 for value in (first, second)]
    shapes = "".join(
        f'<rect x="0" y="{y}" width="{length:.2f}" height="5" fill="var(--line-{color})"/>'
        for y, length, color in zip((1, 8), lengths, ("grey", 0), strict=True)
    )
    return f'<svg viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'


def histogram(counts: Sequence[int]) -> str:
    """Bars of equal width, the highest as high as the picture, and a line in the middle."""
    width, highest = 100 / len(counts), max(counts) or 1
    shapes = "".join(
        f'<rect x="{number * width:.2f}" y="{14 - 14 * count / highest:.2f}" width="{0.9 * width:.2f}" '
        f'height="{14 * count / highest:.2f}" fill="var(--line-0)"/>'
        for number, count in enumerate(counts)
        if count
    )
    middle = '<rect x="49.8" y="0" width="0.4" height="14" fill="var(--line-grey)"/>'
    return f'<svg viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">{middle}{shapes}</svg>'


def figure(caption: str, picture: str) -> str:
    """A picture with a caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>\n"


def swatch(index: int, count: int) -> str:
    """A short piece of a line in the style of one path among `count`."""
    style = line_style(index, count)
    color = "var(--line-grey)" if style["color"] == GREY else f"var(--line-{COLORS.index(style['color'])})"
    dashes = "" if style["linestyle"] == "-" else " ".join(str(2 * length) for length in style["linestyle"][1])
    line = f'<line x1="1" x2="31" y1="10" y2="10" stroke="{color}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
    return f'<svg viewBox="0 0 32 20" aria-hidden="true">{line}</svg>'
