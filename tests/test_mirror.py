"""Tests mirror modules: ``relaxation/hardening.py`` is tested in ``tests/relaxation/test_hardening.py``.

What stands in the ``__init__.py`` of a folder is tested in a file with the name of the folder: ``tracing/test_tracing.py``.
"""

import ast
from pathlib import Path

import onebasin

SOURCE = Path(onebasin.__file__).parent
TESTS = Path(__file__).parent

_KERNEL = "a Triton kernel: it is launched, and compared with PyTorch, in "
EXCEPTIONS = {
    "descent/adam_kernel.py": f"{_KERNEL}descent/test_adam.py",
    "operator/kernels/all_reduce.py": f"{_KERNEL}operator/test_kernels.py",
    "operator/kernels/barrier.py": f"{_KERNEL}operator/test_kernels.py",
    "operator/kernels/resident.py": f"{_KERNEL}operator/test_kernels.py",
    "operator/kernels/shortest_paths.py": f"{_KERNEL}operator/test_kernels.py",
    "operator/kernels/streaming_gradient.py": f"{_KERNEL}operator/test_kernels.py",
    "operator/kernels/streaming_rounds.py": f"{_KERNEL}operator/test_kernels.py",
}
"""Modules with behaviour that have no test file of their own, each with the reason."""


def has_behaviour(path: Path) -> bool:
    """Whether a module defines a function or a class, and not only names."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.parse(path.read_text()).body)


def mirror(path: Path) -> Path:
    """Where a module is tested."""
    stem = path.parent.name if path.stem == "__init__" else path.stem
    return TESTS / path.relative_to(SOURCE).parent / f"test_{stem}.py"


MODULES = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py") if has_behaviour(path)}


def test_every_module_with_behaviour_has_its_test_file():
    missing = {module for module, path in MODULES.items() if not mirror(path).is_file()}
    assert missing == EXCEPTIONS.keys()


def test_exceptions_are_tested_where_they_say():
    for module, reason in EXCEPTIONS.items():
        assert (TESTS / reason.split()[-1]).is_file(), module


def test_mirrors_have_tests():
    for module in MODULES.keys() - EXCEPTIONS.keys():
        nodes = ast.walk(ast.parse(mirror(MODULES[module]).read_text()))
        assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes), module
