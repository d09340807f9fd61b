"""Why a call could not be traced: what the front ends raise, and what the user is told."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


class NotRecordable(Exception):
    """A call that cannot be recorded, with the reason."""


class ModuleFails(NotRecordable):
    """The module raises an error, or one of its operations does."""


class ReadsValues(NotRecordable):
    """The module reads the value of a tensor."""


class NeedsValues(NotRecordable):
    """An operation whose result has a size that depends on values, or that cannot be inferred without them."""


class ReadsIntegers(NotRecordable):
    """The module reads values of integer inputs, and does not take others than those of the example."""

    def __init__(self, line: str, failure: NotRecordable):
        super().__init__(f"what it does depends on values of integer inputs ({line}), and it fails at others: {failure}")


class SwallowedError(ReadsValues):
    """The module caught the error that there is no value to read, and went on. In an export it would do the same."""


class NotTraceable(NotRecordable):
    """A call whose operations no front end can see."""


class NotExportable(Exception):
    """A call that cannot be exported, with the reason."""


_OWN = {inspect.getfile(contextlib)}


def describe_error(error: BaseException) -> str:
    """The type of an error and the first sentence of its message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "").partition(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def explain_failure(model: nn.Module, recording: NotRecordable, export: NotExportable | None = None) -> str:
    """Say in one sentence why a call cannot be traced, what the likely cause is, and what to do."""
    name = f"cannot trace {type(model).__name__}"
    by_hand = "write the symmetry by hand with onebasin.Symmetry.from_axes and check it with verify"
    if isinstance(recording, SwallowedError):
        return f"{name}: it catches the error that a value cannot be read ({recording}), and goes on; {by_hand}"
    if isinstance(recording, (NotTraceable, ReadsIntegers)):
        return f"{name}: {recording}; {by_hand}"
    if isinstance(recording, (ReadsValues, NeedsValues)):
        return f"{name}: what it does depends on values of tensors ({_find_line(recording)}); {by_hand}"
    if export is not None and re.search("data-dependent|depends on values", str(export)):
        return f"{name}: what it does depends on values of tensors ({_find_line(export)}); {by_hand}"
    if isinstance(recording, ModuleFails):
        return f"{name} with these example inputs: {recording}; give inputs that it accepts, or {by_hand}"
    if re.search(r"returns a \w*Cache", str(recording)):
        return f"{name}: it returns a cache of past keys and values; turn that off with model.config.use_cache = False"
    if (line := _find_line(recording)) != str(recording):
        return f"{name}: {recording} ({line}); {by_hand}"
    return f"{name}: {export or recording}; {by_hand}"


def _find_line(error: NotRecordable | NotExportable) -> str:
    """The innermost line of the user's code that raised an error, or what it was raised from."""
    causes = [cause for cause in (error.__cause__, error) if cause is not None]
    return find_user_line([f for cause in causes for f in traceback.extract_tb(cause.__traceback__)]) or str(error)


def find_user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of code that is neither PyTorch's nor ours, with its file; empty if there is none."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(inspect.getfile(torch)).parent, Path(__file__).parent))
    own = [f for f in frames if not f.filename.startswith(libraries) and f.filename not in _OWN]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else ""
