"""``onebasin verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onebasin.cli import inputs, options
from onebasin.cli.console import Output
from onebasin.symmetries.verification import compare


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture.")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="The largest difference of the outputs, relative to their size.")
    ] = 1e-9,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    json: options.Json = False,
) -> None:
    """Do two checkpoints compute the same function? Runs both in float64 on random inputs. Exit code 0: yes, 1: no."""
    output = Output(json)
    models = inputs.read_models(output, inputs.open_files([a, b]), architecture, input_shape, ignore, check=False)
    first, second = models.checkpoints
    example_inputs = models.architecture.example_inputs
    difference = compare(models.architecture.build(), first.load(), second.load(), example_inputs)
    same = difference <= tolerance
    equal = sum(bool((first[key] == second[key]).all()) for key in first)
    output.show_facts({
        "weights": f"{equal} of {len(first)} tensors equal",
        "outputs": f"differ by {difference:.2e} relative to their size (tolerance {tolerance:.0e})",
        "same function": "yes" if same else "no",
    })  # fmt: skip
    output.finish({
        "command": "verify", "a": a, "b": b, "same": same, "difference": difference, "tolerance": tolerance,
        "equal_tensors": equal, "tensors": len(first), "notes": models.notes,
    })  # fmt: skip
    if not same:
        raise typer.Exit(1)
