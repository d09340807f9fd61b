"""``onebasin align``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import onebasin as ob
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.line_evaluation import LineEvaluator, list_numbers
from onebasin.matching.recommendation import AUTO


def align(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The checkpoint to align to.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint to move.")],
    out: options.Out,
    permutation: Annotated[
        Path | None,
        typer.Option("--permutation", "-p", metavar="FILE", help="Where to write the permutation. By default beside OUT.",
                     rich_help_panel="Output"),
    ] = None,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    method: options.Method = AUTO,
    objective: options.Objective = None,
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    init: options.Init = None,
    groups: options.Groups = None,
    seed: options.Seed = 0,
    restarts: options.Restarts = 0,
    polish: options.Polish = None,
    detect_copy: options.DetectCopy = True,
    settings: options.Settings = None,
    device: options.Device = "cpu",
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Permute the hidden units of MODEL so that it comes as close to TARGET as it can. Its function stays the same.

    Writes the permuted MODEL, in its own layout and types, and the permutation.
    """
    output = Output(json)
    alignment = inputs.read_alignment_options(
        method=method, objective=objective, data=data, loss=loss, settings=settings, device=device, init=init,
        groups=groups or None, seed=seed, restarts=restarts, polish=polish, detect_copy=detect_copy,
    )  # fmt: skip
    files = inputs.open_files([target, model])
    file = permutation or outputs.place_permutation(out, files[1].layout.is_folder)
    outputs.check_outputs(out, files[1], [target, model], [file, report], force)
    outputs.check_drawing(report)
    models = inputs.read_models(output, files, architecture, input_shape, ignore, check, alignment.data)
    models.symmetry.restrict(groups or None)
    outputs.show_inputs(output, [target, model], models)
    summary: dict[str, Any] = {
        "command": "align", "target": target, "model": model, "out": out, "permutation": file, "method": method,
        "symmetry": models.symmetry.summary(),
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, summary, [out, file, report])
        return
    moved = models.checkpoints[1]
    with output.progress() as progress, inputs.explain_data_errors(alignment.data):
        lines = LineEvaluator(models, inputs.read_loss(loss), inputs.read_data(data if report else None, "test"))
        paths = lines.evaluate_lines({"as they are": moved}, progress)
        first, second = alignment.load(models)
        result = ob.align(second, to=first, symmetry=models.symmetry, progress=progress, **alignment.arguments)
        state = result.permutation.apply(moved)
        outputs.write_permuted(out, state, moved, force, progress, result.permutation, file)
        paths |= lines.evaluate_lines({"aligned": state}, progress)
    for note in result.notes:
        output.note(note)
    title, facts = f"{model.name} aligned to {target.name}", {"target (A)": target, "model (B)": model, "written": out}
    outputs.save_report(report, title, facts, symmetry=models.symmetry, alignment=result, paths=paths)
    output.show_facts({
        "method": result.method,
        "cost": f"{result.start_cost:.6g} -> {result.cost:.6g} ({objective or 'weight-distance'})",
        "moved": outputs.describe_permutation(result.permutation),
        "ended": ("converged" if result.converged else "stopped at its limit") + f" after {result.seconds:.1f} s",
        "wrote": "\n".join(str(path) for path in (out, file, report) if path is not None),
    })  # fmt: skip
    output.finish({
        **summary, "report": report, "method": result.method, "cost": result.cost, "start_cost": result.start_cost,
        "converged": result.converged, "seconds": result.seconds, "history": result.history,
        "notes": [*models.notes, *result.notes], "paths": list_numbers(paths),
    })  # fmt: skip
