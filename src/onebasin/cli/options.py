"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from onebasin.matching.methods import MethodName

_MODEL, _METHOD, _DATA, _OUTPUT = "Model", "Method", "Data", "Output"

Architecture = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="ARCHITECTURE",
        help="The architecture: package.module:factory, torchvision:NAME, timm:NAME, or a Hugging Face folder. "
        "Not needed if a checkpoint is such a folder.",
        rich_help_panel=_MODEL,
    ),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="SHAPE",
        help="The shape of an example input: 1,3,32,32 or 1,8:long or input_ids=1,8:long. Once for each input. "
        "Not needed for torchvision, timm and Hugging Face models, or with --data.",
        rich_help_panel=_MODEL,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="PATTERN",
        help="Leave tensors with such names as they are, if the model does not have them. Repeat for more.",
        rich_help_panel=_MODEL,
    ),
]
Check = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        help="Verify the symmetry on random weights in float64. By default for models of up to 50 million parameters.",
        rich_help_panel=_MODEL,
    ),
]

Method = Annotated[
    Literal["auto", MethodName],
    typer.Option(
        "--method",
        metavar="METHOD",
        help="auto (chooses by the data and the size of the networks, and says why), sinkhorn, weight-matching (reads "
        "tensor by tensor), activation-matching (needs --data) or ste.",
        rich_help_panel=_METHOD,
    ),
]
Objective = Annotated[
    Literal["weight-distance", "midpoint", "random-point"] | None,
    typer.Option(
        "--objective",
        metavar="OBJECTIVE",
        help="What to minimise: weight-distance (the default), or the loss between the networks on --data: midpoint or "
        "random-point.",
        rich_help_panel=_METHOD,
    ),
]
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="METHOD|FILE", help="Start from the result of a method, or from a saved permutation.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Groups = Annotated[
    list[str] | None,
    typer.Option("--groups", metavar="PATTERN", help="Move only the groups with such names. Repeat for more.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", help="For everything random.", rich_help_panel=_METHOD)]
Restarts = Annotated[
    int,
    typer.Option("--restarts", min=0, metavar="N", help="Run again from N random permutations and keep the best result.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Polish = Annotated[
    bool | None,
    typer.Option("--polish/--no-polish", help="End with sweeps of weight matching. By default after sinkhorn without data.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
DetectCopy = Annotated[
    bool,
    typer.Option("--detect-copy/--no-detect-copy", help="Without data, first look for a permuted copy.",
                 rich_help_panel=_METHOD),
]  # fmt: skip
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An option of the method: steps=50, max_sweeps=3, ... Repeat for more.",
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
    typer.Option("--loss", metavar="LOSS", help="cross-entropy, mse, l1, bce, or package.module:function(output, target).",
                 rich_help_panel=_DATA),
]  # fmt: skip

Out = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="OUT", help="The checkpoint to write: a file, or a folder if the input is one.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Write a report: one HTML file. With --data it has loss curves.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace outputs that exist.", rich_help_panel=_OUTPUT)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the inputs, say what would be done, write nothing.", rich_help_panel=_OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.", rich_help_panel=_OUTPUT)]
