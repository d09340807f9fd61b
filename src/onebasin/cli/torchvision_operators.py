"""For a torchvision that was built for CUDA beside a PyTorch that was not: the operators that it lacks.

It cannot load its compiled operators there, and then fails to be imported, because it says more about two of them. Networks
do not need them, but many libraries import torchvision. So the command declares the two in its own process; calling one of
them is still an error. The library does no such thing.
"""

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
_libraries: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Declare the operators that keep torchvision from being imported, if it is installed and does not fit."""
    if _libraries or torch.version.cuda is not None or not _is_built_for_cuda():
        return
    _libraries.append(torch.library.Library("torchvision", "DEF"))
    for name in _OPERATORS:
        _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _is_built_for_cuda() -> bool:
    """Whether torchvision says so in its version, such as 0.28.0+cu130. It is not imported."""
    found = importlib.util.find_spec("torchvision")
    version = Path(found.origin).with_name("version.py") if found is not None and found.origin is not None else None
    return version is not None and version.is_file() and "+cu" in version.read_text(encoding="utf-8")
