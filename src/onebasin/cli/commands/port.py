"""``onebasin port``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import onebasin as ob
from onebasin.checkpoints import Checkpoint, CheckpointSet, write_checkpoint
from onebasin.checkpoints.adapter_porting import find_folds
from onebasin.checkpoints.adapters import is_adapter
from onebasin.checkpoints.moving import Beside, move_lora
from onebasin.checkpoints.probes import read_num_positions
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.run_record import record_run
from onebasin.landscape.evaluation import mean_loss
from onebasin.matching.recommendation import AUTO
from onebasin.reporting.model_card import ModelCard
from onebasin.tensors.progress import Progress
from onebasin.tracing import Kinds

WRITTEN = "written"
"""The word for texts that the fine-tune writes."""
_NUM_TEXTS, _NUM_TOKENS, _BATCH = 640, 128, 32


@dataclass(frozen=True)
class _Request:
    """What to carry over, how, and where to write it: options of `port` as they were read.

    Attributes:
        is_lora: FINE_TUNED is a LoRA.
        imitated: the inputs on which it is imitated, unless it writes them.
        alignment: how to align.
    """

    fine_tuned: Path
    base: Path
    to: Path
    out: Path
    is_lora: bool
    kinds: Kinds
    scales: list[float]
    imitate: str | None
    imitated: Any
    alignment: inputs.AlignmentOptions
    objective: str | None
    data: str | None
    loss: str
    seed: int
    force: bool


def port(
    fine_tuned: Annotated[
        Path, typer.Argument(metavar="FINE_TUNED", help="A checkpoint trained further from OLD, or a LoRA of OLD.")
    ],
    base: Annotated[Path, typer.Option("--base", metavar="OLD", help="The checkpoint that FINE_TUNED started from.")],
    to: Annotated[Path, typer.Option("--to", metavar="NEW", help="The checkpoint that the change is added to.")],
    out: options.Out,
    scale: Annotated[
        list[float] | None,
        typer.Option("--scale", metavar="NUMBER", help="What the change is multiplied by, 1 if not given. Repeat to choose "
                     "the best on --data."),
    ] = None,
    imitate: Annotated[
        str | None,
        typer.Option("--imitate", metavar="INPUTS", help="Learn the scales and bases of the alignment further, so that OUT "
                     "does what FINE_TUNED does: on the text that it writes itself, if it is a language model and this is "
                     "the word written, or on the inputs of package.module:function. With --symmetry positive or all."),
    ] = None,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    allow: options.Allow = False,
    kinds: options.Kinds = "permutation",
    method: options.Method = AUTO,
    objective: options.Objective = None,
    low: options.Low = None,
    high: options.High = None,
    repaired: options.Repaired = None,
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    seed: options.Seed = 0,
    settings: options.Settings = None,
    scaling: options.Scaling = None,
    device: options.Device = "cpu",
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Carry a fine-tune of OLD over to NEW, a network of the same architecture that was trained apart.

    OLD is aligned to NEW, and what FINE_TUNED has more than OLD is moved in the same way and added to NEW. A LoRA comes back
    as a LoRA of NEW of the same rank. OUT has the layout and the types of NEW, or of the LoRA. With --symmetry all, a model
    OUT is in canonical form, see onebasin canonical, and a LoRA is for NEW as it is.
    """
    output, scales = Output(json), scale or [1.0]
    if len(scales) > 1 and data is None:
        raise typer.BadParameter("the best of several is chosen on --data", param_hint="--scale")
    if imitate is not None and kinds == "permutation":
        raise typer.BadParameter("scales and bases are learned: give --symmetry positive or all", param_hint="--imitate")
    learning = inputs.read_scaling(scaling, kinds, objective)
    if learning is not None and learning.both:
        raise typer.BadParameter("both=true would change NEW too", param_hint="--scaling")
    imitated = None if imitate == WRITTEN else inputs.read_data(imitate, "train", f"--imitate (or {WRITTEN})")
    alignment = inputs.read_alignment_options(
        method=method, objective=objective, data=data, loss=loss, settings=settings, device=device, seed=seed,
        low=low, high=high, repaired=repaired, scaling=learning,
    )  # fmt: skip
    files = inputs.open_files([to, base, fine_tuned])
    request = _Request(
        fine_tuned=fine_tuned, base=base, to=to, out=out, is_lora=is_adapter(files[2]), kinds=kinds, scales=scales,
        imitate=imitate, imitated=imitated, alignment=alignment, objective=objective, data=data, loss=loss, seed=seed,
        force=force,
    )  # fmt: skip
    sources = [*files, *inputs.list_input_files([architecture], [architecture, data, loss, imitate])]
    if request.is_lora and scales != [1.0]:
        raise ValueError(f"{fine_tuned} is a LoRA: its scale is set where it is loaded")
    if request.is_lora and imitate is not None:
        raise ValueError(f"{fine_tuned} is a LoRA: to imitate it, merge it into its base and port that")
    path, like = (fine_tuned, files[2]) if request.is_lora else (to, files[0])
    others = [file for file in sources if file is not like]
    outputs.check_outputs(out, like, others, [outputs.place_card(out, like)], force)
    known, paths = (files[:2], [to, base]) if request.is_lora else (files, [to, base, fine_tuned])
    models = inputs.read_models(output, known, architecture, input_shape, ignore, check, alignment.data, allow)
    if request.is_lora:  # refuse one that does not fit before the bases are aligned
        move_lora([models.symmetry.identity()], fine_tuned)
    left_out = outputs.note_companions(output, (path, like))
    outputs.show_inputs(output, paths, models)
    summary: dict[str, Any] = {
        "command": "port", "fine_tuned": fine_tuned, "base": base, "to": to, "out": out, "kinds": kinds,
        "kind": "lora" if request.is_lora else "model", "imitate": imitate,
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, {**summary, "notes": [*models.notes, *left_out]}, [out])
        return
    _carry_out(request, output, files, models, left_out, summary)


