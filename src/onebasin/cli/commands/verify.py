"""``onebasin verify``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onebasin.checkpoints import Checkpoint
from onebasin.checkpoints.equivalence import Equivalence, compare_checkpoints
from onebasin.checkpoints.untied_heads import complete_ties
from onebasin.cli import inputs, options
from onebasin.cli.console import Output


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same architecture.")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="The largest difference of the outputs, relative to their size.")
    ] = 1e-9,
    architecture: options.Architecture = None,
    input_shape: options.InputShape = None,
    ignore: options.Ignore = None,
    device: options.RunDevice = "cpu",
    json: options.Json = False,
) -> None:
    """Do two checkpoints compute the same function? Exit code 0: yes, 1: no, or it cannot be shown.

    Runs both in float64, each built from its own configuration unless --model says otherwise, on inputs that range over the
    vocabulary, the positions and the token types. Entries that no input reached are compared directly. If the difference is
    no larger than what rounding to the types of the files makes, as after align --symmetry all, a note says so and names
    the --tolerance that allows it.
    """
    output = Output(json)
    inputs.check_device(device)
    files, untied = complete_ties(inputs.open_files([a, b]), ignore or ())
    models = inputs.read_models(output, files, architecture or untied, input_shape, ignore, check=False)
    architectures = [models.architecture] * 2 if architecture is not None else models.own_architectures()
    with output.status("running both models"):
        found = compare_checkpoints(models, architectures, tolerance, device)
    is_close = found.difference <= tolerance
    same = is_close and not found.different
    notes = [_explain_rounding(found, models.checkpoints)] if not is_close and found.may_be_rounding else []
    output.note(*notes)
    first, second = models.checkpoints
    equal = sum(bool((first[key] == second[key]).all()) for key in first)
    output.show_facts({
        "weights": f"{equal} of {len(first)} tensors equal",
        "inputs": found.describe_inputs(),
        "outputs": f"differ by {found.difference:.2e} relative to their size (tolerance {tolerance:.0e})",
        "not reached": f"{len(found.unreached)} tensors, in part or whole; {len(found.different)} of them differ there"
        + "".join(f"\n{key}" for key in found.different),
        "same function": "yes" if same else "not shown" if is_close or notes else "no",
    })  # fmt: skip
    output.finish({
        "command": "verify", "a": a, "b": b, "same": same, "difference": found.difference, "tolerance": tolerance,
        "equal_tensors": equal, "tensors": len(first), "rounding": found.rounding,
        "notes": [*models.notes, *notes], "num_inputs": found.num_inputs,
        "longest": found.longest, "rows": found.rows, "unreached": found.unreached, "different_unreached": found.different,
    })  # fmt: skip
    if not same:
        raise typer.Exit(1)


def _explain_rounding(found: Equivalence, checkpoints: Sequence[Checkpoint]) -> str:
    types = {value.dtype for checkpoint in checkpoints for value in checkpoint.shapes.values() if value.is_floating_point()}
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
    return (
        f"the outputs differ by no more than rounding all numbers to {names} does (up to {found.rounding:.1e}): scales and "
        "changes of basis are rounded so, permutations are not. --tolerance "
        f"{10.0 ** math.ceil(math.log10(found.difference)):.0e} takes the two as the same"
    )
