"""``onebasin merge``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import onebasin as ob
from onebasin.checkpoints import check_left
from onebasin.checkpoints.written_types import find_type
from onebasin.cli import engine_choice, inputs, mergekit, options, outputs
from onebasin.cli.aligned_folders import AlignedFolders
from onebasin.cli.console import Output
from onebasin.cli.mergekit import MergekitMethod
from onebasin.cli.merging import MergeRequest, carry_out
from onebasin.cli.recipes import use_recipe
from onebasin.cli.saved_elements import place_elements
from onebasin.landscape.calibration import DATA_FREE, RepairForm
from onebasin.matching.frames import Reference
from onebasin.matching.recommendation import AUTO
from onebasin.tensors.interpolation import check_weights
from onebasin.tracing import Kinds


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
    _check_options(paths, permutations, without, init, untie, kinds)
    learning = _read_scaling(scaling, kinds, objective, len(paths))
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
    form = _choose_repair(repair, alignment, not (by_layer or then), shares)
    running = engine_choice.choose_engine(output, engine, workers, address, memory, device, resume)
    files = inputs.open_files(paths)
    sources = [*files, *inputs.list_input_files([architecture, recipe, *(init or ())], [architecture, data, loss])]
    engine_choice.open_journal(running, out, sources, context.params, device, resume)
    aligned = AlignedFolders(out, paths, kinds != "permutation") if then else None
    request = MergeRequest(
        models=paths, out=out, aligned=aligned, report=report, shares=shares, by_layer=by_layer, reference=reference,
        saved=None if without else place_elements(out, files[0].layout.is_folder, kinds, paths, permutations), kinds=kinds,
        untie=untie, repair=repair, form=form, alignment=alignment, dtype=dtype, then=then, parameters=parameters,
        recipe=recipe, data=data, loss=loss, seed=seed,
        force=engine_choice.may_replace(running, force, out, *(aligned.written if aligned else ())),
    )  # fmt: skip
    request.check_outputs(files, sources, engine_choice.count_staged(running, out))
    models = inputs.read_models(
        output, files, architecture, input_shape, ignore, check, alignment.data, allow, running,
        lambda opened: engine_choice.check_needs(running, opened, out, opened.checkpoints[0], method, device, dtype),
    )  # fmt: skip
    models.symmetry.restrict(groups or None)
    if reference != "first":  # else the first model, whose layout is written, stays where it is
        check_left(models.checkpoints[0], models.symmetry)
    left_out = outputs.note_left_out(output, paths[0], files[0])
    outputs.show_inputs(output, paths, models)
    summary: dict[str, Any] = {
        "command": "merge", "models": paths, "out": out, "weights": shares, "method": method, "reference": reference,
        "kinds": kinds, "permutations": request.saved and request.saved.paths, "symmetry": models.symmetry.summary(),
    }  # fmt: skip
    if dry_run:
        outputs.finish_dry_run(output, summary, request.paths)
        return
    carry_out(request, output, running, files, models, left_out, summary)


def _check_options(
    paths: Sequence[Path], permutations: Path | None, without: bool, init: Sequence[str] | None, untie: bool, kinds: Kinds
) -> None:
    """Refuse options that do not fit together or to the number of models."""
    if len(paths) < 2:
        raise typer.BadParameter("merging needs at least two checkpoints", param_hint="A B [C ...]")
    if permutations is not None and without:
        raise typer.BadParameter("give one of --permutations and --no-permutations", param_hint="--permutations")
    if init and len(init) not in (1, len(paths) - 1):
        wanted = f"give one for all models, or {len(paths) - 1}: one for each but {paths[0]}"
        raise typer.BadParameter(f"there are {len(init)} starts: {wanted}", param_hint="--init")
    inputs.check_untie(untie, kinds)


def _read_scaling(settings: Sequence[str] | None, kinds: Kinds, objective: str | None, num_models: int) -> ob.Scaling | None:
    """How scales and bases are learned; of both ends only if there are two models."""
    learning = inputs.read_scaling(settings, kinds, objective)
    if learning is not None and learning.both and num_models > 2:
        why = "both=true is for two models; of more, --reference common moves all but the first"
        raise typer.BadParameter(why, param_hint="--scaling")
    return learning


def _choose_repair(name: str, alignment: inputs.AlignmentOptions, suits: bool, shares: Sequence[float]) -> RepairForm | None:
    """The form of a name; "auto" is "repair" where networks run, it suits the merge, and weights are not negative."""
    if name == AUTO:
        return "repair" if alignment.runs_networks and suits and min(shares) >= 0 else None
    form = None if name == "none" else cast(RepairForm, name)
    if form not in (None, *DATA_FREE) and alignment.data is None:
        raise ValueError(f"--repair {name} runs the networks: give --data, or take --repair norms, which needs none")
    return form


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
