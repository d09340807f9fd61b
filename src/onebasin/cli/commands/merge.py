"""``onebasin merge``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import onebasin as ob
from onebasin.checkpoints import CheckpointSet, check_left, note_left_entries, write_checkpoint
from onebasin.checkpoints.untied_heads import untie_checkpoint
from onebasin.checkpoints.written_types import find_type
from onebasin.cli import inputs, mergekit, options, outputs
from onebasin.cli.aligned_folders import AlignedFolders
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
from onebasin.cli.mergekit import MergekitMethod, MergekitRun
from onebasin.cli.recipes import use_recipe
from onebasin.cli.run_record import RunRecord, record_run
from onebasin.cli.saved_elements import place_elements
from onebasin.engines.work_meter import WRITING
from onebasin.landscape.calibration import DATA_FREE, Repair, RepairForm
from onebasin.matching.frames import Reference
from onebasin.matching.problem import Entry
from onebasin.matching.recommendation import AUTO
from onebasin.matching.untying import list_untied
from onebasin.reporting.model_card import Ingredient, ModelCard
from onebasin.tensors.distances import LayerDistance, find_layer_distances
from onebasin.tensors.interpolation import check_weights, interpolate
from onebasin.tensors.layer_weights import find_layer_weights
from onebasin.tensors.states import State

_OF_TWINS = (
    "no transforms were written: networks without norms are merged by their normalised twins, whose tensors have other names"
)


def merge(
    context: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="A B [C ...]", help="Checkpoints of one architecture.")],
    out: options.Out,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="FILE.yaml", is_eager=True, callback=use_recipe, help="Take models and options "
                     "from a YAML file, each under its name here; the command line has the last word."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="W,W,...", help="The models' weights in the average. By default equal.",
                     rich_help_panel="Method"),
    ] = None,
    layer_weights: Annotated[
        list[str] | None,
        typer.Option("--layer-weights", metavar="PATTERN=W,W,...", help="Other weights for tensors with such names. Repeat "
                     "for more; the first that fits counts.", rich_help_panel="Method"),
    ] = None,
    then: Annotated[
        MergekitMethod | None,
        typer.Option("--then", metavar="METHOD", help="Write the aligned models beside OUT, and merge them by mergekit: "
                     "linear, slerp, ties, dare_ties, dare_linear, task_arithmetic, ...", rich_help_panel="mergekit"),
    ] = None,
    then_set: Annotated[
        list[str] | None,
        typer.Option("--then-set", metavar="NAME=VALUE", help="A parameter of mergekit: density=0.5, t=[0,0.5,1], ... "
                     "Repeat for more.", rich_help_panel="mergekit"),
    ] = None,
    reference: Annotated[
        Reference,
        typer.Option("--reference", help="Align all to the first; or each to the mean of the others until nothing moves; "
                     "or all at once to a common frame.", rich_help_panel="Method"),
    ] = "first",
    repair: options.MergeRepair = AUTO,
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
    groups: options.Groups = None,
    seed: options.Seed = 0,
    restarts: options.Restarts = 0,
    polish: options.Polish = None,
    detect_copy: options.DetectCopy = True,
    init: options.Inits = None,
    settings: options.Settings = None,
    scaling: options.Scaling = None,
    device: options.Device = "cpu",
    permutations: Annotated[
        Path | None,
        typer.Option("--permutations", metavar="FOLDER", help="Where to write the permutation of each model, or its "
                     "transform with --symmetry, for onebasin apply. By default beside OUT.", rich_help_panel="Output"),
    ] = None,
    without: Annotated[
        bool, typer.Option("--no-permutations", help="Do not write permutations or transforms.", rich_help_panel="Output")
    ] = False,
    engine: options.Engine = None,
    workers: options.Workers = None,
    address: options.Address = None,
    memory: options.Memory = None,
    resume: options.Resume = False,
    out_dtype: options.OutType = None,
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Align checkpoints and average them into one.

    The result has the layout and the types of A and, from a Hugging Face folder, its configuration and tokenizer. What was
    done to each model is written beside it, so that onebasin apply can do the same to its LoRAs and task vectors.
    """
    output, dtype = Output(json), find_type(out_dtype)
    if len(paths) < 2:
        raise typer.BadParameter("merging needs at least two checkpoints", param_hint="A B [C ...]")
    if permutations is not None and without:
        raise typer.BadParameter("give one of --permutations and --no-permutations", param_hint="--permutations")
    if init and len(init) not in (1, len(paths) - 1):
        wanted = f"give one for all models, or {len(paths) - 1}: one for each but {paths[0]}"
        raise typer.BadParameter(f"there are {len(init)} starts: {wanted}", param_hint="--init")
    inputs.check_untie(untie, kinds)
    learning = inputs.read_scaling(scaling, kinds, objective)
    if learning is not None and learning.both and len(paths) > 2:
        why = "both=true is for two models; of more, --reference common moves all but the first"
        raise typer.BadParameter(why, param_hint="--scaling")
    shares = check_weights(_read_weights("--weights", weights), len(paths), normalise=True)
    by_layer = _read_layer_weights(layer_weights)
    parameters = mergekit.read_options(then, then_set, len(paths), {
        "--repair": None if repair in (AUTO, "none") else repair, "--layer-weights": layer_weights, "--out-dtype": out_dtype,
        "--reference": kinds != "permutation" and reference != "first",
    })  # fmt: skip
    alignment = inputs.read_alignment_options(
        method=method, objective=objective, data=data, loss=loss, settings=settings, device=device,
        low=low, high=high, repaired=repaired, init=init or [],
        groups=groups or None, seed=seed, restarts=restarts, polish=polish, detect_copy=detect_copy, scaling=learning,
    )  # fmt: skip
    form = _choose_repair(repair, alignment.runs_networks and not (by_layer or then), shares)
    if form not in (None, *DATA_FREE) and alignment.data is None:
        raise ValueError(f"--repair {repair} runs the networks: give --data, or take --repair norms, which needs none")
    running = choose_engine(output, engine, workers, address, memory, device, resume)
    files = inputs.open_files(paths)
    sources = [*files, *inputs.list_input_files([architecture, recipe, *(init or ())], [architecture, data, loss])]
    aligned_folders = AlignedFolders(out, paths, kinds != "permutation")
    open_journal(running, out, sources, context.params, device, resume)
    force = may_replace(running, force, out, *(aligned_folders.written if then else ()))
    card = outputs.place_card(out, files[0])
    if then is None:
        outputs.check_outputs(out, files[0], sources, [report, card], force, dtype, count_staged(running, out))
    else:
        mergekit.check_folders(files)
        aligned_folders.check(files, sources, report, force)
    what = "permutation" if kinds == "permutation" else "transform"
    saved = None if without else place_elements(out, files[0].layout.is_folder, what, paths, permutations)
    if saved is not None:
        taken = [*aligned_folders.written, aligned_folders.configuration] if then else []
        saved.check(sources, [out, report, *taken], force)
    outputs.check_drawing(report)
    models = inputs.read_models(
        output, files, architecture, input_shape, ignore, check, alignment.data, allow, running,
        lambda opened: check_needs(running, opened, out, opened.checkpoints[0], method, device, dtype),
    )  # fmt: skip
    models.symmetry.restrict(groups or None)
    if reference != "first":  # else the first model, whose layout is written, stays where it is
        check_left(models.checkpoints[0], models.symmetry)
    left_out = outputs.note_companions(output, (paths[0], files[0]))
    left_out += outputs.note_about(output, paths[0], note_left_entries(files[0]))
    outputs.show_inputs(output, paths, models)
    summary: dict[str, Any] = {
        "command": "merge", "models": paths, "out": out, "weights": shares, "method": method, "reference": reference,
        "kinds": kinds, "permutations": None if saved is None else saved.paths,
        "symmetry": models.symmetry.summary(),
    }  # fmt: skip
    if dry_run:
        further = [*aligned_folders.written, aligned_folders.configuration] if then else []
        outputs.finish_dry_run(output, summary, [out, *further, saved and saved.path, report])
        return
    like, found = models.checkpoints[0], _Alignments(outputs.short_names(paths))
    begin_journal(output, running)
    with output.progress() as progress, running.meter.reporting(progress), inputs.explain_data_errors(alignment.data):
        running.meter.expect(WRITING, like.num_bytes)
        record = record_run(output, paths, files, seed, running) if report or card else None
        tested = inputs.read_data(data if report else None, "test")
        lines = LineEvaluator(models, inputs.read_loss(loss), tested, device=device)
        lines.evaluate_state(like)  # what does not fit the data fails now, and not after the alignment
        given = alignment.load(models, kinds, form is not None, dtype is not None, dtype)
        merged = ob.merge(
            given, weights=shares, repair=cast(Any, repair) if form else None, reference=reference, progress=progress,
            on_aligned=found.keep, on_result=found.add, on_repair=found.repairs.append, layer_weights=by_layer,
            engine=running, **alignment.symmetry_of(models, kinds, form is not None, untie, dtype),
            **alignment.arguments | ({} if form is None else {"data": alignment.data}),
        )  # fmt: skip
        form = found.note_repair(form, is_auto=repair == AUTO)
        lines.repair(form, alignment.data)
        curves = lines.evaluate_lines(_name_lines(found.names, models.checkpoints), progress)
        untied = list_untied(models.symmetry.ties, found.elements[0].symmetry.ties) if untie else ()
        likes = [untie_checkpoint(each, untied, models.symmetry.ties) for each in models.checkpoints]
        state = outputs.cast_like(like, merged, dtype)
        made = found.describe(record, paths, shares, out, recipe) if record is not None and card else None
        if then is None:
            inside = outputs.list_inside(out, like, [report])
            write_checkpoint(out, state, likes[0], force, progress, outputs.write_card(made, likes[0]), inside, dtype=dtype,
                             engine=running)  # fmt: skip
        else:
            assert record is not None  # folders have a card
            aligned_folders.write(found.list_aligned(models), likes, record, force, progress, running)
        of_models = found.are_of(models)
        if saved is not None and of_models:
            saved.write(found.elements if then is None else found.elements_from_first, force)
        elif saved is not None:
            saved, summary["permutations"] = None, None
            found.remarks.append(_OF_TWINS)
        distances, unaligned = {}, {}
        if kinds == "permutation":  # else the line is not from the first file, but from what was made of it
            aligned = _move_to_first(found.permutations, models)
            curves |= lines.evaluate_lines(_name_lines(found.names, aligned, ", aligned"), progress)
        if report and of_models:
            distances = _find_distances(found.names, models.checkpoints, found.list_aligned(models))
        measured = lines.evaluate_state(state, merged if untied else None) if then is None else {}
        if measured:
            by_key = find_layer_weights(like.shapes, by_layer, len(paths))
            unaligned = lines.evaluate_state(interpolate(models.checkpoints, shares, by_key))
    for note in found.notes:
        output.note(note)
    facts = {**found.list_facts(shares, measured), **({} if form is None else {"repair": form})}
    facts |= {"untied": outputs.describe_untied(out, likes[0])} if untie else {}
    shown = {**facts, "notes": " ".join(found.notes), "written": out}
    plain = "the average without alignment" + (", not repaired" if form else "")
    averages = {"the merge": measured, plain: unaligned} if measured else {}
    shown |= list_engine_facts(running)
    outputs.save_report(
        report, f"Merge of {', '.join(found.names)}", shown, record, permutations=found.moved_permutations,
        transforms=found.moved_transforms, symmetry=found.elements[0].symmetry if of_models else models.symmetry,
        paths=curves, averages=averages, distances=distances, ends=("A", "B") if len(paths) == 2 else ("start", "end"),
        **take_timeline(running),
    )  # fmt: skip
    if then is not None:
        run = MergekitRun(
            then, aligned_folders.places, shares, parameters, like.dtypes[0], aligned_folders.configuration, out, seed
        )  # fmt: skip
        assert made is not None  # folders have a card
        summary["mergekit"] = mergekit.write_and_run(output, run, files[0], made, force)
    written = (*(aligned_folders.written if then else [out]), saved and saved.path, report)
    finish_journal(running)
    output.show_facts({**facts, **list_engine_facts(running), "wrote": [path for path in written if path is not None]})
    output.finish({
        **summary, "untied": likes[0].layout.untied, "report": report, "method": found.methods, "repair": form,
        "changes": {name: outputs.list_changes(each) for name, each in found.moved.items()},
        "history": found.history, "merged": measured,
        "unaligned": unaligned, "notes": [*models.notes, *left_out, *found.notes], "paths": list_numbers(curves),
        **list_engine_values(running),
    })  # fmt: skip


