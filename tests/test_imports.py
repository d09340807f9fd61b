"""Data flows one way: a file imports only what stands above it in this list. (Imports inside functions are exempt.)"""

import ast
from pathlib import Path

import onebasin

ORDER = [
    "layout", "files", "seeding", "state", "lazy", "gather", "structure", "permutation", "table",
    "tracing.terms", "tracing.unification", "tracing.scopes", "tracing.belongings", "tracing.shapes", "tracing.graph",
    "tracing.precision",
    "tracing.recording", "tracing.exporting", "tracing.programs", "tracing.walk",
    "tracing.rules.contraction", "tracing.rules.convolution", "tracing.rules.normalization", "tracing.rules.elementwise",
    "tracing.rules.reduction", "tracing.rules.rearrangement", "tracing.rules.indexing",
    "tracing.rules.attention", "tracing.rules.recurrent", "tracing.rules",
    "tracing.result", "tracing.verification", "tracing",
    "operator.rounds", "operator.adjoint", "operator.kernels", "operator.kernels.mail", "operator.kernels.strip",
    "operator.kernels.team", "operator.launching", "operator.implicit", "operator.unrolled", "operator.entry", "operator",
    "assignment", "hardening", "network", "distance", "objectives", "adam_kernel", "adam", "capturing",
    "interpolation", "batches", "calibration", "connectivity", "evaluation", "plots", "pictures", "datasets",
    "matching.problem", "matching.scores", "matching.copies", "matching.weights", "matching.sinkhorn",
    "matching.straight_through",
    "matching.activations", "matching", "alignment", "merging", "report",
    "continual.metrics", "continual.samples", "continual.stepping", "continual.memory", "continual.streams",
    "continual.strategy", "continual.evaluation", "continual.finetune", "continual.replay", "continual.ewc", "continual.lwf",
    "continual.agem", "continual.derpp", "continual.joint", "continual.halfway", "continual.rebasin",
    "continual.avalanche", "continual",
    "checkpoints.reading", "checkpoints.naming", "checkpoints.writing", "checkpoints.attachments", "checkpoints.applying",
    "checkpoints.architectures", "checkpoints.opening", "checkpoints", "", "demo",
    "cli.console", "cli.options", "cli.tasks", "cli.curves", "cli.align", "cli.merge", "cli.apply", "cli.inspect",
    "cli.barrier", "cli.verify", "cli.demo", "cli.app", "cli", "__main__",
]  # fmt: skip
ROOT = Path(onebasin.__file__).parent


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {c for c in children if c.removeprefix("onebasin.") in ORDER}
            found |= modules or {node.module or ""}
    return {f.removeprefix("onebasin").removeprefix(".") for f in found if f.split(".")[0] == "onebasin"}


def test_every_file_has_its_place():
    assert sorted(module_name(p) for p in ROOT.rglob("*.py")) == sorted(ORDER)


def test_imports_point_backwards():
    for path in ROOT.rglob("*.py"):
        name = module_name(path)
        for other in imported(path):
            assert ORDER.index(other) < ORDER.index(name), f"{name} imports {other}, which stands below it"


def test_import_needs_torch_numpy_and_scipy_alone():
    import subprocess
    import sys

    code = "import sys, onebasin; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {
        "safetensors",
        "matplotlib",
        "rich",
        "typer",
        "torchvision",
        "transformers",
        "lap",
        "avalanche",
        "pytest",
    }
