"""``onebasin canonical``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import onebasin as ob
from onebasin.checkpoints import CheckpointSet, write_checkpoint
from onebasin.checkpoints.untied_heads import untie_checkpoint
from onebasin.checkpoints.written_types import find_type, widen_to
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.run_record import record_run
from onebasin.symmetries.describe import merge_layers


def canonical(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The file or folder whose gains to fold.")],
    out: options.Out,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    fold: Annotated[
        Path | None,
        typer.Option("--fold", metavar="FILE", help="Also write what was done, a transform by which apply takes a LoRA or a "
                     "task vector of CHECKPOINT to OUT."),
    ] = None,
    untie: options.Untie = False,
    balanced: Annotated[
        bool,
        typer.Option("--balanced", help="Also choose the scales of units, and the bases of heads, that make the weights "
                     "smallest.", rich_help_panel="Method"),
    ] = False,
    out_dtype: options.OutType = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Fold the gains of norms into the layers around them, so that changes of basis apply. The function stays the same.

    The mean over units that a layer norm subtracts anyway is subtracted from the tensors that write them. Transforms that
    align --symmetry all has written are for such a model. OUT has the layout and the types of CHECKPOINT.
    """
    output, dtype = Output(json), find_type(out_dtype)
    if fold is not None and balanced:
        raise typer.BadParameter("it writes positive scales, and --balanced does more than those", param_hint="--fold")
    files = inputs.open_files([checkpoint])
    card, sources = outputs.place_card(out, files[0]), inputs.list_input_files([architecture], [architecture])
    outputs.check_outputs(out, files[0], sources, [fold, card], force, dtype)
    models = inputs.read_models(output, files, architecture, input_shape, ignore, check=False)
    like = models.checkpoints[0]
    left_out = outputs.note_left_out(output, checkpoint, like)
    with output.status("folding"):
        form = _fold(models, dtype, untie, balanced)
        like = untie_checkpoint(like, form.untied, models.symmetry.ties)
    if fold is not None and form.fold is None:
        raise ValueError("a gain is negative: what was done is more than positive scales, and no transform says it")
    is_changed = bool(form.folded or form.centred or balanced)
    notes = outputs.note_rounding(out, like, is_changed, dtype) if is_changed or dtype is not None else []
    output.note(*notes)
    untied = {"untied": outputs.describe_untied(out, like)} if untie else {}
    facts = {str(checkpoint): outputs.describe_checkpoint(like), **_list_facts(form, untied, balanced)}
    summary = {
        "command": "canonical", "checkpoint": checkpoint, "out": out, "fold": fold, "folded": form.folded, "left": form.left,
        "centred": form.centred, "uncentred": form.uncentred, "untied": like.layout.untied,
        "configuration": form.configuration, "balanced": balanced,
        "notes": [*models.notes, *left_out, *notes],
    }  # fmt: skip
    if dry_run:
        output.show_facts(facts)
        outputs.finish_dry_run(output, summary, [out, fold])
        return
    record = record_run(output, [checkpoint], files) if card is not None else None
    made = None if record is None else outputs.describe_canonical(record, checkpoint, out)
    with output.progress() as progress:
        state = outputs.cast_like(like, form.state, dtype)
        write_checkpoint(out, state, like, force, progress, outputs.write_card(made, like), dtype=dtype)
    if fold is not None and form.fold is not None:
        form.fold.save(fold)
    output.show_facts({**facts, "wrote": out if fold is None else f"{out}, {fold}"})
    output.finish(summary)


def _fold(models: CheckpointSet, dtype: torch.dtype | None, untie: bool, balanced: bool) -> ob.CanonicalForm[Any]:
    """The canonical form; the model is loaded only to balance it."""
    (like,) = models.checkpoints
    if balanced:
        example = inputs.find_inputs(models, dtype)
        return ob.canonical(models.load_model(like, dtype), example, balanced=True, untie=untie)
    module = models.architecture.build_hollow()
    return ob.canonical(widen_to(like, dtype), inputs.find_inputs(models), untie=untie, module=module)


def _list_facts(form: ob.CanonicalForm[Any], untied: dict[str, Any], balanced: bool) -> dict[str, Any]:
    """For people: what was folded and centred, and what was left, with the reasons."""
    facts: dict[str, Any] = {"folded": merge_layers(form.folded) or "nothing: every gain is one, or cannot be folded"}
    if form.centred:
        facts["centred"] = merge_layers(form.centred)
    facts |= untied | ({"balanced": "scales of units and bases of heads"} if balanced else {})
    if form.left or form.uncentred:
        facts["left as they are"] = [f"{key}: {reason}" for key, reason in (*form.left.items(), *form.uncentred.items())]
    return facts