def _choose_repair(name: str, suits: bool, shares: Sequence[float]) -> RepairForm | None:
    """The form of a name; "auto" is "repair" where that suits, and weights are not negative."""
    if name == AUTO:
        return "repair" if suits and min(shares) >= 0 else None
    return None if name == "none" else cast(RepairForm, name)


@dataclass(frozen=True)
class _Alignments:
    """What `onebasin.merge` does to each model.

    Attributes:
        names: of the models.
        elements: what was done to each model.
        results: the alignments in their order, each with the name of its model.
        repairs: what the repair of the merge did, once it is made; None if it was left as it is.
        remarks: further notes.
    """

    names: list[str]
    elements: list[ob.Permutation | ob.Transform] = field(default_factory=list)
    results: list[tuple[str, ob.Alignment[Any]]] = field(default_factory=list)
    repairs: list[Repair | None] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def note_repair(self, form: RepairForm | None, is_auto: bool) -> RepairForm | None:
        """The form in which the merge was repaired, with a remark on what the default did."""
        done = form if self.repairs[0] is not None else None
        if is_auto and form is not None:
            bases = [each for each in self.elements if isinstance(each, ob.Transform) and each.symmetry.bases]
            kept = "there is nothing to correct, or its loss would not fall"
            kept = "a change of basis mixes units, so that there are none to correct" if bases else kept
            what = "corrected on the data" if done else f"left as they are: {kept}"
            self.remarks.append(f"The statistics of the merge were {what}.")
        return done

    def keep(self, elements: Sequence[Any]) -> None:
        self.elements.extend(elements)

    def are_of(self, models: CheckpointSet) -> bool:
        """Whether they belong to the models themselves, and not to networks that were made of them."""
        return all(each.symmetry.layouts.keys() == models.symmetry.layouts.keys() for each in self.elements)

    @property
    def permutations(self) -> list[ob.Permutation]:
        return [each.permutation if isinstance(each, ob.Transform) else each for each in self.elements]

    def add(self, number: int, result: ob.Alignment[Any]) -> None:
        self.results.append((self.names[number], result))

    @property
    def notes(self) -> list[str]:
        """Each note once, with the names of the models that it is about."""
        models: dict[str, dict[str, None]] = {}
        for name, result in self.results:
            for note in result.notes:
                about = [self.names[number] for number in result.noted_models.get(note, ())] or [name]
                models.setdefault(note, {}).update(dict.fromkeys(about))
        return [*(f"{', '.join(names)}: {note}" for note, names in models.items()), *self.remarks]

    @property
    def methods(self) -> str:
        return ", ".join(dict.fromkeys(result.method for _, result in self.results))

    @property
    def history(self) -> list[Entry]:
        return [entry for _, result in self.results for entry in result.history]

    def list_facts(self, shares: Sequence[float], measured: Mapping[str, float]) -> dict[str, Any]:
        return {
            "weights": ", ".join(f"{name} {share:.4g}" for name, share in zip(self.names, shares, strict=True)),
            "method": self.methods,
            **{f"{name} of the merge": f"{value:.4g}" for name, value in measured.items()},
            **{name: outputs.describe_element(element) for name, element in self.moved.items()},
        }

    @property
    def elements_from_first(self) -> list[Any]:
        """What was done to each model; permutations are composed so that the first model stays where it was."""
        if isinstance(self.elements[0], ob.Transform):
            return self.elements
        back = self.permutations[0].inverse()
        return [back @ own for own in self.permutations]

    def list_aligned(self, models: CheckpointSet) -> Sequence[State]:
        """All models, aligned; the first is as it was, or in canonical form."""
        if not isinstance(self.elements[0], ob.Transform):
            return _move_to_first(self.permutations, models)
        results = [result for _, result in self.results[: len(self.names) - 1]]  # later ones are from there to means
        first, others = results[0], zip(results, self.elements[1:], strict=True)
        start = first.target if first.target_transform is not None else self.elements[0].apply(first.target)
        aligned = [start, *(_move_on(result, element) for result, element in others)]
        return [outputs.cast_like(like, model) for like, model in zip(models.checkpoints, aligned, strict=True)]

    def describe(
        self, record: RunRecord, paths: Sequence[Path], shares: Sequence[float], out: Path, recipe: Path | None
    ) -> ModelCard:
        """The card of the merge."""
        moved = self.moved
        made = [
            Ingredient(str(path), f"weight {share:.4g}" + (", aligned" if name in moved else ""), record.hashes[str(path)])
            for path, name, share in zip(paths, self.names, shares, strict=True)
        ]
        summary = f"A merge of {len(paths)} models, whose hidden units were aligned by onebasin. Configuration, tokenizer "
        summary += f"and texts are those of {self.names[0]}; the licences of the others hold as well."
        text = recipe.read_text(encoding="utf-8", errors="replace") if recipe is not None else ""
        facts = {"method": self.methods, **record.facts}
        return ModelCard(out.name, summary, made, record.command, facts, text, tags=("onebasin", "merge"))

    @property
    def moved(self) -> dict[str, ob.Permutation | ob.Transform]:
        return {name: each for name, each in zip(self.names, self.elements, strict=True) if not each.is_identity}

    @property
    def moved_permutations(self) -> dict[str, ob.Permutation]:
        return {name: p for name, p in zip(self.names, self.permutations, strict=True) if not p.is_identity}

    @property
    def moved_transforms(self) -> dict[str, ob.Transform]:
        return {name: each for name, each in self.moved.items() if isinstance(each, ob.Transform)}


