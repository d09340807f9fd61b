"""``onebasin apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from onebasin.cli import options
from onebasin.cli.console import Output

Kind = Literal["auto", "model", "task-vector", "lora", "optimizer"]


def apply(
    permutation: Annotated[Path, typer.Argument(metavar="PERMUTATION", help="What align wrote, or Permutation.save.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="What to move.")],
    out: options.Out,
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind",
            help="What it is: auto, model, task-vector (may lack tensors), lora or optimizer.",
            metavar="KIND",
        ),
    ] = "auto",
    inverse: Annotated[bool, typer.Option("--inverse", help="Undo the permutation.")] = False,
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--fan-out-fan-in",
            help="Of a LoRA: base weights are (inputs, outputs). Read from adapter_config.json if that is there.",
        ),
    ] = None,
    ignore: options.Ignore = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Move a checkpoint, or what hangs on a model, by a saved permutation. No architecture is needed.

    A LoRA's A takes the base weight's input axis, its B the output axis. An optimiser's moments follow their parameters.
    """
    from onebasin.checkpoints.applying import move_file
    from onebasin.symmetries import Permutation

    output = Output(json)
    chosen = Permutation.load(permutation)
    moved = move_file(chosen.inverse() if inverse else chosen, checkpoint, kind, fan_in_fan_out, ignore or ())
    moved.check(out, force, [permutation])
    for note in moved.notes:
        output.note(f"{checkpoint}: {note}")
    record = {"command": "apply", "permutation": permutation, "checkpoint": checkpoint, "kind": moved.kind, "out": out}
    facts = {"permutation": repr(chosen), str(checkpoint): f"{moved.kind}, {moved.description}"}
    if dry_run:
        output.facts(facts)
        output.show(f"would write {out}; nothing was written")
        output.finish({**record, "dry_run": True, "notes": moved.notes})
        return
    with output.progress() as track:
        moved.write(out, force, track)
    output.facts({**facts, "wrote": out})
    output.finish({**record, "notes": moved.notes})
