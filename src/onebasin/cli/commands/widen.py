"""``onebasin widen``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import onebasin as ob
from onebasin.checkpoints import write_checkpoint
from onebasin.checkpoints.configurations import check_differences, compare_tokenizers, find_folder
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.run_record import record_run


def widen(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The file or folder of the narrow network.")],
    like: Annotated[
        Path, typer.Option("--like", metavar="WIDE", help="A checkpoint of a wider network. Its weights do not matter.")
    ],
    out: options.Out,
    architecture: options.Architecture = None,
    wide_architecture: Annotated[
        str | None,
        typer.Option(
            "--like-model",
            metavar="ARCHITECTURE",
            help="The architecture of WIDE, as --model gives that of CHECKPOINT.",
            rich_help_panel="Model",
        ),
    ] = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    allow: options.Allow = False,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Write a network as wide as WIDE that computes what CHECKPOINT does, so that it can be aligned and merged with WIDE.

    Both networks have the same architecture but for the number of units. The outputs are compared in float64 before anything
    is written. OUT has the configuration, the layout and the types of WIDE.
    """
    output = Output(json)
    files = inputs.open_files([checkpoint, like])
    named = inputs.list_input_files([architecture, wide_architecture], [architecture, wide_architecture])
    card = outputs.place_card(out, files[1])
    outputs.check_outputs(out, files[1], [files[0], *named], [card], force)
    folders = [folder for path in (checkpoint, like) if (folder := find_folder(path)) is not None]
    differences = compare_tokenizers(*folders) if len(folders) == 2 else []
    if not allow:
        check_differences(differences)
    narrow, wide = (
        inputs.read_models(output, [file], specification, input_shape, ignore, check=False)
        for file, specification in zip(files, (architecture, wide_architecture), strict=True)
    )
    given, shape = narrow.checkpoints[0], wide.checkpoints[0]
    left_out = outputs.note_companions(output, (like, shape))
    with output.status("widening, and comparing the outputs"):
        result = ob.widen(narrow.load_model(given), wide.load_model(shape), narrow.architecture.example_inputs)
    sizes = {key: [list(state.shapes[key].shape) for state in (given, shape)] for key in given.shapes}
    grown = {key: pair for key, pair in sizes.items() if pair[0] != pair[1]}
    notes = [*differences, *outputs.note_rounding(out, shape)]
    output.note(*notes)
    facts: dict[str, Any] = {
        str(checkpoint): outputs.describe_checkpoint(given),
        str(like): outputs.describe_checkpoint(shape),
        "grown": f"{len(grown)} of {len(sizes)} tensors",
    }
    summary = {
        "command": "widen", "checkpoint": checkpoint, "like": like, "out": out, "grown": grown,
        "notes": [*narrow.notes, *wide.notes, *left_out, *notes],
    }  # fmt: skip
    if dry_run:
        output.show_facts(facts)
        outputs.finish_dry_run(output, summary, [out])
        return
    made = None
    if card is not None:
        record = record_run(output, [checkpoint, like], files)
        text = f"{checkpoint.name} in the width of {like.name}, by onebasin: it computes what it did."
        made = record.make_card(out, text, [(checkpoint, "the model"), (like, "the width")], {})
    with output.progress() as progress:
        write_checkpoint(out, outputs.cast_like(shape, result), shape, force, progress, outputs.write_card(made))
    output.show_facts({**facts, "wrote": out})
    output.finish(summary)
