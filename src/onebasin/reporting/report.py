"""A report of an alignment, a merge or a barrier: one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources

import torch
from torch import Tensor

from onebasin.landscape.paths import LinearPath
from onebasin.matching.alignment import Alignment
from onebasin.plots import history_series, plot_history, plot_path
from onebasin.plots.style import line_style
from onebasin.reporting import markup
from onebasin.reporting.figures import matrix_png, themed_svg
from onebasin.symmetries import Group, Permutation, Symmetry
from onebasin.symmetries.describe import pin_reasons, places
from onebasin.symmetries.layout import Factor, Product
from onebasin.tensors.files import write_atomically

_FIGURE_SIZE = (4.4, 2.9)
"""In inches. Small, so that the letters are large enough on a phone."""
_OPEN_MATRICES = 12


@dataclass(frozen=True)
class Report:
    """What a report shows; every part but the title may be missing.

    Attributes:
        title: the heading.
        command: the command that was run, as one would type it again.
        symmetry: shown as its groups, and what is pinned and why. If None, that of the permutation.
        permutation: shown as matrices. If None, that of the alignment.
        alignment: shown as its method, cost, convergence and notes.
        paths: by name, shown as curves. The others are compared with the first one.
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
        write_atomically(path, lambda file: file.write_bytes(content))


