"""The options that several commands have, said once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_MODEL, _METHOD, _DATA, _OUTPUT = "Model", "Method", "Data", "Output"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Architecture: package.module:factory, torchvision:resnet50, timm:NAME, or a Hugging Face folder. "
        "Not needed if a checkpoint is such a folder.",
        rich_help_panel=_MODEL,
    ),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="SHAPE",
        help="Of an example input: 1,3,32,32 or 1,8:long or input_ids=1,8:long. Once for each input. "
        "Not needed where it is known, or --data is given.",
        rich_help_panel=_MODEL,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="PATTERN",
        help="Tensors in the files that are not the model's: left as they are. Repeat for more.",
        rich_help_panel=_MODEL,
    ),
]
Check = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        help="Check the symmetry on random weights in float64. By default for models of up to 50 million parameters.",
        rich_help_panel=_MODEL,
    ),
]

MethodName = Literal["weight-matching", "sinkhorn", "activation-matching", "ste"]
Method = Annotated[
    MethodName,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="weight-matching (reads tensor by tensor, needs no data), sinkhorn, activation-matching or ste "
        "(hold the models in memory).",
        rich_help_panel=_METHOD,
    ),
]
Objective = Annotated[
    Literal["weight-distance", "midpoint", "random-point"],
    typer.Option(
        "--objective",
        metavar="GOAL",
        help="What to minimise: weight-distance, midpoint or random-point (the loss between the networks, on --data).",
        rich_help_panel=_METHOD,
    ),
]
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="METHOD|FILE", help="Start from a method's result, or from a saved permutation.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Groups = Annotated[
    list[str] | None,
    typer.Option("--groups", metavar="PATTERN", help="Move only groups with such names. Repeat for more.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", help="For everything random.", rich_help_panel=_METHOD)]
Restarts = Annotated[
    int,
    typer.Option("--restarts", min=0, metavar="N", help="Further runs from random permutations.", rich_help_panel=_METHOD),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Option of the method: steps=50, max_sweeps=3, ... Repeat for more.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, ...", rich_help_panel=_METHOD)]

Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="package.module:function that returns (inputs, target) batches, or digits.",
                 rich_help_panel=_DATA),
]  # fmt: skip
Loss = Annotated[
    str,
    typer.Option("--loss", metavar="LOSS", help="cross-entropy, mse, l1, bce, or package.module:function.",
                 rich_help_panel=_DATA),
]  # fmt: skip

Out = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="OUT", help="Where to write: a file, or a folder if the checkpoint is one.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Write a report that opens anywhere. With --data it has the curves.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace outputs that exist.", rich_help_panel=_OUTPUT)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.", rich_help_panel=_OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.", rich_help_panel=_OUTPUT)]


def read_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """NAME=VALUE as options: numbers, true, false and none as such, everything else as text.

    >>> read_settings(["steps=50", "lr=1e-2", "polish=false", "order=anchored"])
    {'steps': 50, 'lr': 0.01, 'polish': False, 'order': 'anchored'}
    """
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    result: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not (name.isidentifier() and equals and text):
            raise typer.BadParameter(f"cannot read {setting!r}: write NAME=VALUE", param_hint="--set")
        value: Any = words.get(text.lower(), text)
        for kind in (int, float):
            if isinstance(value, str):
                try:
                    value = kind(value)
                except ValueError:
                    continue
        result[name] = value
    return result