def _carry_out(
    request: _Request, output: Output, files: Sequence[Checkpoint], models: CheckpointSet, left_out: Sequence[str],
    summary: dict[str, Any],
) -> None:  # fmt: skip
    """Align the bases, carry the fine-tune over, write and report; `summary` is the first part of the result."""
    beside = outputs.write_card(_describe(request, output, files))
    data = request.alignment.data if request.imitated is None else request.imitated
    with output.progress() as progress, inputs.explain_data_errors(data):
        run = request.kinds != "permutation" or len(request.scales) > 1
        given, arguments = request.alignment.prepare(models, request.kinds, run)
        arguments["progress"] = progress
        if request.is_lora:
            found, scale, losses = _carry_lora(request, given, arguments, beside), 1.0, {}
        else:
            ported = _carry_model(request, given, arguments, models.checkpoints[0], beside)
            found, scale, losses = ported.alignment, ported.scale, ported.losses
    notes = [*found.notes, *(() if request.is_lora else outputs.note_rounding(request.out, models.checkpoints[0]))]
    output.note(*notes)
    output.show_facts({
        "aligned by": found.method,
        "distance": f"{found.start_cost:.6g} -> {found.cost:.6g} ({outputs.describe_cost(request.objective)})",
        "scale": ", ".join(f"{each:g}: loss {value:.4g}" for each, value in losses.items()) or f"{scale:g}",
        **({"chosen": f"{scale:g}"} if losses else {}),
        "wrote": request.out,
    })  # fmt: skip
    output.finish({
        **summary, "method": found.method, "cost": found.cost, "start_cost": found.start_cost, "scale": scale,
        "losses": {str(each): value for each, value in losses.items()},
        "notes": [*models.notes, *left_out, *notes],
    })  # fmt: skip


def _describe(request: _Request, output: Output, files: Sequence[Checkpoint]) -> ModelCard | None:
    """The card of a folder that is written, for which the inputs are hashed."""
    to, base, fine_tuned = files
    if not (fine_tuned if request.is_lora else to).layout.is_folder:
        return None
    roles = [(request.fine_tuned, "the fine-tune"), (request.base, "its base"), (request.to, "the new base")]
    record = record_run(output, [path for path, _ in roles], [fine_tuned, base, to], request.seed)
    tuned, old, new = (path.name for path, _ in roles)
    text = f"What {tuned} has more than {old}, carried over to {new} by onebasin."
    facts = {"scale": ", ".join(f"{each:g}" for each in request.scales)}
    return record.make_card(request.out, text, roles, facts | ({"imitate": request.imitate} if request.imitate else {}))


def _carry_lora(request: _Request, given: list[Any], arguments: dict[str, Any], beside: Beside) -> ob.Alignment[Any]:
    """Move a LoRA by the alignment of the bases, and write it."""
    new, old = given
    folds = find_folds(old, new, arguments["example_inputs"]) if request.kinds == "all" else None
    found = ob.align(old, to=new, **arguments)
    element = found.permutation if request.kinds == "permutation" else found.transform
    carriers = [element] if folds is None else [folds[0], element, folds[1]]
    move_lora(carriers, request.fine_tuned).write(request.out, request.force, arguments["progress"], beside)
    return found


def _carry_model(
    request: _Request, given: list[Any], arguments: dict[str, Any], like: Checkpoint, beside: Beside
) -> ob.Ported[Any]:
    """Add to the new base what the fine-tune has more than the old one, and write it like the checkpoint of that base."""
    (new, old, further), progress = given, arguments["progress"]
    evaluate = None
    if len(request.scales) > 1:
        evaluate = mean_loss(inputs.read_loss(request.loss), inputs.read_data(request.data, "test"))
    imitated = _write_text(further, request.seed, progress) if request.imitate == WRITTEN else request.imitated
    ported = ob.port(
        further, base=old, to=new, scale=request.scales, evaluate=evaluate,
        imitation=None if imitated is None else ob.Imitation(imitated), **arguments,
    )  # fmt: skip
    write_checkpoint(request.out, outputs.cast_like(like, ported.model), like, request.force, progress, beside)
    return ported


def _write_text(model: nn.Module, seed: int, progress: Progress) -> list[Any]:
    length = min(_NUM_TOKENS, read_num_positions(model) or _NUM_TOKENS)
    return ob.synthetic_text([model], length, _NUM_TEXTS // _BATCH, _BATCH, seed=seed, progress=progress)
