"""``onebasin align``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onebasin.cli import curves, options, tasks
from onebasin.cli.console import Output


def align(
    a: Annotated[Path, typer.Argument(metavar="A", help="The checkpoint to align to.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The checkpoint to move.")],
    out: options.Out,
    permutation: Annotated[
        Path | None,
        typer.Option("--permutation", "-p", metavar="FILE", help="Where to write the permutation. Beside OUT if not given.",
                     rich_help_panel="Output"),
    ] = None,
    model: options.Model = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    method: options.Method = "weight-matching",
    objective: options.Objective = "weight-distance",
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    init: options.Init = None,
    groups: options.Groups = None,
    seed: options.Seed = 0,
    restarts: options.Restarts = 0,
    settings: options.Settings = None,
    device: options.Device = "cpu",
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Move the units of checkpoint B so that it comes as close to A as it can. Its function stays the same.

    Writes B, moved, in the layout and types of B, and the permutation.
    """
    output = Output(json)
    choices = tasks.read_choices(method, objective, data, loss, init, groups, seed, restarts, settings, device)
    files = tasks.open_files([a, b])
    file = permutation or tasks.permutation_beside(out, files[1].layout.is_folder)
    tasks.check_outputs(out, files[1], [a, b], [file, report], force)
    tasks.check_drawing(report)
    opened = tasks.read_inputs(output, files, model, input_shape, ignore, check, choices.data)
    opened.symmetry.restrict(groups)
    like = opened.checkpoints[1]
    record: dict[str, Any] = {"command": "align", "a": a, "b": b, "out": out, "permutation": file, "method": method}
    tasks.show_inputs(output, [a, b], opened)
    if dry_run:
        output.show(f"would write {tasks.list_paths(out, file, report)}; nothing was written")
        output.finish({**record, "dry_run": True, "symmetry": opened.symmetry.summary()})
        return
    import onebasin as ob

    with output.progress() as track, tasks.blame_data(choices.data):
        lines = curves.lines_for_report(report, opened, data, loss)
        paths = lines.measure({"as they are": like}, track) if lines else {}
        target, source = choices.models(opened)
        result = ob.align(source, to=target, symmetry=opened.symmetry, **choices.arguments(track))
        moved = result.permutation.apply(like)
        tasks.write_moved(out, moved, like, force, track, result.permutation, file)
        paths |= lines.measure({"aligned": moved}, track) if lines else {}
    title, facts = f"{b.name} aligned to {a.name}", {"A": a, "B": b, "written": out}
    tasks.save_report(report, title, facts, symmetry=opened.symmetry, alignment=result, paths=paths)
    output.facts({
        "cost": f"{result.start_cost:.6g} -> {result.cost:.6g} ({objective})",
        "moved": tasks.describe_moves(result.permutation),
        "ended": ("converged" if result.converged else "stopped at its limit") + f" after {result.seconds:.1f} s",
        "wrote": "\n".join(str(path) for path in (out, file, report) if path is not None),
    })  # fmt: skip
    output.finish({
        **record, "report": report, "cost": result.cost, "start_cost": result.start_cost, "converged": result.converged,
        "seconds": result.seconds, "history": result.history, "symmetry": opened.symmetry.summary(),
        "notes": tasks.all_notes(opened), "paths": curves.record(paths),
    })  # fmt: skip
