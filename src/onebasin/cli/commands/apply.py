"""``onebasin apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onebasin.checkpoints.moving import FileKind, move_file
from onebasin.cli import options
from onebasin.cli.console import Output
from onebasin.cli.outputs import finish_dry_run
from onebasin.symmetries import Permutation


def apply(
    permutation: Annotated[
        Path, typer.Argument(metavar="PERMUTATION", help="A file that align or Permutation.save has written.")
    ],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The file or folder to permute.")],
    out: options.Out,
    kind: Annotated[
        FileKind,
        typer.Option(
            "--kind",
            help="What CHECKPOINT is: auto, model, task-vector (may lack tensors), lora or optimizer.",
            metavar="KIND",
        ),
    ] = "auto",
    inverse: Annotated[bool, typer.Option("--inverse", help="Undo the permutation.")] = False,
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--fan-out-fan-in",
            help="For a LoRA: base weights are (inputs, outputs). By default as adapter_config.json says.",
        ),
    ] = None,
    ignore: options.Ignore = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Permute a checkpoint, a LoRA, a task vector or an optimiser's state by a saved permutation.

    No architecture is needed: the permutation file knows the names and shapes of the model's tensors.
    """
    output = Output(json)
    loaded = Permutation.load(permutation)
    moved = move_file(loaded.inverse() if inverse else loaded, checkpoint, kind, fan_in_fan_out, ignore or ())
    moved.check(out, force, [permutation])
    for note in moved.notes:
        output.note(f"{checkpoint}: {note}")
    summary = {"command": "apply", "permutation": permutation, "checkpoint": checkpoint, "kind": moved.kind, "out": out}
    facts = {"permutation": repr(loaded), str(checkpoint): f"{moved.kind}, {moved.describe()}"}
    if dry_run:
        output.show_facts(facts)
        finish_dry_run(output, {**summary, "notes": moved.notes}, [out])
        return
    with output.progress() as progress:
        moved.write(out, force, progress)
    output.show_facts({**facts, "wrote": out})
    output.finish({**summary, "notes": moved.notes})
