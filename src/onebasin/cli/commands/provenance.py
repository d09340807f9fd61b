"""``onebasin provenance``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import onebasin as ob
from onebasin.checkpoints import Checkpoint
from onebasin.cli import inputs, options, outputs
from onebasin.cli.console import Output, escape_controls
from onebasin.cli.engine_choice import choose_engine, list_engine_facts, list_engine_values, take_timeline
from onebasin.cli.run_record import record_run
from onebasin.lineage.layer_stacks import find_stack

EXIT_CODES = {"same": 0, "derived": 0, "independent": 1, "unknown": 4}


def provenance(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture, or with more or fewer blocks.")],
    level: Annotated[
        float, typer.Option("--level", metavar="P", help="The p-value from which on they count as derived.")
    ] = 1e-6,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="SHARE", help="Of units that may agree because both networks learned the same features."
        ),
    ] = 0.05,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    check: options.Check = None,
    kinds: options.Kinds = "permutation",
    seed: options.Seed = 0,
    engine: options.Engine = None,
    workers: options.Workers = None,
    address: options.Address = None,
    memory: options.Memory = None,
    report: options.ReportFile = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Does one checkpoint come from the other? Exit code 0: same or derived, 1: independent, 4: cannot tell.

    Looks for an exact copy up to symmetry, then tests every group of units: are they in the same places, and do the parts of
    their weights that the random start left agree? Without data, and tensor by tensor; with --symmetry positive or all,
    which also finds what was rescaled or rotated, both models are loaded.
    """
    output = Output(json)
    running = choose_engine(output, engine, workers, address, memory)
    if running.is_remote and kinds != "permutation":
        raise ValueError(f"--engine {engine} reads files, and --symmetry {kinds} loads both models: take one of them")
    files = inputs.open_files([a, b])
    outputs.check_files([report], [*files, *inputs.list_input_files([architecture], [architecture])], force)
    together: list[Sequence[Checkpoint]] = [files]
    if find_stack(*files) is not None:
        if kinds != "permutation":
            raise ValueError("checkpoints with different numbers of blocks are compared up to permutations only")
        together = [[file] for file in sorted(files, key=lambda file: len(file.shapes))]  # the symmetry is of the first
    opened = [
        inputs.read_models(output, some, architecture, input_shape, ignore, check, allow=True, engine=running)
        for some in together
    ]
    models = opened[0]
    record = record_run(output, [a, b], files, seed, running) if report else None
    states: list[Any] = [checkpoint for each in opened for checkpoint in each.checkpoints]
    known: dict[str, Any] = {"symmetry": models.symmetry}
    if kinds != "permutation":
        states, known = list(models.load()), {"example_inputs": models.architecture.example_inputs}
    one, other = states
    with output.progress() as progress, running.meter.reporting(progress):
        found = ob.provenance(
            one, other, kinds=kinds, level=level, tolerance=tolerance, seed=seed, progress=progress, engine=running, **known
        )
    output.note(*found.notes)
    output.show(found.answer)
    output.show(_table(found))
    if spent := list_engine_facts(running):
        output.show_facts(spent)
    facts = {**spent, "A": a, "B": b, "answer": found.answer, "notes": " ".join(found.notes)}
    outputs.save_report(report, f"Do {a.name} and {b.name} belong together?", facts, record, evidence=found.evidence,
                        **take_timeline(running))  # fmt: skip
    if report is not None:
        output.show(f"wrote {report}")
    output.finish({
        "command": "provenance", "a": a, "b": b, "relation": found.relation, "answer": found.answer,
        "p_value": found.p_value, "p_values": dict(found.p_values), "level": level, "tolerance": tolerance,
        "layers": found.layers, "changes": dict(found.changes),
        "evidence": [dataclasses.asdict(each) for each in found.evidence], "report": report,
        "seconds": found.seconds, "notes": [*models.notes, *found.notes],
        **list_engine_values(running),
    })  # fmt: skip
    raise typer.Exit(EXIT_CODES[found.relation])


def _table(found: ob.Provenance) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name in ("test", "group", "units", "agree", "p"):
        table.add_column(name, justify="left" if name in ("test", "group") else "right", overflow="fold")
    for each in found.evidence:
        counts = (str(each.num_units), str(each.num_agreeing), f"{each.p_value:.2g}")
        table.add_row(each.test, escape_controls(each.group), *counts)
    return table
