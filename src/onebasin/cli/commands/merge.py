"""``onebasin merge``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onebasin.cli import curves, options, tasks
from onebasin.cli.console import Output

if TYPE_CHECKING:
    from onebasin.checkpoints import Opened
    from onebasin.symmetries import Permutation


def merge(
    models: Annotated[list[Path], typer.Argument(metavar="A B [C ...]", help="Checkpoints of one architecture.")],
    out: options.Out,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="W,W,...", help="Of the models in the average. Equal if not given.",
                     rich_help_panel="Method"),
    ] = None,
    to: Annotated[
        Literal["first", "mean"],
        typer.Option("--to", help="Align all to the first, or each to the mean of the others until nothing moves.",
                     rich_help_panel="Method"),
    ] = "first",
    repair: Annotated[
        bool, typer.Option("--repair", help="Correct the merged network's statistics on --data.", rich_help_panel="Data")
    ] = False,
    model: options.Model = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    method: options.Method = "weight-matching",
    objective: options.Objective = "weight-distance",
    data: options.Data = None,
    loss: options.Loss = "cross-entropy",
    groups: options.Groups = None,
    seed: options.Seed = 0,
    restarts: options.Restarts = 0,
    settings: options.Settings = None,
    device: options.Device = "cpu",
    report: options.ReportFile = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:  # fmt: skip
    """Align checkpoints and average them into one.

    The result has the layout, the types and, from a Hugging Face folder, the configuration and tokenizer of A.
    """
    output = Output(json)
    if len(models) < 2:
        raise typer.BadParameter("merging needs at least two checkpoints", param_hint="A B [C ...]")
    shares = _read_weights(weights, len(models))
    choices = tasks.read_choices(method, objective, data, loss, None, groups, seed, restarts, settings, device)
    if repair and choices.data is None:
        raise ValueError("--repair runs the networks: give --data")
    files = tasks.open_files(models)
    tasks.check_outputs(out, files[0], models, [report], force)
    tasks.check_drawing(report)
    opened = tasks.read_inputs(output, files, model, input_shape, ignore, check, choices.data)
    opened.symmetry.restrict(groups)
    like = opened.checkpoints[0]
    names = tasks.short_names(models)
    record: dict[str, Any] = {
        "command": "merge", "models": models, "out": out, "weights": shares, "method": method, "to": to,
    }  # fmt: skip
    tasks.show_inputs(output, models, opened)
    if dry_run:
        output.show(f"would write {tasks.list_paths(out, report)}; nothing was written")
        output.finish({**record, "dry_run": True, "symmetry": opened.symmetry.summary()})
        return
    import onebasin as ob

    history: list[dict[str, Any]] = []
    found: list[Any] = []
    with output.progress() as track, tasks.blame_data(choices.data):
        lines = curves.lines_for_report(report, opened, data, loss)
        paths = lines.measure(_others(names, opened.checkpoints), track) if lines else {}
        chosen = opened.load() if repair else choices.models(opened)
        arguments = {**choices.arguments(track), "callback": history.append, "on_aligned": found.extend}
        arguments.pop("init")
        merged = ob.merge(
            chosen, weights=shares, repair=choices.data if repair else None, symmetry=opened.symmetry, to=to, **arguments
        )
        state = tasks.in_types_of(like, merged)
        tasks.write_moved(out, state, like, force, track)
        paths |= lines.measure(_others(names, _seen_from_first(found, opened), ", aligned"), track) if lines else {}
        measured = lines.evaluate_state(state) if lines else {}
    permutations = {name: moves for name, moves in zip(names, found, strict=True) if not moves.is_identity}
    facts = {
        "weights": ", ".join(f"{share:.4g}" for share in shares),
        "method": method,
        **{f"{name} of the merge": f"{value:.4g}" for name, value in measured.items()},
        **{name: tasks.describe_moves(moves) for name, moves in permutations.items()},
    }
    title = "Merge of " + ", ".join(names)
    tasks.save_report(
        report, title, {**facts, "written": out}, symmetry=opened.symmetry, permutations=permutations, paths=paths
    )
    output.facts({**facts, "wrote": "\n".join(str(path) for path in (out, report) if path is not None)})
    ended = {"report": report, "history": history, "symmetry": opened.symmetry.summary(), "notes": tasks.all_notes(opened)}
    output.finish({**record, **ended, "merged": measured, "paths": curves.record(paths)})


def _seen_from_first(permutations: Sequence[Permutation], opened: Opened) -> list[Any]:
    """The aligned models, all moved so that the first, which may have moved too, is where it was: the lines are the same."""
    back = permutations[0].inverse()
    return [(back @ own).apply(file) for own, file in zip(permutations, opened.checkpoints, strict=True)]


def _others(names: Sequence[str], states: Sequence[Any], ending: str = "") -> dict[str, Any]:
    """All but the first, by the line to them."""
    return {f"{names[0]} to {name}{ending}": state for name, state in zip(names[1:], states[1:], strict=True)}


def _read_weights(text: str | None, count: int) -> list[float]:
    if text is None:
        return [1 / count] * count
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"cannot read --weights {text!r}: write numbers with commas between, such as 0.7,0.3") from None
    if len(weights) != count:
        raise ValueError(f"{count} checkpoints need {count} weights, got {len(weights)}")
    if not sum(weights) or not math.isfinite(sum(weights)):
        raise ValueError(f"the weights must have a sum other than zero, got --weights {text}")
    return weights
