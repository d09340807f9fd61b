"""The options that several commands share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

import typer

from onebasin.checkpoints.written_types import TypeName
from onebasin.engines import EngineName
from onebasin.landscape.calibration import RepairForm
from onebasin.matching.methods import MethodName

_model, _method, _data, _output, _engine = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Method", "Data", "Output", "Engine")
)

Architecture = Annotated[
    str | None,
    _model("--model", "-m", metavar="ARCHITECTURE",
           help="The architecture: package.module:factory, torchvision:NAME, timm:NAME, or a Hugging Face folder. "
           "Not needed if a checkpoint is such a folder."),
]  # fmt: skip
InputShape = Annotated[
    list[str] | None,
    _model("--input-shape", metavar="SHAPE",
           help="The shape of an example input: 1,3,32,32 or 1,8:long or input_ids=1,8:long. Once for each input. "
           "Not needed for torchvision, timm and Hugging Face models, or with --data."),
]  # fmt: skip
Ignore = Annotated[
    list[str] | None,
    _model("--ignore", metavar="PATTERN",
           help="Leave tensors with such names as they are, if the model does not have them. Repeat for more."),
]  # fmt: skip
Check = Annotated[
    bool | None,
    _model("--check/--no-check",
           help="Verify the symmetry on random weights in float64. By default for models of up to 50 million parameters."),
]  # fmt: skip
Allow = Annotated[
    bool,
    _model(
        "--allow", help="Take models together although their configurations or tokenizers differ. Notes name what differs."
    ),
]

Method = Annotated[
    Literal["auto", MethodName],
    _method("--method", metavar="METHOD",
            help="auto (chooses by the data and the size of the networks, and says why), sinkhorn, weight-matching (reads "
            "tensor by tensor), activation-matching (needs --data), ste or exchange (from --init)."),
]  # fmt: skip
Kinds = Annotated[
    Literal["permutation", "positive", "all"],
    _method("--symmetry", metavar="KINDS",
            help="Which symmetry to use: permutation of units; positive, scales of units too; or all, changes of basis as "
            "well, such as rotations of a residual stream. The last two load small models, and those that are run."),
]  # fmt: skip
Untie = Annotated[
    bool,
    _method("--untie", help="Give a head that is tied to the embedding a tensor of its own, where a gain can be folded into "
            "it only then. The configuration of OUT says tie_word_embeddings: false."),
]  # fmt: skip
Objective = Annotated[
    Literal["weight-distance", "midpoint", "random-point"] | None,
    _method("--objective", metavar="OBJECTIVE",
            help="What to minimise: weight-distance (the default), or the loss between the networks on --data: midpoint or "
            "random-point."),
]  # fmt: skip
Low = Annotated[
    float | None,
    _method("--low", metavar="WEIGHT",
            help="With --objective random-point, the smallest weight of the moved network in the points. By default 0."),
]  # fmt: skip
High = Annotated[
    float | None,
    _method("--high", metavar="WEIGHT",
            help="With --objective random-point, the largest weight of the moved network in the points. By default 1."),
]  # fmt: skip
Repaired = Annotated[
    bool | None,
    _method("--repaired/--not-repaired", help="With --objective midpoint or random-point, take the loss of networks without "
            "norms with their statistics put right, as --repair does afterwards. By default where merge repairs."),
]  # fmt: skip
Init = Annotated[
    str | None,
    _method(
        "--init", metavar="METHOD|FILE", help="Start from the result of a method, or from a saved permutation or transform."
    ),
]
Inits = Annotated[
    list[str] | None,
    _method("--init", metavar="METHOD|FILE",
            help="Start from the result of a method, or from a saved permutation or transform: once for all models, or once "
            "for each but A, in their order."),
]  # fmt: skip
Groups = Annotated[
    list[str] | None,
    _method("--groups", metavar="PATTERN", help="Move only the groups with such names. Repeat for more."),
]
Seed = Annotated[int, _method("--seed", help="The seed of all random numbers.")]
Restarts = Annotated[
    int,
    _method("--restarts", min=0, metavar="N", help="Run again from N random permutations and keep the best result."),
]
Polish = Annotated[
    bool | None,
    _method("--polish/--no-polish", help="End with sweeps of weight matching. By default after sinkhorn without data."),
]
DetectCopy = Annotated[
    bool, _method("--detect-copy/--no-detect-copy", help="First look whether the model is a permuted copy of the target.")
]
Settings = Annotated[
    list[str] | None,
    _method("--set", metavar="NAME=VALUE",
            help="An option of the method: steps=50, max_sweeps=3, ... With auto, of sinkhorn, which is then the method. "
            "Repeat for more. How scales and bases are learned is set by --scaling."),
]  # fmt: skip
Scaling = Annotated[
    list[str] | None,
    _method("--scaling", metavar="NAME=VALUE",
            help="With --symmetry positive or all, how scales and bases are learned after the method: steps=100 (0: none "
            "is), lr=0.05, basis_lr=0.01, limit=2, both=true (of the target too, on --data). Repeat for more."),
]  # fmt: skip
Device = Annotated[str, _method("--device", help="Where to compute: cpu, cuda, ...")]
RunDevice = Annotated[str, _model("--device", help="Where to run the models: cpu, cuda, ...")]

Data = Annotated[
    str | None,
    _data("--data", metavar="DATA", help="package.module:function that returns (inputs, target) batches, or digits."),
]
Loss = Annotated[
    str, _data("--loss", metavar="LOSS", help="cross-entropy, mse, l1, bce, or package.module:function(output, target).")
]

Repair = Annotated[
    RepairForm | None,
    _data("--repair", help="Put the statistics of mixed units right: on --data or, for norms and bias, without any."),
]
LineRepair = Annotated[
    RepairForm | None,
    _data("--repair", help="On the lines of the report, put the statistics of mixed units right in this form."),
]
MergeRepair = Annotated[
    Literal[RepairForm, "auto", "none"],
    _data("--repair", help="Put the statistics of mixed units right: on --data or, for norms and bias, without any. auto: "
          "repair, where the alignment runs the networks on --data."),
]  # fmt: skip

Out = Annotated[
    Path,
    _output("--out", "-o", metavar="OUT", help="The checkpoint to write: a file, or a folder if the input is one."),
]
OutType = Annotated[
    TypeName | None,
    _output("--out-dtype", metavar="TYPE", help="The type of the floating tensors in OUT, and in its configuration: "
            "float64, float32, float16 or bfloat16. By default as in the input."),
]  # fmt: skip
ModelOnly = Annotated[
    bool,
    _output("--model-only", help="Of a training checkpoint, write the model alone: without the optimiser's state and other "
            "entries, which otherwise move with it."),
]  # fmt: skip
ReportFile = Annotated[
    Path | None,
    _output("--report", metavar="FILE.html", help="Write a report: one HTML file. With --data it has loss curves."),
]
Force = Annotated[
    bool,
    _output("--force", help="Replace outputs that exist: files, and folders in which every file is one that this command "
            "writes. A folder that holds anything else is refused, and inputs are never replaced."),
]  # fmt: skip
DryRun = Annotated[
    bool, _output("--dry-run", help="Check the inputs, say what would be written and replaced, write nothing.")
]
Json = Annotated[bool, _output("--json", help="Print one JSON object on standard output.")]

Engine = Annotated[
    EngineName | None,
    _engine("--engine", metavar="ENGINE",
            help="Where to read, compare and write tensors: local, processes (workers on this machine) or ray (a cluster). "
            "The results are the same bits. Serves weight-matching and --symmetry permutation."),
]  # fmt: skip
Workers = Annotated[
    int | None, _engine("--workers", min=1, metavar="N", help="How many work at a time. By default one for each core.")
]
Address = Annotated[
    str | None,
    _engine("--address", metavar="ADDRESS", help="Of the Ray cluster. By default RAY_ADDRESS, or one on this machine."),
]
Memory = Annotated[
    str | None,
    _engine("--memory", metavar="SIZE", help="What all processes on this machine may hold, such as 8GB. By default what is "
            "free. Work that needs more is refused before it begins."),
]  # fmt: skip
Resume = Annotated[
    bool,
    _engine("--resume", help="Go on from what a killed run of the same command has decided and written. It is kept in a "
            "hidden folder beside OUT by runs with --engine, and removed at their end."),
]  # fmt: skip
