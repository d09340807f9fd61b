"""A report of an alignment, a merge or a barrier: one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from typing import Any

import torch
from torch import Tensor

from onebasin.engines.timeline import Timeline
from onebasin.landscape.paths import LinearPath
from onebasin.lineage import Evidence
from onebasin.matching.alignment import Alignment
from onebasin.plots import history_series, plot_history, plot_path
from onebasin.plots.style import line_style
from onebasin.reporting import markup
from onebasin.reporting.figures import matrix_png, themed_svg
from onebasin.reporting.timeline_section import render_timeline
from onebasin.reporting.transform_sections import render_bases, render_scales
from onebasin.symmetries import Group, Permutation, Symmetry, Transform
from onebasin.symmetries.describe import pin_reasons, places
from onebasin.symmetries.layout import Factor, Product
from onebasin.tensors.distances import LayerDistance
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
        alignment: shown as its method, cost, convergence and notes, and what it found beside a permutation.
        paths: by name, shown as curves. The others are compared with the first one.
        facts: further numbers, as label and value.
        permutations: further permutations by name, such as those of the models of a merge.
        transforms: likewise, shown as tables of their scales and changes of basis.
        averages: the metrics of averages of the models, by name, drawn as level lines beside the paths.
        distances: for each aligned model, by name, its distance from the target in each layer.
        ends: what the two ends of every path are called.
        evidence: of tests on groups of units, shown as a table.
        timeline: where the time of workers went, shown as a row for each.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> from onebasin.reporting import Report
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method="weight-matching")
    >>> report = Report("Two networks", alignment=result, facts=[("data", "none")])
    >>> report.save("report.html")  # doctest: +SKIP
    """

    title: str
    command: str = ""
    symmetry: Symmetry | None = None
    permutation: Permutation | None = None
    alignment: Alignment[Any] | None = None
    paths: dict[str, LinearPath] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    permutations: dict[str, Permutation] = field(default_factory=dict)
    transforms: dict[str, Transform] = field(default_factory=dict)
    averages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    distances: Mapping[str, Mapping[str, LayerDistance]] = field(default_factory=dict)
    ends: tuple[str, str] = ("A", "B")
    evidence: Sequence[Evidence] = ()
    timeline: Timeline | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML file, whole or not at all."""
        content = render(self).encode()
        write_atomically(path, lambda file: file.write_bytes(content))


def render(report: Report) -> str:
    """The report as the text of one HTML file. It has no script, loads nothing, and follows the reader's light or dark mode.

    Needs matplotlib (``onebasin[plots]``) if there is a curve to draw. The same report gives the same text.

    >>> from onebasin.reporting import Report, render
    >>> "<h1>Two networks</h1>" in render(Report("Two networks", facts=[("data", "none")]))
    True
    """
    permutation = report.permutation or (report.alignment.permutation if report.alignment else None)
    permutations = {**({"": permutation} if permutation else {}), **report.permutations}
    symmetry = report.symmetry or next((permutation.symmetry for permutation in permutations.values()), None)
    transforms = {**({"": report.alignment.transform} if report.alignment else {}), **report.transforms}
    sections = [
        _render_facts([*_list_facts(report.alignment), *report.facts]),
        _render_evidence(report.evidence),
        _render_paths(report.paths, report.averages, report.ends),
        _render_convergence(report.alignment),
        *(_render_matrices(name, permutation) for name, permutation in permutations.items()),
        *(render_bases(name, transform) for name, transform in transforms.items()),
        *(render_scales(name, transform) for name, transform in transforms.items()),
        *(_render_distances(name, distances) for name, distances in report.distances.items()),
        _render_groups(symmetry, permutations),
        _render_pins(symmetry),
        render_timeline(report.timeline),
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


def _list_facts(alignment: Alignment[Any] | None) -> list[tuple[str, str]]:
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


def _render_evidence(evidence: Sequence[Evidence]) -> str:
    if not evidence:
        return ""
    rows = []
    for each in evidence:
        counts = [str(each.num_units), str(each.num_agreeing), f"{each.p_value:.2g}"]
        rows.append([markup.escape(each.test), markup.dotted_name(each.group), *counts, markup.axes_list(each.keys),
                     markup.axes_list(each.other)])  # fmt: skip
    note = "Order: units that are matched with the unit in the same place. Residual: units whose residual parts are matched "
    note += "as their other parts are. P is the probability of so many, or more, if the networks are independent."
    header = ["test", "group", "units", "agree", "p", "tensors", "tensors of the other network"]
    classes = ["name", "name", "number", "number", "number", "long", "long"]
    return markup.section("Evidence by group", f"<p>{note}</p>{markup.table(header, rows, classes, 'tests')}")


def _fits_tile(value: str) -> bool:
    """Whether a value is short enough to be shown large in a small box. Names of files are not."""
    return len(value) <= 24 and all(len(word) <= 12 for word in value.replace("-", " ").split())


def _render_paths(paths: dict[str, LinearPath], averages: Mapping[str, Mapping[str, float]], ends: tuple[str, str]) -> str:
    """A picture for each metric that all paths have, and tables that also serve as the legend."""
    if not paths:
        return ""
    metrics = [metric for metric in next(iter(paths.values())).metrics if all(metric in p.metrics for p in paths.values())]
    count = len(paths) + len(averages)
    plots = []
    for metric in metrics:
        figure, axes = _make_figure()
        for number, path in enumerate(paths.values()):
            plot_path(path, axes, metric=metric, **line_style(number, count))
        for number, values in enumerate(averages.values(), start=len(paths)):
            if metric in values:
                axes.axhline(values[metric], linewidth=1.2, zorder=1, **line_style(number, count))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], [ends[0], "0.25", "0.5", "0.75", ends[1]])
        axes.set_ylabel("")  # matplotlib might read the user's word as mathematics; the caption has it
        plots.append(markup.figure(metric, themed_svg(figure, f"{metric} on the line between the models")))
    midpoints = [f"{metric} at the midpoint" for metric in metrics]
    header = ["", "path", *midpoints, "barrier", "AUC", f"loss at {ends[0]}", f"loss at {ends[1]}"]
    rows = []
    for number, (name, path) in enumerate(paths.items()):
        values = [*(_value_at_midpoint(path, metric) for metric in metrics), path.barrier, path.auc, path.losses[0]]
        rows.append([markup.swatch(number, count), markup.escape(name), *map(markup.number, [*values, path.losses[-1]])])
    table = markup.table(header, rows, ["swatch", "name", *["number"] * (len(header) - 2)])
    note = f"Models at equal steps on the straight line from {ends[0]} to {ends[1]}. The barrier is how far the loss rises, "
    note += f"at most, above the straight line between its values at {ends[0]} and {ends[1]}."
    table += _render_averages(averages, len(paths))
    return markup.section("Between the models", f"<p>{note}</p><div class='plots'>{''.join(plots)}</div>{table}")


def _render_averages(averages: Mapping[str, Mapping[str, float]], num_paths: int) -> str:
    """A table of the level lines, which are drawn after so many paths."""
    if not averages:
        return ""
    metrics = list(dict.fromkeys(metric for values in averages.values() for metric in values))
    rows = []
    for number, (name, values) in enumerate(averages.items(), start=num_paths):
        numbers = [markup.number(values[metric]) if metric in values else "" for metric in metrics]
        rows.append([markup.swatch(number, num_paths + len(averages)), markup.escape(name), *numbers])
    return markup.table(["", "average", *metrics], rows, ["swatch", "name", *["number"] * len(metrics)])


def _render_convergence(alignment: Alignment[Any] | None) -> str:
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
    note += "not moved. A pixel of a large matrix is a block of entries, and stands out more if it holds more units."
    parts = cards[:_OPEN_MATRICES], cards[_OPEN_MATRICES:]
    shown, folded = (f"<div class='matrices'>\n{''.join(part)}</div>" for part in parts)
    more = markup.fold(f"{len(parts[1])} more", folded) if parts[1] else ""
    heading = f"Permutation matrices of {markup.escape(title)}" if title else "Permutation matrices"
    return markup.section(heading, f"<p>{note}</p>{shown}{more}")


def _render_distances(title: str, distances: Mapping[str, LayerDistance]) -> str:
    if not distances:
        return ""
    highest = max((value for layer in distances.values() for value in layer if math.isfinite(value)), default=1.0) or 1.0
    rows = [
        [
            markup.dotted_name(layer),
            markup.number(before),
            markup.number(after),
            markup.bars(before / highest, after / highest),
        ]
        for layer, (before, after) in distances.items()
    ]
    note = (
        "The norm of the difference of the weights, divided by the norm of the target's weights. Of each two bars the upper "
    )
    note += "one is before the alignment, the lower one after it."
    table = markup.table(["layer", "before", "after", ""], rows, ["name", "number", "number", "bars"], "layers")
    heading = f"Distance by layer of {markup.escape(title)}" if title else "Distance by layer"
    return markup.section(heading, f"<p>{note}</p>{table}")


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


def _value_at_midpoint(path: LinearPath, metric: str) -> float:
    nearest = min(range(len(path.weights)), key=lambda i: abs(path.weights[i] - 0.5))
    return path.metrics[metric][nearest]


def _make_figure():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a report with curves needs matplotlib: pip install 'onebasin[plots]'") from error
    figure = Figure(figsize=_FIGURE_SIZE, layout="constrained")
    return figure, figure.subplots()
