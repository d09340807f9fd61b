"""``onebasin barrier``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from onebasin.checkpoints import CheckpointSet
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.line_evaluation import LineEvaluator, list_numbers
from onebasin.cli.run_record import record_run
from onebasin.landscape.paths import LinearPath
from onebasin.plots import plot_paths
from onebasin.symmetries import Permutation, Transform
from onebasin.symmetries.transform import check_fixed, load_element
from onebasin.tensors.distances import find_layer_distances
from onebasin.tensors.files import write_atomically
from onebasin.tensors.states import State

_BLOCKS = "▁▂▃▄▅▆▇█"


def barrier(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture.")],
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    points: Annotated[
        int, typer.Option("--points", min=2, metavar="N", help="Points on a line, with both ends.", rich_help_panel="Data")
    ] = 25,
    reset: Annotated[
        bool,
        typer.Option("--reset-batch-norm", help="Estimate the statistics of batch norms again at every point.",
                     rich_help_panel="Data"),
    ] = False,
    repair: options.Repair = None,
    permutation: Annotated[
        Path | None,
        typer.Option("--permutation", "-p", metavar="FILE", help="Also measure the line to B moved by this.",
                     rich_help_panel="Data"),
    ] = None,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    allow: options.Allow = False,
    device: options.RunDevice = "cpu",
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the curve: .svg, .png or .pdf.", rich_help_panel="Output"),
    ] = None,
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Measure the loss on the line between two checkpoints: the curve, its barrier, the area under it."""
    output = Output(json)
    if reset and repair is not None:
        raise typer.BadParameter(
            "repairing a point estimates its batch norms too: give one of the two", param_hint="--repair"
        )
    if data is None:
        raise typer.BadParameter("the loss is measured on data: give it", param_hint="--data")
    inputs.check_device(device)
    batches, criterion = inputs.read_data(data, "test"), inputs.read_loss(loss)
    _check_picture(picture)
    files = inputs.open_files([a, b])
    sources = [*files, *inputs.list_input_files([permutation, architecture], [architecture, data, loss])]
    outputs.check_files([picture, report], sources, force)
    outputs.check_drawing(picture, report)
    loaded = load_element(permutation) if permutation is not None else None
    models = inputs.read_models(output, files, architecture, input_shape, ignore, check, batches, allow)
    states: dict[str, State] = {"as they are": models.checkpoints[1]}
    if loaded is not None:
        _check_ends(loaded, [a, b], models)
        states["aligned"] = loaded.apply(models.checkpoints[1])
    summary: dict[str, Any] = {"command": "barrier", "a": a, "b": b, "data": data, "loss": loss}
    outputs.show_inputs(output, [a, b], models)
    if dry_run:
        replaced = outputs.list_replaced([picture, report])
        gone = f", and replace {', '.join(map(str, replaced))}" if replaced else ""
        output.show(f"would evaluate {points} points on each of {len(states)} lines{gone}; nothing was done")
        output.finish({**summary, "dry_run": True, "would_replace": replaced})
        return
    record = record_run(output, [a, b], files) if report else None
    with output.progress() as progress, inputs.explain_data_errors(batches):
        lines = LineEvaluator(models, criterion, batches, points, reset, repair, device)
        paths = lines.evaluate_lines(states, progress)
    output.show(_table(paths))
    if picture is not None:
        _draw(picture, paths)
    title, facts = f"The line from {a.name} to {b.name}", {"A": a, "B": b, "data": data, "loss": loss}
    permutation_of = {b.name: loaded.permutation if isinstance(loaded, Transform) else loaded} if loaded is not None else {}
    parts = {"paths": paths, "symmetry": models.symmetry, "permutations": permutation_of}
    if report and loaded is not None:
        parts["distances"] = {"": find_layer_distances(models.checkpoints[0], states["as they are"], states["aligned"])}
    outputs.save_report(report, title, facts, record, **parts)
    for path in filter(None, (picture, report)):
        output.show(f"wrote {path}")
    output.finish({**summary, "paths": list_numbers(paths), "picture": picture, "report": report, "notes": models.notes})


def _check_ends(element: Permutation | Transform, ends: Sequence[Path], models: CheckpointSet) -> None:
    """Refuse a line to a transformed model if one of its ends is not in canonical form."""
    if not isinstance(element, Transform) or not element.matrices:
        return
    for path, checkpoint in zip(ends, models.checkpoints, strict=True):
        try:
            check_fixed(element.symmetry, checkpoint)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _table(paths: dict[str, LinearPath]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in ("line", "curve of the loss", "ends", "barrier", "AUC"):
        table.add_column(name, justify="left" if name in ("line", "curve of the loss") else "right")
    losses = [loss for path in paths.values() for loss in path.losses if math.isfinite(loss)]
    for name, path in paths.items():
        curve = _sparkline(path.losses, min(losses, default=0.0), max(losses, default=0.0))
        ends = f"{path.losses[0]:.4g}, {path.losses[-1]:.4g}"
        table.add_row(name, curve, ends, f"{path.barrier:.4g}", f"{path.auc:.4g}")
    return table


def _sparkline(values: list[float], low: float, high: float) -> str:
    """The values as a row of blocks; a value that is not finite is a question mark.

    >>> _sparkline([0.0, 0.5, 1.0], 0.0, 1.0)
    '▁▄█'
    """
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[int((v - low) * scale)] if math.isfinite(v) else "?" for v in values)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"cannot draw {path}: it should end in .svg, .png or .pdf")


def _draw(path: Path, paths: dict[str, LinearPath]) -> None:
    figure: Any = plot_paths(paths).figure
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=150))
