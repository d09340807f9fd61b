"""The files beside the weights in a folder, such as a tokenizer: which of them are copied with it, and which are left.

A folder may come from a stranger, and a link in it may point anywhere: to a file of secrets, to a device that never ends.
So only regular files of the folder itself are copied, and links of the Hugging Face cache to its own blobs.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebasin.checkpoints.checkpoint import WEIGHT_FILES, Checkpoint

COMPANION_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of files that `from_pretrained` and other readers of a folder need beside the weights."""
_TEXTS = re.compile(r"(README|LICEN[CS]E|COPYING|NOTICE)([-._]\w+)*", re.IGNORECASE)
"""Names of files that tell people what a model is and what they may do with it."""
CARD_NAME = "README.md"
"""The one of them in front of which a command may write what it did."""
MAX_COMPANION_BYTES = 2**28
"""The largest file that is copied, 268 MB: the largest tokenizers have a tenth of that."""
_SHOWN = 8
"""Names in a note."""
_ORDINARY = "not needed to load it"
_KINDS: Sequence[tuple[Callable[[int], bool], str]] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True)
class CompanionFiles:
    """The entries of a folder that are not the weights that were read.

    Attributes:
        copied: by its place in the folder, the regular file to copy; for a link of the Hugging Face cache, the blob.
        left: by its place, why an entry is not copied.
        num_bytes: of all files to copy.
    """

    copied: dict[str, Path]
    left: dict[str, str]
    num_bytes: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """One remark for the user that names what is left, or none."""
        if not self.left:
            return ()
        names = [f"{name} ({reason})" for name, reason in self.left.items()]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (f"not copied into the output: {', '.join(names[:_SHOWN])}{more}",)


def find_companions(like: Checkpoint) -> CompanionFiles:
    """The files to copy beside the weights of a checkpoint, in a pipeline from every part. No file is opened."""
    if not like.layout.place.is_dir():
        return CompanionFiles({}, {})
    found, left, num_bytes = {}, {}, 0
    for name in ("", *like.layout.parts):
        folder = (like.layout.place / name).resolve()
        for entry in sorted(folder.iterdir()):
            place = f"{name}/{entry.name}" if name else entry.name
            if place in like.layout.weight_files or place in like.layout.parts:
                continue
            file = _find_blob(folder, entry) if entry.is_symlink() else entry
            reason = _explain(entry, file)
            if file is None or reason:
                left[place] = reason
            else:
                found[place] = file
                num_bytes += file.lstat().st_size
    ordered = sorted(left.items(), key=lambda item: item[1] == _ORDINARY)  # so that the odd ones are named first
    return CompanionFiles(found, dict(ordered), num_bytes)


def is_companion(name: str) -> bool:
    """Whether readers of a folder, programs or people, need a file of this name beside the weights.

    >>> is_companion("tokenizer.json"), is_companion("LICENSE"), is_companion("optimizer.pt")
    (True, True, False)
    """
    return Path(name).suffix in COMPANION_ENDINGS or _TEXTS.fullmatch(name) is not None


def find_texts(like: Checkpoint) -> dict[str, Path]:
    """Those of the files to copy that are written for people: the README, the licence."""
    return {name: file for name, file in find_companions(like).copied.items() if _TEXTS.fullmatch(name)}


def copy_companion(source: Path, target: Path) -> None:
    """Copy one file. It is looked at again once it is open, as it may have been exchanged in the meantime.

    Raises:
        ValueError: if it is no regular file any more, or has become larger than `MAX_COMPANION_BYTES`.
    """
    # Without O_NONBLOCK, a pipe would wait for a writer before it could be recognised.
    descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{source} is no longer a regular file: it was exchanged while the command ran")
        content = stream.read(MAX_COMPANION_BYTES + 1)
    if len(content) > MAX_COMPANION_BYTES:
        raise ValueError(f"{source} has become larger than {MAX_COMPANION_BYTES / 1e6:.0f} MB while the command ran")
    target.parent.mkdir(exist_ok=True)  # of a part
    target.write_bytes(content)


def _explain(entry: Path, file: Path | None) -> str:
    """Why an entry is not copied; "" if it is."""
    if file is None:
        return "a link"
    status = file.lstat()
    for is_kind, reason in _KINDS:
        if is_kind(status.st_mode):
            return reason
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if not is_companion(entry.name) or entry.name in WEIGHT_FILES:
        return _ORDINARY
    if status.st_size > MAX_COMPANION_BYTES:
        return f"larger than {MAX_COMPANION_BYTES / 1e6:.0f} MB"
    return ""


def _find_blob(folder: Path, link: Path) -> Path | None:
    """The blob that a link of the Hugging Face cache points to; None for every other link.

    The cache keeps a repository as ``blobs/HASH`` and ``snapshots/REVISION/NAME``, which is a link to one of the blobs.
    """
    target = Path(os.path.normpath(folder / os.readlink(link)))
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    if snapshots is None or target.parent != snapshots.parent / "blobs":
        return None
    # A folder that only imitates the cache may have a link in place of the folder of blobs, or of a blob.
    is_plain = stat.S_ISDIR(target.parent.lstat().st_mode) if target.parent.exists() else False
    is_hash = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target.name) is not None
    return target if is_plain and is_hash and target.exists() and stat.S_ISREG(target.lstat().st_mode) else None
