"""A merge of checkpoints: what is asked for, where it is written, and the steps of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

import onebasin as ob
from onebasin.checkpoints import Checkpoint, CheckpointSet, write_checkpoint
from onebasin.checkpoints.untied_heads import untie_checkpoint
from onebasin.cli import engine_choice, inputs, mergekit, outputs
from onebasin.cli.aligned_folders import AlignedFolders
from onebasin.cli.alignments import Alignments
from onebasin.cli.console import Output
from onebasin.cli.line_evaluation import LineEvaluator, list_numbers
from onebasin.cli.mergekit import MergekitRun
from onebasin.cli.run_record import RunRecord, record_run
from onebasin.cli.saved_elements import ElementFolder
from onebasin.engines import Engine
from onebasin.engines.work_meter import WRITING
from onebasin.landscape.calibration import RepairForm
from onebasin.matching.frames import Reference
from onebasin.matching.recommendation import AUTO
from onebasin.matching.untying import list_untied
from onebasin.reporting.model_card import ModelCard
from onebasin.tensors.interpolation import interpolate
from onebasin.tensors.layer_weights import find_layer_weights
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import LazyState
from onebasin.tracing import Kinds

_OF_TWINS = (
    "no transforms were written: networks without norms are merged by their normalised twins, whose tensors have other names"
)


@dataclass(frozen=True)
class MergeRequest:
    """What to merge, how, and where to write it: options of `merge` as they were read.

    Attributes:
        aligned: the models for mergekit, if that merges them.
        saved: where what was done to each model is written, if it is.
        shares: the weights of the models in the average.
        by_layer: other weights, by patterns of the names of tensors.
        form: of the repair, after the default was chosen; None for no repair.
        alignment: how to align.
        parameters: of the method of mergekit.
    """

    models: list[Path]
    out: Path
    aligned: AlignedFolders | None
    saved: ElementFolder | None
    report: Path | None
    shares: list[float]
    by_layer: dict[str, list[float]]
    reference: Reference
    kinds: Kinds
    untie: bool
    repair: str
    form: RepairForm | None
    alignment: inputs.AlignmentOptions
    dtype: torch.dtype | None
    then: str | None
    parameters: dict[str, Any]
    recipe: Path | None
    data: str | None
    loss: str
    seed: int
    force: bool

    @property
    def for_mergekit(self) -> list[Path]:
        """The models for mergekit, and its configuration."""
        return [*self.aligned.written, self.aligned.configuration] if self.aligned else []

    @property
    def paths(self) -> list[Path]:
        """All outputs."""
        found = (self.out, *self.for_mergekit, self.saved and self.saved.path, self.report)
        return [path for path in found if path is not None]

    @property
    def written(self) -> list[Path]:
        """The outputs that are named at the end; those of mergekit are named when it is run."""
        by_mergekit = [self.out, self.aligned.configuration] if self.aligned else []
        return [path for path in self.paths if path not in by_mergekit]

    def check_outputs(self, files: Sequence[Checkpoint], sources: Sequence[Path | Checkpoint], staged: int) -> None:
        """Refuse, before any work, what cannot or should not be written; `staged` bytes of `out` are on the disk."""
        card = outputs.place_card(self.out, files[0])
        if self.aligned is None:
            outputs.check_outputs(self.out, files[0], sources, [self.report, card], self.force, self.dtype, staged)
        else:
            mergekit.check_folders(files)
            self.aligned.check(files, sources, self.report, self.force)
        if self.saved is not None:
            self.saved.check(sources, [self.out, self.report, *self.for_mergekit], self.force)
        outputs.check_drawing(self.report)


@dataclass(frozen=True)
class _Merged:
    """A merge.

    Attributes:
        found: what was done to each model.
        average: of the aligned models.
        state: the same in the types in which it is written.
        form: of the repair; None if the average was left as it is.
        likes: the checkpoints whose layouts are written.
    """

    found: Alignments
    average: Any
    state: LazyState
    form: RepairForm | None
    likes: list[Checkpoint]


def carry_out(
    request: MergeRequest, output: Output, running: Engine, files: Sequence[Checkpoint], models: CheckpointSet,
    left_out: Sequence[str], summary: dict[str, Any],
) -> None:  # fmt: skip
    """Merge, write, measure and report; `summary` is the first part of the result."""
    engine_choice.begin_journal(output, running)
    data, like = request.alignment.data, models.checkpoints[0]
    with output.progress() as progress, running.meter.reporting(progress), inputs.explain_data_errors(data):
        running.meter.expect(WRITING, like.num_bytes)
        is_recorded = request.report is not None or files[0].layout.is_folder
        record = record_run(output, request.models, files, request.seed, running) if is_recorded else None
        tested = inputs.read_data(request.data if request.report else None, "test")
        lines = LineEvaluator(models, inputs.read_loss(request.loss), tested, device=request.alignment.device)
        lines.evaluate_state(like)  # what does not fit the data fails now, and not after the alignment
        merged = _merge(request, models, progress, running)
        found = merged.found
        if request.saved is not None and not found.are_of(models):
            request, summary["permutations"] = replace(request, saved=None), None
            found.remarks.append(_OF_TWINS)
        lines.repair(merged.form, data)
        curves = lines.evaluate_lines(found.name_lines(models.checkpoints), progress)
        card = _write(request, merged, models, record, progress, running)
        if request.kinds == "permutation":  # else the line is not from the first file, but from what was made of it
            curves |= lines.evaluate_lines(found.name_lines(found.move_to_first(models), ", aligned"), progress)
        distances = found.find_distances(models) if request.report and found.are_of(models) else {}
        measured, unaligned = _evaluate_averages(request, merged, models, lines)
    output.note(*found.notes)
    facts = found.list_facts(request.shares, measured) | ({} if merged.form is None else {"repair": merged.form})
    facts |= {"untied": outputs.describe_untied(request.out, merged.likes[0])} if request.untie else {}
    drawn = {"paths": curves, "distances": distances, **engine_choice.take_timeline(running)}
    shown = {**facts, "notes": " ".join(found.notes), "written": request.out, **engine_choice.list_engine_facts(running)}
    _save_report(request, merged, models, record, shown, measured, unaligned, drawn)
    if request.aligned is not None:
        assert request.then is not None
        assert card is not None  # folders have a card
        run = MergekitRun(
            request.then, request.aligned.places, request.shares, request.parameters, like.dtypes[0],
            request.aligned.configuration, request.out, request.seed,
        )  # fmt: skip
        summary["mergekit"] = mergekit.write_and_run(output, run, files[0], card, request.force)
    engine_choice.finish_journal(running)
    output.show_facts({**facts, **engine_choice.list_engine_facts(running), "wrote": request.written})
    output.finish({
        **summary, "untied": merged.likes[0].layout.untied, "report": request.report, "method": found.methods,
        "repair": merged.form, "changes": {name: outputs.list_changes(each) for name, each in found.moved.items()},
        "history": found.history, "merged": measured, "unaligned": unaligned,
        "notes": [*models.notes, *left_out, *found.notes], "paths": list_numbers(curves),
        **engine_choice.list_engine_values(running),
    })  # fmt: skip


def _merge(request: MergeRequest, models: CheckpointSet, progress: Progress, engine: Engine) -> _Merged:
    """Align the models and average them."""
    alignment, dtype, is_repaired = request.alignment, request.dtype, request.form is not None
    found = Alignments(outputs.short_names(request.models))
    given, arguments = alignment.prepare(models, request.kinds, is_repaired, dtype is not None, request.untie, dtype)
    average = ob.merge(
        given, weights=request.shares, repair=cast(Any, request.repair) if is_repaired else None,
        reference=request.reference, progress=progress, on_aligned=found.keep, on_result=found.add,
        on_repair=found.repairs.append, layer_weights=request.by_layer, engine=engine,
        **arguments | ({"data": alignment.data} if is_repaired else {}),
    )  # fmt: skip
    form = found.note_repair(request.form, is_auto=request.repair == AUTO)
    untied = list_untied(models.symmetry.ties, found.elements[0].symmetry.ties) if request.untie else ()
    likes = [untie_checkpoint(each, untied, models.symmetry.ties) for each in models.checkpoints]
    return _Merged(found, average, outputs.cast_like(models.checkpoints[0], average, dtype), form, likes)


def _write(
    request: MergeRequest, merged: _Merged, models: CheckpointSet, record: RunRecord | None, progress: Progress,
    engine: Engine,
) -> ModelCard | None:  # fmt: skip
    """Write the merge, or the aligned models for mergekit, and what was done to each; return the card of the merge."""
    found, like, aligned, card = merged.found, merged.likes[0], request.aligned, None
    if record is not None and like.layout.is_folder:
        card = found.describe(record, request.models, request.shares, request.out, request.recipe)
    if aligned is None:
        beside, inside = outputs.write_card(card, like), outputs.list_inside(request.out, like, [request.report])
        write_checkpoint(request.out, merged.state, like, request.force, progress, beside, inside, dtype=request.dtype,
                         engine=engine)  # fmt: skip
    else:
        assert record is not None  # folders have a card
        aligned.write(found.list_aligned(models), merged.likes, record, request.force, progress, engine)
    if request.saved is not None:
        request.saved.write(found.elements if aligned is None else found.elements_from_first, request.force)
    return card


def _evaluate_averages(
    request: MergeRequest, merged: _Merged, models: CheckpointSet, lines: LineEvaluator
) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of the merge, and of the average of the models as they were; none without data, or with mergekit."""
    other = merged.average if merged.likes[0].layout.untied else None
    measured = lines.evaluate_state(merged.state, other) if request.aligned is None else {}
    if not measured:
        return {}, {}
    by_key = find_layer_weights(models.checkpoints[0].shapes, request.by_layer, len(request.models))
    return measured, lines.evaluate_state(interpolate(models.checkpoints, request.shares, by_key))


def _save_report(
    request: MergeRequest, merged: _Merged, models: CheckpointSet, record: RunRecord | None, facts: dict[str, Any],
    measured: dict[str, float], unaligned: dict[str, float], drawn: dict[str, Any],
) -> None:  # fmt: skip
    """Write the report, if the user asked for one, with what is `drawn`."""
    found = merged.found
    plain = "the average without alignment" + ("" if merged.form is None else ", not repaired")
    outputs.save_report(
        request.report, f"Merge of {', '.join(found.names)}", facts, record, permutations=found.moved_permutations,
        transforms=found.moved_transforms, averages={"the merge": measured, plain: unaligned} if measured else {},
        symmetry=found.elements[0].symmetry if found.are_of(models) else models.symmetry,
        ends=("A", "B") if len(found.names) == 2 else ("start", "end"), **drawn,
    )  # fmt: skip
