"""``onebasin doctor``."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from typing import NamedTuple

import torch
import typer
from rich.table import Table

from onebasin import __version__
from onebasin.cli import options
from onebasin.cli.console import Output
from onebasin.cli.self_check import Check, run_checks

_BASE = ("torch", "numpy", "scipy", "safetensors", "triton")


class Extra(NamedTuple):
    """Optional dependencies: the libraries that an extra installs, and what they add."""

    libraries: tuple[str, ...]
    adds: str


EXTRAS = {
    "cli": Extra(("typer", "rich", "pyyaml", "matplotlib"), "the command onebasin, with its pictures and reports"),
    "plots": Extra(("matplotlib",), "curves, planes, matrices and reports from Python"),
    "assignment": Extra(("lapx",), "a faster solver of large assignments"),
    "hf": Extra(("transformers",), "folders of Hugging Face transformers"),
    "diffusers": Extra(("diffusers", "transformers"), "pipelines and folders of diffusers"),
    "timm": Extra(("timm", "torchvision"), "architectures by name, timm:NAME"),
    "vision": Extra(("torchvision",), "architectures by name, torchvision:NAME"),
    "avalanche": Extra(("avalanche-lib", "torchvision"), "our continual-learning strategies inside Avalanche"),
    "ray": Extra(("ray",), "work on a cluster: --engine ray, and the experiments"),
}
"""By the names in pyproject.toml."""


def doctor(json: options.Json = False) -> None:
    """Show versions, devices and extras, and run a self-check of seconds. Exit code 0: all is well, 1: a check failed."""
    output = Output(json)
    versions = {"onebasin": __version__, "Python": platform.python_version(), **_find_versions(_BASE)}
    devices = _list_devices()
    output.show_facts({
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "platform": platform.platform(),
        "devices": [f"{name}: {what}" for name, what in devices.items()],
    })  # fmt: skip
    found = {name: _find_versions(extra.libraries) for name, extra in EXTRAS.items()}
    _show_extras(output, found)
    with output.status("running the self-check"):
        checks = list(run_checks([name for name in devices if not name.startswith("mps")]))  # which has no float64
    _show_checks(output, checks)
    failed = [check.name for check in checks if check.passed is False]
    output.show(f"{len(failed)} of {len(checks)} checks failed" if failed else "all is well")
    output.finish({
        "command": "doctor", "versions": versions, "platform": platform.platform(), "devices": devices,
        "extras": {
            name: {"present": len(found[name]) == len(extra.libraries), "versions": found[name], "adds": extra.adds}
            for name, extra in EXTRAS.items()
        },
        "checks": [asdict(check) for check in checks], "ok": not failed,
    })  # fmt: skip
    if failed:
        raise typer.Exit(1)


def _find_versions(libraries: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _list_devices() -> dict[str, str]:
    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple's graphics processor"
    return devices


def _show_extras(output: Output, found: dict[str, dict[str, str]]) -> None:
    table = _make_table("extra", "installed", "adds")
    for name, extra in EXTRAS.items():
        missing = [library for library in extra.libraries if library not in found[name]]
        present = [f"{library} {version}" for library, version in found[name].items()]
        table.add_row(name, ", ".join([*present, *(f"no {library}" for library in missing)]), extra.adds)
    output.show(table)
    absent = [name for name, extra in EXTRAS.items() if len(found[name]) < len(extra.libraries)]
    if absent:
        output.show(f"to add one: pip install 'onebasin[{absent[0]}]'")


def _show_checks(output: Output, checks: list[Check]) -> None:
    table = _make_table("check", "", "found", "seconds")
    for check in checks:
        mark = {True: "yes", False: "FAILED", None: "-"}[check.passed]
        table.add_row(check.name, mark, check.detail, f"{check.seconds:.1f}")
    output.show(table)


def _make_table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table