def _move_on(result: ob.Alignment[Any], element: Any) -> Any:
    """The model of an alignment, moved further if what was done to it in the end is more than that."""
    if element is result.transform:
        return result.model
    return (element @ result.transform.inverse()).apply(result.model)


def _move_to_first(permutations: Sequence[ob.Permutation], models: CheckpointSet) -> list[State]:
    """The aligned models, all moved together so that the first, which may have moved too, is where it was."""
    back = permutations[0].inverse()
    return [(back @ own).apply(file) for own, file in zip(permutations, models.checkpoints, strict=True)]


def _find_distances(
    names: Sequence[str], models: Sequence[State], aligned: Sequence[State]
) -> dict[str, dict[str, LayerDistance]]:
    """For each model but the first its distance from that one, layer by layer, as they were and as they are aligned."""
    pairs = zip(names[1:], models[1:], aligned[1:], strict=True)
    return {name: find_layer_distances(models[0], model, moved, aligned[0]) for name, model, moved in pairs}


def _name_lines(names: Sequence[str], states: Sequence[State], ending: str = "") -> dict[str, State]:
    """All states but the first, by the name of the line from the first to them."""
    return {f"{names[0]} to {name}{ending}": state for name, state in zip(names[1:], states[1:], strict=True)}


def _read_layer_weights(texts: Sequence[str] | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for text in texts or ():
        pattern, equals, weights = text.rpartition("=")
        if not (pattern and equals):
            raise ValueError(f"cannot read --layer-weights {text!r}: write PATTERN=W,W,... with a weight for each model")
        found[pattern] = _read_weights("--layer-weights", weights) or []
    return found


def _read_weights(option: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"cannot read {option} {text!r}: write numbers with commas between, such as 0.7,0.3") from None
