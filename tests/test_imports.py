"""Data flows one way: a package imports only packages above it, has no cycles inside, and hides no import in a function."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import onebasin

ROOT = Path(onebasin.__file__).parent
PACKAGES = [
    "startup", "torch_internals", "plots", "tensors", "engines", "datasets", "programs", "symmetries", "tracing",
    "landscape", "operator", "relaxation", "descent", "matching", "lineage", "continual", "checkpoints", "reporting", "",
    "cli", "__main__",
]  # fmt: skip
"""In data-flow order; "" is the package itself, which collects the public names."""

OPTIONAL = {"onebasin.operator.kernels", "onebasin.descent.adam_kernel"}
"""Modules of ours that need an optional dependency: they may be imported inside functions, as that dependency may."""


def module_name(path: Path) -> str:
    parts = [*path.relative_to(ROOT.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in ROOT.rglob("*.py")}


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def imports_of(module: str) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a module imports anywhere in its text, and whether inside a function or a condition."""
    tree = ast.parse(FILES[module].read_text())
    for node in ast.walk(tree):
        nested = node not in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, nested) for alias in node.names if alias.name.split(".")[0] == "onebasin")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names if (node.module or "").split(".")[0] == "onebasin" else ():
                child = f"{node.module}.{alias.name}"
                yield (child if child in FILES else node.module or "", nested)


def test_every_room_has_its_place():
    assert {package_of(module) for module in FILES} == set(PACKAGES)


def test_the_top_level_holds_rooms_and_few_files():
    assert len([path for path in ROOT.iterdir() if path.is_file()]) <= 5


def test_rooms_import_rooms_above_them():
    for module in FILES:
        for other, _ in imports_of(module):
            assert PACKAGES.index(package_of(other)) <= PACKAGES.index(package_of(module)), f"{module} imports {other}"


def test_no_room_has_cycles():
    graph = {module: {other for other, _ in imports_of(module)} - {module} for module in FILES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_no_import_is_hidden():
    for module in FILES:
        for other, nested in imports_of(module):
            optional = any(other == name or other.startswith(f"{name}.") for name in OPTIONAL)
            assert not nested or optional, f"{module} imports {other} inside a function or a condition"


def test_import_needs_the_base_dependencies_alone():
    code = "import sys, onebasin; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    optional = {"matplotlib", "rich", "typer", "torchvision", "transformers", "lap", "avalanche", "triton"}
    assert not loaded & {*optional, "pytest"}


def test_private_names_of_pytorch_are_in_one_file():
    private = re.compile(
        r"torch\._|from torch[\w.]*\._|from torch[\w.]* import _|_pytree|\._schema|\._cdata|\._overloadname"
    )
    for module, path in FILES.items():
        if module != "onebasin.torch_internals":
            assert not private.search(path.read_text()), f"{module} uses a private name of PyTorch"
