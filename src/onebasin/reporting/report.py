"""A report of an alignment, a merge or a barrier: one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources

import torch
from torch import Tensor

from onebasin.landscape.paths import LinearPath
from onebasin.matching.alignment import Alignment
from onebasin.plots import history_series, plot_history, plot_path
from onebasin.plots.style import COLORS, GREY, line_style
from onebasin.reporting.figures import matrix_png, themed_svg
from onebasin.symmetries import Group, Permutation, Symmetry
from onebasin.symmetries.describe import pin_reasons, places
from onebasin.symmetries.layout import Factor, Product
from onebasin.tensors.files import write_atomically

_FIGURE = (4.4, 2.9)  # inches; drawn small, so that the letters are still large enough on a phone
_OPEN_MATRICES = 12
_OPEN_ROWS = 24
_OPEN_AXES = 3
_LISTED_AXES = 20
_LONGEST_AXIS = 72


@dataclass(frozen=True)
class Report:
    """What a report shows; every part but the title may be missing.

    Attributes:
        title: its heading.
        command: what was run, as one would type it again.
        symmetry: its groups, and what is pinned and why; that of the permutation if None.
        permutation: drawn as matrices; that of the alignment if None.
        alignment: its method, cost and convergence.
        paths: by name; the first is the one that the others are compared with.
        facts: further numbers, as label and value.
        permutations: further permutations by name, such as those of the models of a merge.
    """

    title: str
    command: str = ""
    symmetry: Symmetry | None = None
    permutation: Permutation | None = None
    alignment: Alignment | None = None
    paths: dict[str, LinearPath] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    permutations: dict[str, Permutation] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML file, whole or not at all."""
        content = render(self).encode()

        def write(file: os.PathLike[str]) -> None:
            with open(file, "wb") as stream:
                stream.write(content)

        write_atomically(path, write)


