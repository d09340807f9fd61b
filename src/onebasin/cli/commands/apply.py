"""``onebasin apply``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onebasin.checkpoints.configurations import check_differences, find_differences_of_folders
from onebasin.checkpoints.moving import FileKind, move_file
from onebasin.checkpoints.written_types import find_type
from onebasin.cli import engine_choice, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.outputs import describe_element, finish_dry_run
from onebasin.cli.run_record import record_run
from onebasin.engines.work_meter import WRITING
from onebasin.symmetries.transform import load_element


def apply(
    context: typer.Context,
    permutation: Annotated[
        Path,
        typer.Argument(metavar="PERMUTATION", help="A file that align, Permutation.save or Transform.save has written."),
    ],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The file or folder to move.")],
    out: options.Out,
    kind: Annotated[
        FileKind,
        typer.Option(
            "--kind",
            help="What CHECKPOINT is: auto, model, task-vector (may lack tensors), lora or optimizer.",
            metavar="KIND",
        ),
    ] = "auto",
    inverse: Annotated[bool, typer.Option("--inverse", help="Undo the permutation or the transform.")] = False,
    fan_in_fan_out: Annotated[
        bool | None,
        typer.Option(
            "--fan-in-fan-out/--fan-out-fan-in",
            help="For a LoRA: base weights are (inputs, outputs). By default as adapter_config.json says.",
        ),
    ] = None,
    ignore: options.Ignore = None,
    out_dtype: options.OutType = None,
    engine: options.Engine = None,
    workers: options.Workers = None,
    address: options.Address = None,
    memory: options.Memory = None,
    resume: options.Resume = False,
    model_only: options.ModelOnly = False,
    allow: options.Allow = False,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Move a checkpoint, a LoRA, a task vector or an optimiser's state by a saved permutation or transform.

    A training checkpoint is moved whole: the model, its moving averages, and the optimiser's state.

    No architecture is needed: the file knows the names and shapes of the model's tensors. A transform with changes of basis
    is for models in canonical form (see onebasin canonical). An optimiser's state follows permutations and signs, and that
    of SGD rotations. If the file lies in the folder of a model, the configuration of CHECKPOINT must be that of the model.
    """
    output = Output(json)
    running = engine_choice.choose_engine(output, engine, workers, address, memory, resume=resume)
    loaded = load_element(permutation)
    differences = find_differences_of_folders(permutation.parent, checkpoint)
    if not allow:
        check_differences(differences)
    element, dtype = loaded.inverse() if inverse else loaded, find_type(out_dtype)
    with output.progress() as progress, running.meter.reporting(progress):
        moved = move_file(element, checkpoint, kind, fan_in_fan_out, ignore or (), model_only, dtype, running)
    source = moved.find_source()
    sources = [permutation, *([source] if source is not None else [checkpoint])]
    engine_choice.open_journal(running, out, sources, context.params, resume=resume)
    force = engine_choice.may_replace(running, force, out)
    card = None if source is None else outputs.place_card(out, source)
    moved.check(out, force, [permutation], [card.name] if card is not None else (), engine_choice.count_staged(running, out))
    notes = [*differences, *moved.notes]
    outputs.note_about(output, checkpoint, notes)
    summary = {"command": "apply", "permutation": permutation, "checkpoint": checkpoint, "kind": moved.kind, "out": out}
    facts = {type(loaded).__name__.lower(): describe_element(loaded), str(checkpoint): f"{moved.kind}, {moved.describe()}"}
    if dry_run:
        output.show_facts(facts)
        finish_dry_run(output, {**summary, "notes": notes}, [out])
        return
    made = None
    engine_choice.begin_journal(output, running)
    with output.progress() as progress, running.meter.reporting(progress):
        if source is not None and card is not None:
            running.meter.expect(WRITING, source.num_bytes)
            record = record_run(output, [checkpoint, permutation], [source, permutation], engine=running)
            what = f"{'the inverse of ' if inverse else ''}a {type(loaded).__name__.lower()}"
            text = f"{checkpoint.name}, moved by {what} by onebasin."
            made = record.make_card(out, text, [(checkpoint, f"the {moved.kind}"), (permutation, "what moved it")], {})
        moved.write(out, force, progress, outputs.write_card(made), running)
    engine_choice.finish_journal(running)
    output.show_facts({**facts, **engine_choice.list_engine_facts(running), "wrote": out})
    output.finish({**summary, "notes": notes, **engine_choice.list_engine_values(running)})
