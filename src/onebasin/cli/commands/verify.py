"""``onebasin verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onebasin.cli import options, tasks
from onebasin.cli.console import Output


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture.")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Largest difference of the outputs, relative to them.")
    ] = 1e-9,
    model: options.Model = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    json: options.Json = False,
) -> None:
    """Do two checkpoints compute the same function? Runs both in float64 on random inputs. Exit code 0: yes, 1: no."""
    output = Output(json)
    opened = tasks.read_inputs(output, tasks.open_files([a, b]), model, input_shape, ignore, check=False)
    from onebasin.symmetries.verification import compare

    first, second = opened.checkpoints
    architecture = opened.architecture
    difference = compare(architecture.build(), first.load(), second.load(), architecture.example_inputs)
    same = difference <= tolerance
    equal = sum(bool((first[key] == second[key]).all()) for key in first)
    output.facts({
        "weights": f"{equal} of {len(first)} tensors equal",
        "outputs": f"differ by {difference:.2e} relative to their size (tolerance {tolerance:.0e})",
        "same function": "yes" if same else "no",
    })  # fmt: skip
    output.finish({
        "command": "verify", "a": a, "b": b, "same": same, "difference": difference, "tolerance": tolerance,
        "equal_tensors": equal, "tensors": len(first), "notes": tasks.all_notes(opened),
    })  # fmt: skip
    if not same:
        raise typer.Exit(1)
