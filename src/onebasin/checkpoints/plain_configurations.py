"""Configurations from strangers: built without a download, and nothing that they name is read or run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WRAPPERS = ("timm_wrapper", "timm_backbone")
"""Model types that hand their arguments to another package, which reads files and hubs for them."""
_LOADING = ("checkpoint_path", "checkpoint", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "state_dict")
"""Arguments of builders that load weights."""
_ARGUMENTS = ("model_args", "backbone_kwargs")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.|-]*")
_ADDRESS = re.compile(r"(hf[-_]hub|local-dir|file|https?|s3)://?|(hf[-_]hub|local-dir):", re.IGNORECASE)
_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def make_plain(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """A configuration that builds the same architecture without loading anything.

    Pretrained weights of backbones are turned off: those of the checkpoint take their place.

    Raises:
        ValueError: if it asks for code, files or addresses.
    """
    return {key: _check(key, value, file) for key, value in content.items()}


def _check(key: str, value: Any, file: Path) -> Any:
    if key == "auto_map" and value:
        raise ValueError(f"the architecture in {file} is code in that folder, which is never run: give --model")
    if key == "model_type" and value in _WRAPPERS:
        raise ValueError(f"{file} wraps a model of another package ({value}), which may load files: give --model timm:NAME")
    if "_implementation" in key and isinstance(value, str) and not _PLAIN_NAME.fullmatch(value):
        raise ValueError(f"{file} takes {key} from {value!r}, and code is never downloaded: give --model")
    if key in _ARGUMENTS and isinstance(value, dict):
        for name in _LOADING:
            if value.get(name):
                raise ValueError(f"{file} loads weights by {key}.{name}, which is never done: give --model")
    if isinstance(value, str) and _ADDRESS.match(value) and ("backbone" in key or key in ("architecture", "model_name")):
        raise ValueError(f"{file} takes {key} from {value!r}, which is never asked: give --model")
    if key == "use_pretrained_backbone":
        return False
    if isinstance(value, dict):
        return {name: _check(name, inner, file) for name, inner in value.items()}
    if isinstance(value, list):
        return [_check(key, inner, file) for inner in value]
    return value


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """No hub is asked for anything, whatever a configuration names."""
    from huggingface_hub import constants

    before, variables = constants.HF_HUB_OFFLINE, {name: os.environ.get(name) for name in _VARIABLES}
    constants.HF_HUB_OFFLINE = True
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
