"""``onebasin align``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import onebasin as ob
from onebasin.checkpoints import (
    Checkpoint,
    CheckpointSet,
    TrainingEntries,
    check_left,
    move_training_entries,
    note_left_entries,
    write_checkpoint,
)
from onebasin.checkpoints.untied_heads import untie_checkpoint
from onebasin.checkpoints.written_types import find_type
from onebasin.cli import engine_choice, inputs, options, outputs
from onebasin.cli.console import Output
from onebasin.cli.line_evaluation import LineEvaluator, list_numbers
from onebasin.cli.run_record import RunRecord, record_run
from onebasin.engines import Engine
from onebasin.engines.work_meter import WRITING
from onebasin.landscape.calibration import RepairForm
from onebasin.matching.recommendation import AUTO
from onebasin.matching.untying import list_untied
from onebasin.reporting.model_card import ModelCard
from onebasin.tensors.distances import find_layer_distances
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import Model, State, read_state
from onebasin.tracing import Kinds

_NOT_TARGET = (
    "{out} is aligned to the canonical form of {target}, in which the gains of norms are folded, and is to be compared and "
    "mixed with that: --target-out writes it, and so does onebasin canonical {target}{untie}"
)


@dataclass(frozen=True)
class _Request:
    """What to align, how, and where to write it: options of `align` as they were read.

    Attributes:
        element: where what was done to the model is written.
        alignment: how to align.
    """

    target: Path
    model: Path
    out: Path
    element: Path
    target_out: Path | None
    report: Path | None
    kinds: Kinds
    untie: bool
    alignment: inputs.AlignmentOptions
    objective: str | None
    dtype: torch.dtype | None
    ignore: Sequence[str]
    model_only: bool
    data: str | None
    loss: str
    repair: RepairForm | None
    seed: int
    force: bool

    @property
    def paths(self) -> list[Path]:
        """All outputs."""
        return [path for path in (self.out, self.element, self.target_out, self.report) if path is not None]

    def check_outputs(self, files: Sequence[Checkpoint], sources: Sequence[Path | Checkpoint], staged: int) -> None:
        """Refuse, before any work, what cannot or should not be written; `staged` bytes of `out` are on the disk."""
        fixed, moved = files
        further = [self.element, self.report, outputs.place_card(self.out, moved)]
        outputs.check_outputs(self.out, moved, sources, further, self.force, self.dtype, staged)
        if self.target_out is not None:
            taken = [self.out, self.element, self.report]
            outputs.check_further_output(self.target_out, fixed, sources, taken, self.force)
        outputs.check_drawing(self.report)


@dataclass(frozen=True)
class _Aligned:
    """A model that is aligned to a target.

    Attributes:
        result: of the alignment.
        element: what was done to the model.
        state: the moved model, in the types in which it is written.
        given: the target as the alignment was given it.
        start: what the model is aligned to, with scales or changes of basis; None if that is the target.
        fixed: the checkpoint of the target, whose layout is written.
        moved: that of the model, likewise.
    """

    result: ob.Alignment[Any]
    element: ob.Permutation | ob.Transform
    state: State
    given: Model
    start: Any
    fixed: Checkpoint
    moved: Checkpoint


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
    running = engine_choice.choose_engine(output, engine, workers, address, memory, device, resume)
    files = inputs.open_files([target, model])
    sources = [*files, *inputs.list_input_files([architecture, init], [architecture, data, loss])]
    engine_choice.open_journal(running, out, sources, context.params, device, resume)
    request = _Request(
        target=target, model=model, out=out, target_out=target_out, report=report, kinds=kinds, untie=untie,
        element=permutation or outputs.place_element(out, files[1].layout.is_folder, kinds), alignment=alignment,
        objective=objective, dtype=dtype, ignore=ignore or (), model_only=model_only, data=data, loss=loss, repair=repair,
        seed=seed, force=engine_choice.may_replace(running, force, out),
    )  # fmt: skip
    request.check_outputs(files, sources, engine_choice.count_staged(running, out))
    models = inputs.read_models(
        output, files, architecture, input_shape, ignore, check, alignment.data, allow, running,
        lambda opened: engine_choice.check_needs(running, opened, out, opened.checkpoints[1], method, device, dtype),
    )  # fmt: skip
    models.symmetry.restrict(groups or None)
    check_left(models.checkpoints[1], models.symmetry)
    entries = outputs.check_training_entries(out, models.checkpoints[1], models.symmetry, kinds, ignore or (), model_only)
    left_out = _note_left_out(output, request, files, entries)
    outputs.show_inputs(output, [target, model], models)
    summary: dict[str, Any] = {
        "command": "align", "target": target, "model": model, "out": out, "permutation": request.element, "method": method,
        "kinds": kinds, "target_out": target_out, "symmetry": models.symmetry.summary(),
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, summary, request.paths)
        return
    _carry_out(request, output, running, files, models, entries, left_out, summary)


def _note_left_out(output: Output, request: _Request, files: Sequence[Checkpoint], entries: TrainingEntries) -> list[str]:
    """Print, and return, what the outputs lack: files of folders, and entries beside models."""
    fixed, moved = files
    others = [] if request.target_out is None else [(request.target, fixed)]
    left_out = outputs.note_companions(output, (request.model, moved), *others)
    left_out += outputs.note_about(output, request.model, entries.notes)
    return left_out + outputs.note_about(output, request.target, note_left_entries(fixed) if others else ())


def _carry_out(
    request: _Request, output: Output, running: Engine, files: Sequence[Checkpoint], models: CheckpointSet,
    entries: TrainingEntries, left_out: Sequence[str], summary: dict[str, Any],
) -> None:  # fmt: skip
    """Align, write and report; `summary` is the first part of the result."""
    engine_choice.begin_journal(output, running)
    moved, data, device = models.checkpoints[1], request.alignment.data, request.alignment.device
    with output.progress() as progress, running.meter.reporting(progress), inputs.explain_data_errors(data):
        running.meter.expect(WRITING, moved.num_bytes)
        likes = files[1:] if request.target_out is None else files
        is_recorded = request.report is not None or any(file.layout.is_folder for file in likes)
        record = record_run(output, [request.target, request.model], files, request.seed, running) if is_recorded else None
        tested = inputs.read_data(request.data if request.report else None, "test")
        lines = LineEvaluator(models, inputs.read_loss(request.loss), tested, repair=request.repair, device=device)
        curves = lines.evaluate_lines({"as they are": moved}, progress)
        aligned = _align(request, models, progress, running)
        _write(request, aligned, entries, record, progress, running)
        curves |= lines.evaluate_lines({"aligned": aligned.state}, progress, aligned.start)
        end = None if aligned.start is None else read_state(aligned.start)
        distances = {"": find_layer_distances(aligned.fixed, aligned.moved, aligned.state, end)} if request.report else {}
    notes, result = _list_notes(request, aligned), aligned.result
    output.note(*notes)
    cost_is = outputs.describe_cost(request.objective)
    title = f"{request.model.name} aligned to {request.target.name}"
    facts = {"target (A)": request.target, "model (B)": request.model, "written": request.out, "cost is the": cost_is}
    parts = {"symmetry": aligned.element.symmetry, "alignment": result, "paths": curves, "distances": distances}
    parts |= engine_choice.take_timeline(running)
    outputs.save_report(request.report, title, facts | engine_choice.list_engine_facts(running), record, **parts)
    engine_choice.finish_journal(running)
    output.show_facts({
        "method": result.method,
        "cost": f"{result.start_cost:.6g} -> {result.cost:.6g} ({cost_is})",
        "moved": outputs.describe_element(aligned.element),
        **({"untied": outputs.describe_untied(request.out, aligned.moved)} if request.untie else {}),
        "ended": ("converged" if result.converged else "stopped at its limit") + f" after {result.seconds:.1f} s",
        **engine_choice.list_engine_facts(running),
        "wrote": request.paths,
    })  # fmt: skip
    output.finish({
        **summary, "symmetry": aligned.element.symmetry.summary(), "report": request.report, "method": result.method,
        "cost": result.cost, "start_cost": result.start_cost, "cost_is": cost_is,
        "converged": result.converged, "seconds": result.seconds, "untied": aligned.moved.layout.untied,
        **outputs.list_changes(aligned.element), "history": result.history,
        "notes": [*models.notes, *left_out, *notes], "paths": list_numbers(curves),
        **engine_choice.list_engine_values(running),
    })  # fmt: skip


def _align(request: _Request, models: CheckpointSet, progress: Progress, engine: Engine) -> _Aligned:
    """Align the model, and move its checkpoint."""
    (target, model), arguments = request.alignment.prepare(models, request.kinds, untie=request.untie, dtype=request.dtype)
    result = ob.align(model, to=target, progress=progress, engine=engine, **arguments)
    fixed, moved = models.checkpoints
    if request.kinds == "permutation":
        return _Aligned(result, result.permutation, result.permutation.apply(moved), target, None, fixed, moved)
    state, ties = outputs.cast_like(moved, result.model, request.dtype), models.symmetry.ties
    untied = list_untied(ties, result.transform.symmetry.ties)
    fixed, moved = (untie_checkpoint(each, untied, ties) for each in models.checkpoints)
    return _Aligned(result, result.transform, state, target, result.target, fixed, moved)


def _write(
    request: _Request, aligned: _Aligned, entries: TrainingEntries, record: RunRecord | None, progress: Progress,
    engine: Engine,
) -> None:  # fmt: skip
    """Write the moved model, what moved it, and what it is aligned to, if that is asked for."""
    out, like, dtype = request.out, aligned.moved, request.dtype
    if request.kinds == "permutation" and not request.model_only:
        entries = move_training_entries(aligned.element, like, request.ignore)
    card = _describe(request, aligned.result, record) if record is not None and like.layout.is_folder else None
    beside, further = outputs.write_card(card, like), outputs.list_inside(out, like, [request.report])
    if outputs.list_inside(out, like, [request.element]):
        beside[request.element.name] = aligned.element.save
    write_checkpoint(out, aligned.state, like, request.force, progress, beside, further, entries.content, dtype, engine)
    if request.element.name not in beside:
        aligned.element.save(request.element)
    if request.target_out is not None:
        fixed, other = aligned.fixed, None
        if record is not None and fixed.layout.is_folder:
            together = f"scaled by onebasin together with {request.model.name}, which is aligned to it"
            how = together if request.alignment.moves_both else ""
            other = outputs.describe_canonical(record, request.target, request.target_out, how)
        state, beside = outputs.cast_like(fixed, aligned.result.target, dtype), outputs.write_card(other, fixed)
        write_checkpoint(request.target_out, state, fixed, request.force, progress, beside, dtype=dtype, engine=engine)


def _list_notes(request: _Request, aligned: _Aligned) -> list[str]:
    """Remarks on the alignment and its outputs."""
    is_multiplied, notes = aligned.start is not None, list(aligned.result.notes)
    if is_multiplied or request.dtype is not None:
        notes += outputs.note_rounding(request.out, aligned.moved, is_multiplied, request.dtype)
    if is_multiplied and request.target_out is None and _differ(aligned.given, aligned.start):
        untie = " --untie" if aligned.moved.layout.untied else ""
        notes.append(_NOT_TARGET.format(out=request.out, target=request.target, untie=untie))
    return notes


def _describe(request: _Request, result: ob.Alignment[Any], record: RunRecord) -> ModelCard:
    """The card of an aligned model."""
    target, model, kinds = request.target, request.model, request.kinds
    how = "permuted" if kinds == "permutation" else "permuted and scaled" if kinds == "positive" else "transformed"
    return record.make_card(
        request.out,
        f"{model.name}, aligned to {target.name} by onebasin: its hidden units were {how}, and it computes what it did.",
        [(model, f"the model whose hidden units were {how}"), (target, "what it was aligned to")],
        {"method": result.method, "cost": f"{result.start_cost:.6g} before, {result.cost:.6g} after"},
    )


def _differ(model: Model, other: Model) -> bool:
    """Whether two models of one architecture have a tensor that is not equal."""
    first, second = read_state(model), read_state(other)
    return any(not torch.equal(first[key], second[key]) for key in first.shapes)