def render(report: Report) -> str:
    """The report as the text of one HTML file. It has no script, loads nothing, and follows the reader's light or dark mode.

    Needs matplotlib (``onebasin[plots]``) if there is a curve to draw. The same report gives the same text.
    """
    permutation = report.permutation or (report.alignment.permutation if report.alignment else None)
    permutations = {**({"": permutation} if permutation else {}), **report.permutations}
    symmetry = report.symmetry or next((permutation.symmetry for permutation in permutations.values()), None)
    sections = [
        _render_facts([*_list_facts(report.alignment), *report.facts]),
        _render_paths(report.paths),
        _render_convergence(report.alignment),
        *(_render_matrices(name, permutation) for name, permutation in permutations.items()),
        _render_groups(symmetry, permutations),
        _render_pins(symmetry),
    ]
    style = resources.files("onebasin.reporting").joinpath("report.css").read_text(encoding="utf-8")
    command = f"<pre><code>{markup.escape(report.command)}</code></pre>" if report.command else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{markup.escape(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{markup.escape(report.title)}</h1>
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


def _list_facts(alignment: Alignment | None) -> list[tuple[str, str]]:
    if alignment is None:
        return []
    return [
        ("method", alignment.method),
        ("cost before", markup.number(alignment.start_cost)),
        ("cost after", markup.number(alignment.cost)),
        ("ended", "converged" if alignment.converged else "at its limit"),
        ("seconds", f"{alignment.seconds:.2f}"),
        *([("notes", " ".join(alignment.notes))] if alignment.notes else []),
    ]


def _render_facts(facts: Sequence[tuple[str, str]]) -> str:
    if not facts:
        return ""
    pairs = [f"<div><dt>{markup.escape(label)}</dt><dd>{markup.escape(value)}</dd></div>\n" for label, value in facts]
    short = [_fits_tile(value) for _, value in facts]
    tiles = "".join(pair for pair, fits in zip(pairs, short, strict=True) if fits)
    rows = "".join(pair for pair, fits in zip(pairs, short, strict=True) if not fits)
    return (f"<dl class='tiles'>\n{tiles}</dl>\n" if tiles else "") + (f"<dl class='rows'>\n{rows}</dl>\n" if rows else "")


def _fits_tile(value: str) -> bool:
    """Whether a value is short enough to be shown large in a small box. Names of files are not."""
    return len(value) <= 24 and all(len(word) <= 12 for word in value.replace("-", " ").split())


def _render_paths(paths: dict[str, LinearPath]) -> str:
    """A picture for each metric that all paths have, and a table that also serves as the legend."""
    if not paths:
        return ""
    metrics = [metric for metric in next(iter(paths.values())).metrics if all(metric in p.metrics for p in paths.values())]
    plots = []
    for metric in metrics:
        figure, axes = _make_figure()
        for number, path in enumerate(paths.values()):
            plot_path(path, axes, metric=metric, **line_style(number, len(paths)))
        axes.set_ylabel("")  # matplotlib might read the user's word as mathematics; the caption has it
        plots.append(markup.figure(metric, themed_svg(figure, f"{metric} on the line between the models")))
    header = ["", "path", "barrier", "AUC", "loss at A", "loss at B", *(f"{metric} half way" for metric in metrics)]
    rows = []
    for number, (name, path) in enumerate(paths.items()):
        middle = [_value_half_way(path, metric) for metric in metrics]
        values = [path.barrier, path.auc, path.losses[0], path.losses[-1], *middle]
        rows.append([markup.swatch(number, len(paths)), markup.escape(name), *map(markup.number, values)])
    table = markup.table(header, rows, ["swatch", "name", *["number"] * (len(header) - 2)])
    note = "Models at equal steps on the straight line from A to B. The barrier is how far the loss rises, at most, above "
    note += "the straight line between its values at A and B."
    return markup.section("Between the models", f"<p>{note}</p><div class='plots'>{''.join(plots)}</div>{table}")


def _render_convergence(alignment: Alignment | None) -> str:
    if alignment is None or not history_series(alignment.history):
        return ""
    figure, axes = _make_figure()
    plot_history(alignment.history, axes)
    what = f"{axes.get_ylabel()} at each {axes.get_xlabel()}"
    axes.set_ylabel("")
    picture = markup.figure(what, themed_svg(figure, what))
    return markup.section("Convergence", f"<div class='plots'>{picture}</div>")


def _render_matrices(title: str, permutation: Permutation) -> str:
    if not permutation.indices:
        return ""
    cards = []
    for name, group in permutation.symmetry.groups.items():
        sources = _sources(permutation, group)
        moved = _num_moved(sources)
        caption = f"<b>{markup.dotted_name(name)}</b>{moved} of {len(sources)} moved"
        image = f'<img src="{matrix_png(sources)}" alt="permutation matrix of {markup.escape(name)}">'
        cards.append(f"<figure class='matrix'><div>{image}</div><figcaption>{caption}</figcaption></figure>\n")
    note = "A row is a place in the permuted model, a column the place that its unit came from. Units on the diagonal have "
    note += "not moved. A pixel of a large matrix is a block of entries, darker if it holds more units."
    parts = cards[:_OPEN_MATRICES], cards[_OPEN_MATRICES:]
    shown, folded = (f"<div class='matrices'>\n{''.join(part)}</div>" for part in parts)
    more = markup.fold(f"{len(parts[1])} more", folded) if parts[1] else ""
    heading = f"Permutation matrices of {markup.escape(title)}" if title else "Permutation matrices"
    return markup.section(heading, f"<p>{note}</p>{shown}{more}")


def _render_groups(symmetry: Symmetry | None, permutations: dict[str, Permutation]) -> str:
    if symmetry is None:
        return ""
    rows = []
    for name, group in symmetry.groups.items():
        each = f" for each {', '.join(group.parents)}" if group.parents else ""
        moved = [str(_num_moved(_sources(p, group))) if name in p.indices else "-" for p in permutations.values()]
        units, axes = f"{group.size or '?'}{markup.escape(each)}", markup.axes_list(places(symmetry, name))
        rows.append([markup.dotted_name(name), units, *moved, axes])
    moved_in = [f"moved in {title}" if title else "moved" for title in permutations]
    header = ["group", "units", *moved_in, "axes that move together"]
    classes = ["name", "number", *["number"] * len(moved_in), "long"]
    table = markup.table(header, rows, classes, "groups")
    unreached = f"<p>Never used by the example inputs, left alone: {markup.axes_list(symmetry.unreached)}</p>"
    return markup.section("Groups", f"<p>{symmetry.summary()}.</p>{table}{unreached if symmetry.unreached else ''}")


def _render_pins(symmetry: Symmetry | None) -> str:
    if symmetry is None or not symmetry.pinned:
        return ""
    reasons = pin_reasons(symmetry, modules=False)
    rows = [[markup.escape(reason), str(len(axes)), markup.axes_list(axes)] for reason, axes in reasons.items()]
    table = markup.table(["because", "count", "axes"], rows, ["long", "number", "long"], "reasons")
    return markup.section("Pinned, and why", f"<p>Axes of parameters and buffers that must stay in their order.</p>{table}")


def _sources(permutation: Permutation, group: Group) -> Tensor:
    """Where each unit of a group comes from, in one row. The units of a family are in the order of their parents."""
    sizes = permutation.symmetry.sizes
    whole = Product(tuple(Factor(sizes[name], name) for name in (*group.parents, group.name)))
    return permutation.move(torch.arange(whole.size), (whole,))


def _num_moved(sources: Tensor) -> int:
    return int((sources != torch.arange(len(sources))).sum())


def _value_half_way(path: LinearPath, metric: str) -> float:
    nearest = min(range(len(path.weights)), key=lambda i: abs(path.weights[i] - 0.5))
    return path.metrics[metric][nearest]


def _make_figure():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a report with curves needs matplotlib: pip install 'onebasin[plots]'") from error
    figure = Figure(figsize=_FIGURE_SIZE, layout="constrained")
    return figure, figure.subplots()
