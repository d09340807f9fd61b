"""``onebasin port``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import onebasin as ob
from onebasin.checkpoints import write_checkpoint
from onebasin.checkpoints.adapter_porting import find_folds
from onebasin.checkpoints.adapters import is_adapter
from onebasin.checkpoints.moving import move_lora
from onebasin.checkpoints.probes import read_num_positions
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.run_record import record_run
from onebasin.landscape.evaluation import mean_loss
from onebasin.matching.recommendation import AUTO
from onebasin.tensors.progress import Progress

WRITTEN = "written"
"""The word for texts that the fine-tune writes."""
_NUM_TEXTS, _NUM_TOKENS, _BATCH = 640, 128, 32


def port(
    fine_tuned: Annotated[
        Path, typer.Argument(metavar="FINE_TUNED", help="A checkpoint trained further from OLD, or a LoRA of OLD.")
    ],
    base: Annotated[Path, typer.Option("--base", metavar="OLD", help="The checkpoint that FINE_TUNED started from.")],
    to: Annotated[Path, typer.Option("--to", metavar="NEW", help="The checkpoint that the change is added to.")],
    out: options.Out,
    scale: Annotated[
        list[float] | None,
        typer.Option(
            "--scale",
            metavar="NUMBER",
            help="What the change is multiplied by, 1 if not given. Repeat to choose the best on --data.",
        ),
    ] = None,
    imitate: Annotated[
        str | None,
        typer.Option(
            "--imitate",
            metavar="INPUTS",
            help="Learn the scales and bases of the alignment further, so that OUT does what FINE_TUNED does: on the text "
            "that it writes itself, if it is a language model and this is the word written, or on the inputs of "
            "package.module:function. With --symmetry positive or all.",
        ),
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
) -> None:
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
    is_lora = is_adapter(files[2])
    if is_lora and scales != [1.0]:
        raise ValueError(f"{fine_tuned} is a LoRA: its scale is set where it is loaded")
    if is_lora and imitate is not None:
        raise ValueError(f"{fine_tuned} is a LoRA: to imitate it, merge it into its base and port that")
    sources = [*files, *inputs.list_input_files([architecture], [architecture, data, loss, imitate])]
    like = files[2] if is_lora else files[0]
    card = outputs.place_card(out, like)
    outputs.check_outputs(out, like, [file for file in sources if file is not like], [card], force)
    known = files[:2] if is_lora else files
    models = inputs.read_models(output, known, architecture, input_shape, ignore, check, alignment.data, allow)
    if is_lora:  # refuse one that does not fit before the bases are aligned
        move_lora([models.symmetry.identity()], fine_tuned)
    left_out = outputs.note_companions(output, (fine_tuned if is_lora else to, like))
    outputs.show_inputs(output, [to, base, fine_tuned][: len(known)], models)
    summary: dict[str, Any] = {
        "command": "port", "fine_tuned": fine_tuned, "base": base, "to": to, "out": out, "kinds": kinds,
        "kind": "lora" if is_lora else "model", "imitate": imitate,
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, {**summary, "notes": [*models.notes, *left_out]}, [out])
        return
    made = None
    if card is not None:
        record = record_run(output, [fine_tuned, base, to], [files[2], files[1], files[0]], seed)
        text = f"What {fine_tuned.name} has more than {base.name}, carried over to {to.name} by onebasin."
        roles = [(fine_tuned, "the fine-tune"), (base, "its base"), (to, "the new base")]
        made = record.make_card(
            out,
            text,
            roles,
            {"scale": ", ".join(f"{each:g}" for each in scales), **({"imitate": imitate} if imitate else {})},
        )
    beside = outputs.write_card(made)
    with output.progress() as progress, inputs.explain_data_errors(alignment.data if imitated is None else imitated):
        run = kinds != "permutation" or len(scales) > 1
        (new, old, *further), arguments = alignment.prepare(models, kinds, run)
        arguments["progress"] = progress
        if is_lora:
            folds = find_folds(old, new, arguments["example_inputs"]) if kinds == "all" else None
            found, chosen, losses = ob.align(old, to=new, **arguments), 1.0, {}
            element = found.permutation if kinds == "permutation" else found.transform
            carriers = [element] if folds is None else [folds[0], element, folds[1]]
            move_lora(carriers, fine_tuned).write(out, force, progress, beside)
        else:
            evaluate = mean_loss(inputs.read_loss(loss), inputs.read_data(data, "test")) if len(scales) > 1 else None
            if imitate == WRITTEN:
                imitated = _write_text(further[0], seed, progress)
            imitation = None if imitated is None else ob.Imitation(imitated)
            ported = ob.port(further[0], base=old, to=new, scale=scales, evaluate=evaluate, imitation=imitation, **arguments)
            found, chosen, losses = ported.alignment, ported.scale, ported.losses
            fixed = models.checkpoints[0]
            write_checkpoint(out, outputs.cast_like(fixed, ported.model), fixed, force, progress, beside)
    notes = [*found.notes, *(() if is_lora else outputs.note_rounding(out, models.checkpoints[0]))]
    for note in notes:
        output.note(note)
    output.show_facts({
        "aligned by": found.method,
        "distance": f"{found.start_cost:.6g} -> {found.cost:.6g} ({outputs.describe_cost(objective)})",
        "scale": ", ".join(f"{each:g}: loss {value:.4g}" for each, value in losses.items()) or f"{chosen:g}",
        **({"chosen": f"{chosen:g}"} if losses else {}),
        "wrote": out,
    })  # fmt: skip
    output.finish({
        **summary, "method": found.method, "cost": found.cost, "start_cost": found.start_cost, "scale": chosen,
        "losses": {str(each): value for each, value in losses.items()},
        "notes": [*models.notes, *left_out, *notes],
    })  # fmt: skip


def _write_text(model: nn.Module, seed: int, progress: Progress) -> list[Any]:
    length = min(_NUM_TOKENS, read_num_positions(model) or _NUM_TOKENS)
    return ob.synthetic_text([model], length, _NUM_TEXTS // _BATCH, _BATCH, seed=seed, progress=progress)
