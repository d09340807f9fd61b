"""``onebasin align``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import onebasin as ob
from onebasin.checkpoints import check_left, move_training_entries, note_left_entries, write_checkpoint
from onebasin.checkpoints.untied_heads import untie_checkpoint
from onebasin.checkpoints.written_types import find_type
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.engine_choice import (
    begin_journal,
    check_needs,
    choose_engine,
    count_staged,
    finish_journal,
    list_engine_facts,
    list_engine_values,
    may_replace,
    open_journal,
    take_timeline,
)
from onebasin.cli.line_evaluation import LineEvaluator, list_numbers
from onebasin.cli.run_record import RunRecord, record_run
from onebasin.engines.work_meter import WRITING
from onebasin.matching.recommendation import AUTO
from onebasin.matching.untying import list_untied
from onebasin.reporting.model_card import ModelCard
from onebasin.tensors.distances import find_layer_distances
from onebasin.tensors.states import Model, read_state

_NOT_TARGET = (
    "{out} is aligned to the canonical form of {target}, in which the gains of norms are folded, and is to be compared and "
    "mixed with that: --target-out writes it, and so does onebasin canonical {target}{untie}"
)


def align(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The checkpoint to align to.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint to move.")],
    out: options.Out,
    permutation: Annotated[
        Path | None,
        typer.Option("--permutation", "-p", metavar="FILE", help="Where to write the permutation, or the transform if "
                     "--symmetry asks for more. By default beside OUT.", rich_help_panel="Output"),
    ] = None,
    target_out: Annotated[
        Path | None,
        typer.Option("--target-out", metavar="OUT", help="Where to write what the aligned MODEL is aligned to: with "
                     "--symmetry all, TARGET in canonical form; with --scaling both=true, TARGET with scales of its own.",
                     rich_help_panel="Output"),
    ] = None,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    allow: options.Allow = False,
    kinds: options.Kinds = "permutation",
    untie: options.Untie = False,
    method: options.Method = AUTO,
    objective: options.Objective = None,
    low: options.Low = None,
    high: options.High = None,
    repaired: options.Repaired = None,
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    repair: options.LineRepair = None,
    init: options.Init = None,
    groups: options.Groups = None,
    seed: options.Seed = 0,
    restarts: options.Restarts = 0,
    polish: options.Polish = None,
    detect_copy: options.DetectCopy = True,
    settings: options.Settings = None,
    scaling: options.Scaling = None,
    device: options.Device = "cpu",
    out_dtype: options.OutType = None,
    engine: options.Engine = None,
    workers: options.Workers = None,
    address: options.Address = None,
    memory: options.Memory = None,
    resume: options.Resume = False,
    model_only: options.ModelOnly = False,
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Permute the hidden units of MODEL so that it comes as close to TARGET as it can. Its function stays the same.

    Writes the permuted MODEL, in its own layout and types, and the permutation; of a training checkpoint the moving averages
    and the optimiser's state, too. With --symmetry units are scaled, or their
    basis is changed, as well; for changes of basis both models are taken in canonical form, see onebasin canonical.
    """
    output, dtype = Output(json), find_type(out_dtype)
    learning = inputs.read_scaling(scaling, kinds, objective)
    is_moved = learning is not None and learning.both
    if is_moved and target_out is None:
        raise typer.BadParameter("both=true changes TARGET too: --target-out writes it", param_hint="--scaling")
    if target_out is not None and kinds != "all" and not is_moved:
        raise typer.BadParameter(f"TARGET stays as it is with --symmetry {kinds}", param_hint="--target-out")
    if repair is not None and (report is None or data is None):
        raise typer.BadParameter("lines are in the report and are measured on data: give both", param_hint="--repair")
    inputs.check_untie(untie, kinds)
    alignment = inputs.read_alignment_options(
        method=method, objective=objective, data=data, loss=loss, settings=settings, device=device,
        low=low, high=high, repaired=repaired, init=[init] if init is not None else [],
        groups=groups or None, seed=seed, restarts=restarts, polish=polish, detect_copy=detect_copy, scaling=learning,
    )  # fmt: skip
    running = choose_engine(output, engine, workers, address, memory, device, resume)
    files = inputs.open_files([target, model])
    what = "permutation" if kinds == "permutation" else "transform"
    file = permutation or outputs.place_element(out, files[1].layout.is_folder, what)
    sources = [*files, *inputs.list_input_files([architecture, init], [architecture, data, loss])]
    open_journal(running, out, sources, context.params, device, resume)
    force, staged = may_replace(running, force, out), count_staged(running, out)
    card = outputs.place_card(out, files[1])
    outputs.check_outputs(out, files[1], sources, [file, report, card], force, dtype, staged)
    target_card = None if target_out is None else outputs.place_card(target_out, files[0])
    if target_out is not None:
        outputs.check_further_output(target_out, files[0], sources, [out, file, report], force)
    outputs.check_drawing(report)
    models = inputs.read_models(
        output, files, architecture, input_shape, ignore, check, alignment.data, allow, running,
        lambda opened: check_needs(running, opened, out, opened.checkpoints[1], method, device, dtype),
    )  # fmt: skip
    models.symmetry.restrict(groups or None)
    fixed, moved = models.checkpoints
    check_left(moved, models.symmetry)
    entries = outputs.check_training_entries(out, moved, models.symmetry, kinds, ignore or (), model_only)
    written = [(model, files[1]), *([(target, files[0])] if target_out is not None else [])]
    left_out = [*outputs.note_companions(output, *written), *outputs.note_about(output, model, entries.notes)]
    left_out += outputs.note_about(output, target, note_left_entries(fixed) if target_out is not None else ())
    outputs.show_inputs(output, [target, model], models)
    summary: dict[str, Any] = {
        "command": "align", "target": target, "model": model, "out": out, "permutation": file, "method": method,
        "kinds": kinds, "target_out": target_out, "symmetry": models.symmetry.summary(),
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, summary, [out, file, target_out, report])
        return
    begin_journal(output, running)
    with output.progress() as progress, running.meter.reporting(progress), inputs.explain_data_errors(alignment.data):
        running.meter.expect(WRITING, moved.num_bytes)
        record = record_run(output, [target, model], files, seed, running) if report or card or target_card else None
        lines = LineEvaluator(models, inputs.read_loss(loss), inputs.read_data(data if report else None, "test"),
                              repair=repair, device=device)  # fmt: skip
        paths = lines.evaluate_lines({"as they are": moved}, progress)
        (first, second), arguments = alignment.prepare(models, kinds, untie=untie, dtype=dtype)
        result = ob.align(second, to=first, progress=progress, engine=running, **arguments)
        if kinds == "permutation":
            element, start, state = result.permutation, None, result.permutation.apply(moved)
            entries = entries if model_only else move_training_entries(element, moved, ignore or ())
        else:
            element, start, state = result.transform, result.target, outputs.cast_like(moved, result.model, dtype)
            untied = list_untied(models.symmetry.ties, element.symmetry.ties)
            fixed, moved = (untie_checkpoint(each, untied, models.symmetry.ties) for each in models.checkpoints)
        made = _describe(record, target, model, out, kinds, result) if record is not None and card is not None else None
        outputs.write_moved(
            out, state, moved, force, progress, element, file, report, outputs.write_card(made, moved), entries.content,
            dtype, running,
        )  # fmt: skip
        if target_out is not None:
            end = outputs.cast_like(fixed, result.target, dtype)
            how = f"scaled by onebasin together with {model.name}, which is aligned to it" if is_moved else ""
            other = outputs.describe_canonical(record, target, target_out, how) if record and target_card else None
            write_checkpoint(
                target_out, end, fixed, force, progress, outputs.write_card(other, fixed), dtype=dtype, engine=running
            )
        paths |= lines.evaluate_lines({"aligned": state}, progress, start)
        end = None if start is None else read_state(start)
        distances = {"": find_layer_distances(fixed, moved, state, end)} if report else {}
    is_rounded = start is not None or dtype is not None
    notes = [*result.notes, *(outputs.note_rounding(out, moved, start is not None, dtype) if is_rounded else ())]
    if start is not None and target_out is None and _differ(first, start):
        notes.append(_NOT_TARGET.format(out=out, target=target, untie=" --untie" if moved.layout.untied else ""))
    for note in notes:
        output.note(note)
    title, cost_is = f"{model.name} aligned to {target.name}", outputs.describe_cost(objective)
    facts = {"target (A)": target, "model (B)": model, "written": out, "cost is the": cost_is}
    parts = {"symmetry": element.symmetry, "alignment": result, "paths": paths, "distances": distances}
    parts |= take_timeline(running)
    outputs.save_report(report, title, facts | list_engine_facts(running), record, **parts)
    finish_journal(running)
    output.show_facts({
        "method": result.method,
        "cost": f"{result.start_cost:.6g} -> {result.cost:.6g} ({cost_is})",
        "moved": outputs.describe_element(element),
        **({"untied": outputs.describe_untied(out, moved)} if untie else {}),
        "ended": ("converged" if result.converged else "stopped at its limit") + f" after {result.seconds:.1f} s",
        **list_engine_facts(running),
        "wrote": [path for path in (out, file, target_out, report) if path is not None],
    })  # fmt: skip
    output.finish({
        **summary, "symmetry": element.symmetry.summary(), "report": report, "method": result.method,
        "cost": result.cost, "start_cost": result.start_cost, "cost_is": cost_is,
        "converged": result.converged, "seconds": result.seconds, "untied": moved.layout.untied,
        **outputs.list_changes(element), "history": result.history,
        "notes": [*models.notes, *left_out, *notes], "paths": list_numbers(paths),
        **list_engine_values(running),
    })  # fmt: skip


def _describe(record: RunRecord, target: Path, model: Path, out: Path, kinds: str, result: ob.Alignment[Any]) -> ModelCard:
    """The card of an aligned model."""
    how = "permuted" if kinds == "permutation" else "permuted and scaled" if kinds == "positive" else "transformed"
    return record.make_card(
        out,
        f"{model.name}, aligned to {target.name} by onebasin: its hidden units were {how}, and it computes what it did.",
        [(model, f"the model whose hidden units were {how}"), (target, "what it was aligned to")],
        {"method": result.method, "cost": f"{result.start_cost:.6g} before, {result.cost:.6g} after"},
    )


def _differ(model: Model, other: Model) -> bool:
    """Whether two models of one architecture have a tensor that is not equal."""
    first, second = read_state(model), read_state(other)
    return any(not torch.equal(first[key], second[key]) for key in first.shapes)