def render(report: Report) -> str:
    """The report as the text of one HTML file: no script, nothing loaded, light or dark as the reader's system is.

    Needs matplotlib (``onebasin[plots]``) where there is a curve to draw. The same report gives the same text.
    """
    permutation = report.permutation or (report.alignment.permutation if report.alignment else None)
    permutations = {**({"": permutation} if permutation else {}), **report.permutations}
    symmetry = report.symmetry or next((permutation.symmetry for permutation in permutations.values()), None)
    sections = [
        _facts([*_alignment_facts(report.alignment), *report.facts]),
        _paths(report.paths),
        _convergence(report.alignment),
        *(_matrices(name, permutation) for name, permutation in permutations.items()),
        _groups(symmetry, permutations),
        _pins(symmetry),
    ]
    style = resources.files("onebasin.reporting").joinpath("report.css").read_text(encoding="utf-8")
    command = f"<pre><code>{_escape(report.command)}</code></pre>" if report.command else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{_escape(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{_escape(report.title)}</h1>
{command}
</header>
<main>
{"".join(sections)}</main>
<footer>Written by onebasin{_version()}.</footer>
</body>
</html>
"""


def _version() -> str:
    try:
        return f" {metadata.version('onebasin')}"
    except metadata.PackageNotFoundError:  # run from a source tree
        return ""


# ------------------------------------------------------------------------------------------------------------- sections


def _alignment_facts(alignment: Alignment | None) -> list[tuple[str, str]]:
    if alignment is None:
        return []
    return [
        ("method", alignment.method),
        ("cost before", _number(alignment.start_cost)),
        ("cost after", _number(alignment.cost)),
        ("ended", "converged" if alignment.converged else "at its limit"),
        ("seconds", f"{alignment.seconds:.2f}"),
    ]


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    if not facts:
        return ""
    pairs = [f"<div><dt>{_escape(label)}</dt><dd>{_escape(value)}</dd></div>\n" for label, value in facts]
    short = [_fits_tile(value) for _, value in facts]
    tiles = "".join(pair for pair, fits in zip(pairs, short, strict=True) if fits)
    rows = "".join(pair for pair, fits in zip(pairs, short, strict=True) if not fits)
    return (f"<dl class='tiles'>\n{tiles}</dl>\n" if tiles else "") + (f"<dl class='rows'>\n{rows}</dl>\n" if rows else "")


def _fits_tile(value: str) -> bool:
    """Whether a value can stand large in a small box; names of files can not."""
    return len(value) <= 24 and all(len(word) <= 12 for word in value.replace("-", " ").split())


def _paths(paths: dict[str, LinearPath]) -> str:
    """A picture for each metric that all paths have, and a table that is the legend too."""
    if not paths:
        return ""
    metrics = [metric for metric in next(iter(paths.values())).metrics if all(metric in p.metrics for p in paths.values())]
    plots = []
    for metric in metrics:
        figure, axes = _figure()
        for number, path in enumerate(paths.values()):
            plot_path(path, axes, metric=metric, **line_style(number, len(paths)))
        axes.set_ylabel("")  # a user's word, which matplotlib might take for mathematics; the caption says it
        plots.append(_plot(metric, themed_svg(figure, f"{metric} on the line between the models")))
    header = ["", "path", "barrier", "AUC", "loss at A", "loss at B", *(f"{metric} half way" for metric in metrics)]
    rows = []
    for number, (name, path) in enumerate(paths.items()):
        middle = [_half_way(path, metric) for metric in metrics]
        values = [path.barrier, path.auc, path.losses[0], path.losses[-1], *middle]
        rows.append([_swatch(number, len(paths)), _escape(name), *map(_number, values)])
    table = _table(header, rows, ["swatch", "name", *["number"] * (len(header) - 2)])
    note = "Models at equal steps on the straight line from A to B; the barrier is the largest excess over the chord."
    return _section("Between the models", f"<p>{note}</p><div class='plots'>{''.join(plots)}</div>{table}")


def _convergence(alignment: Alignment | None) -> str:
    if alignment is None or not history_series(alignment.history):
        return ""
    figure, axes = _figure()
    plot_history(alignment.history, axes)
    what = f"{axes.get_ylabel()} at each {axes.get_xlabel()}"
    axes.set_ylabel("")
    picture = _plot(what, themed_svg(figure, what))
    return _section("Convergence", f"<div class='plots'>{picture}</div>")


def _matrices(title: str, permutation: Permutation) -> str:
    if not permutation.indices:
        return ""
    cards = []
    for name, group in permutation.symmetry.groups.items():
        sources = _sources(permutation, group)
        moved = _moved(sources)
        caption = f"<b>{_name(name)}</b>{moved} of {len(sources)} moved"
        image = f'<img src="{matrix_png(sources)}" alt="permutation matrix of {_escape(name)}">'
        cards.append(f"<figure class='matrix'><div>{image}</div><figcaption>{caption}</figcaption></figure>\n")
    note = "A row is a place in the permuted model, a column the place its unit came from; the diagonal has not moved."
    note += " Large matrices are shown in blocks, darker where more units lie."
    shown, rest = (f"<div class='matrices'>\n{''.join(part)}</div>" for part in _cut(cards, _OPEN_MATRICES))
    more = _fold(f"{len(cards) - _OPEN_MATRICES} more", rest) if len(cards) > _OPEN_MATRICES else ""
    heading = f"Permutation matrices of {_escape(title)}" if title else "Permutation matrices"
    return _section(heading, f"<p>{note}</p>{shown}{more}")


def _groups(symmetry: Symmetry | None, permutations: dict[str, Permutation]) -> str:
    if symmetry is None:
        return ""
    rows = []
    for name, group in symmetry.groups.items():
        each = f" for each {', '.join(group.parents)}" if group.parents else ""
        moved = [str(_moved(_sources(p, group))) if name in p.indices else "-" for p in permutations.values()]
        rows.append([_name(name), f"{group.size or '?'}{_escape(each)}", *moved, _axes(places(symmetry, name))])
    moved_in = [f"moved in {title}" if title else "moved" for title in permutations]
    header = ["group", "units", *moved_in, "axes that move together"]
    classes = ["name", "number", *["number"] * len(moved_in), "long"]
    table = _long_table(header, rows, classes, "groups")
    unreached = f"<p>Never used by the example inputs, left alone: {_axes(symmetry.unreached)}</p>"
    return _section("Groups", f"<p>{symmetry.summary()}.</p>{table}{unreached if symmetry.unreached else ''}")


def _pins(symmetry: Symmetry | None) -> str:
    if symmetry is None or not symmetry.pinned:
        return ""
    reasons = pin_reasons(symmetry, modules=False)
    rows = [[_escape(reason), str(len(axes)), _axes(axes)] for reason, axes in reasons.items()]
    table = _long_table(["because", "count", "axes"], rows, ["long", "number", "long"], "reasons")
    return _section("Pinned, and why", f"<p>Axes of parameters and buffers that must stay in their order.</p>{table}")


# --------------------------------------------------------------------------------------------------------------- values


def _sources(permutation: Permutation, group: Group) -> Tensor:
    """Where each unit of a group comes from, in one row; the units of a family stand in the order of their parents."""
    sizes = permutation.symmetry.sizes
    whole = Product(tuple(Factor(sizes[name], name) for name in (*group.parents, group.name)))
    return permutation.move(torch.arange(whole.size), (whole,))


def _moved(sources: Tensor) -> int:
    return int((sources != torch.arange(len(sources))).sum())


def _half_way(path: LinearPath, metric: str) -> float:
    nearest = min(range(len(path.weights)), key=lambda i: abs(path.weights[i] - 0.5))
    return path.metrics[metric][nearest]


# ----------------------------------------------------------------------------------------------------------------- HTML


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def _name(name: str) -> str:
    """A dotted name that may break after its dots."""
    return _escape(name).replace(".", ".<wbr>")


def _number(value: float) -> str:
    return f"{value:#.4g}".replace("-", "\N{MINUS SIGN}", 1)


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{content}\n</section>\n"


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _cut(items: Sequence[str], count: int) -> tuple[Sequence[str], Sequence[str]]:
    return items[:count], items[count:]


def _axes(names: Sequence[str]) -> str:
    """The first few, more of them folded away; not all of a dense network's, which would be megabytes."""
    short = [name if len(name) <= _LONGEST_AXIS else name[:_LONGEST_AXIS] + "…" for name in names[:_LISTED_AXES]]
    shown, rest = (f"<code>{_escape(', '.join(part))}</code>" for part in _cut(short, _OPEN_AXES))
    if len(names) <= _OPEN_AXES:
        return shown
    unlisted = f" and {len(names) - _LISTED_AXES} not listed" if len(names) > _LISTED_AXES else ""
    return shown + _fold(f"and {len(names) - _OPEN_AXES} more", rest + unlisted)


def _table(header: Iterable[str], rows: Iterable[Sequence[str]], classes: Sequence[str]) -> str:
    """A table that scrolls in a box of its own; the cells are HTML already."""
    head = "".join(f"<th scope='col' class='{c}'>{_escape(h)}</th>" for h, c in zip(header, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td class='{c}'>{cell}</td>" for cell, c in zip(row, classes, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f"<div class='scroll' tabindex='0'><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"


def _long_table(header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str], what: str) -> str:
    table = _table(header, rows, classes)
    return table if len(rows) <= _OPEN_ROWS else _fold(f"All {len(rows)} {what}", table)


def _plot(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{_escape(caption)}</figcaption>{picture}</figure>\n"


def _swatch(number: int, count: int) -> str:
    style = line_style(number, count)
    color = "var(--line-grey)" if style["color"] == GREY else f"var(--line-{COLORS.index(style['color'])})"
    dashes = "" if style["linestyle"] == "-" else " ".join(str(2 * length) for length in style["linestyle"][1])
    line = f'<line x1="1" x2="31" y1="10" y2="10" stroke="{color}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
    return f'<svg viewBox="0 0 32 20" aria-hidden="true">{line}</svg>'


def _figure():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a report with curves needs matplotlib: pip install 'onebasin[plots]'") from error
    figure = Figure(figsize=_FIGURE, layout="constrained")
    return figure, figure.subplots()
