"""``onebasin barrier``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from onebasin.cli import curves, options, tasks
from onebasin.cli.console import Output

if TYPE_CHECKING:
    from onebasin.landscape.paths import LinearPath as Curve

_BLOCKS = "▁▂▃▄▅▆▇█"


def barrier(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture.")],
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    points: Annotated[
        int, typer.Option("--points", min=2, metavar="N", help="On the line, both ends included.", rich_help_panel="Data")
    ] = 25,
    reset: Annotated[
        bool,
        typer.Option("--reset-batch-norm", help="Estimate the statistics of batch norms anew at every point.",
                     rich_help_panel="Data"),
    ] = False,
    permutation: Annotated[
        Path | None,
        typer.Option("--permutation", "-p", metavar="FILE", help="Also measure the line to B moved by this.",
                     rich_help_panel="Data"),
    ] = None,
    model: options.Model = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
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
    from onebasin.symmetries import Permutation

    output = Output(json)
    if data is None:
        raise typer.BadParameter("the loss is measured on data: give it", param_hint="--data")
    batches, criterion = tasks.read_data(data, "test"), tasks.read_loss(loss)
    _check_picture(picture)
    tasks.check_files([a, b], [picture, report], force)
    tasks.check_drawing(picture, report)
    move = Permutation.load(permutation) if permutation is not None else None
    opened = tasks.read_inputs(output, tasks.open_files([a, b]), model, input_shape, ignore, check, batches)
    states: dict[str, Any] = {"as they are": opened.checkpoints[1]}
    if move is not None:
        states["aligned"] = move.apply(opened.checkpoints[1])
    record: dict[str, Any] = {"command": "barrier", "a": a, "b": b, "data": data, "loss": loss}
    tasks.show_inputs(output, [a, b], opened)
    if dry_run:
        output.show(f"would evaluate {points} points on each of {len(states)} lines; nothing was done")
        output.finish({**record, "dry_run": True})
        return
    with output.progress() as track, tasks.blame_data(batches):
        found = curves.Lines(opened, criterion, batches, points, reset).measure(states, track)
    output.show(_table(found))
    if picture is not None:
        _draw(picture, found)
    title, facts = f"The line from {a.name} to {b.name}", {"A": a, "B": b, "data": data, "loss": loss}
    moved = {b.name: move} if move is not None else {}
    tasks.save_report(report, title, facts, paths=found, symmetry=opened.symmetry, permutations=moved)
    for path in filter(None, (picture, report)):
        output.show(f"wrote {path}")
    ended = {"picture": picture, "report": report, "notes": tasks.all_notes(opened)}
    output.finish({**record, "paths": curves.record(found), **ended})


def _table(curves: dict[str, Curve]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in ("line", "curve of the loss", "ends", "barrier", "AUC"):
        table.add_column(name, justify="left" if name in ("line", "curve of the loss") else "right")
    losses = [loss for curve in curves.values() for loss in curve.losses if loss - loss == 0]
    for name, curve in curves.items():
        ends = f"{curve.losses[0]:.4g}, {curve.losses[-1]:.4g}"
        table.add_row(
            name,
            _sparkline(curve.losses, min(losses, default=0.0), max(losses, default=0.0)),
            ends,
            f"{curve.barrier:.4g}",
            f"{curve.auc:.4g}",
        )
    return table


def _sparkline(values: list[float], low: float, high: float) -> str:
    """The values as a row of blocks; what is not finite is a question mark.

    >>> _sparkline([0.0, 0.5, 1.0], 0.0, 1.0)
    '▁▄█'
    """
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[int((v - low) * scale)] if v - v == 0 else "?" for v in values)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"cannot draw {path}: it should end in .svg, .png or .pdf")


def _draw(path: Path, curves: dict[str, Curve]) -> None:
    from onebasin.plots import plot_paths
    from onebasin.tensors.files import write_atomically

    figure: Any = plot_paths(curves).figure
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=150))
