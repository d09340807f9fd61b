"""Reading and writing files: safetensors, written to a temporary file first and then renamed."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

MAX_JSON_BYTES = 2**26
"""The largest configuration or index that is read, 67 MB: the largest indices have a fifth of that."""
MAX_NESTING = 64
"""The most containers within one another that are read: functions that walk through them call themselves at each level."""


def check_writable(target: Path, force: bool = False, folder: bool = False) -> None:
    """Refuse a place where a file, or a folder, must not or cannot be written.

    Raises:
        ValueError: if it exists and `force` is not given, is of another kind, or there is no folder for it to lie in.
    """
    if folder and target.is_symlink():
        raise ValueError(f"{target} is a link; give the name of the folder itself")
    if folder and target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder")
    if not folder and target.is_dir():
        raise ValueError(f"{target} is a folder; give the name of a file")
    if not folder and target.exists():
        check_regular(target)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"the folder {target.parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"the folder {target.parent} cannot be written to")
    if os.path.lexists(target) and not force:
        raise ValueError(f"{target} exists already: it is replaced only by force (--force)")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse, before anything is read from it, what is not a file: a device or a pipe may never end, or never begin.

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if it is something else than a file, or a link to one.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no file {path}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a device, a pipe or a socket'}, not a file")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a file, not JSON, larger than `MAX_JSON_BYTES`, or nested too deeply.
    """
    check_regular(path)
    with open(path, "rb") as stream:
        content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES / 1e6:.0f} MB")
    return _parse_json(content, path)


def _parse_json(content: str | bytes, path: str | os.PathLike[str]) -> Any:
    try:
        parsed = json.loads(content)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    check_nesting(parsed, path)
    return parsed


def check_nesting(content: Any, path: str | os.PathLike[str]) -> None:
    """Refuse what was read from a file if its containers lie too deeply within one another, or one within itself.

    Raises:
        ValueError: if there are more than `MAX_NESTING` levels.
    """
    level = {0: [content]}
    for _ in range(MAX_NESTING + 1):
        inside = [entry for part in level.values() for entry in (part.values() if isinstance(part, Mapping) else part)]
        level = {id(entry): entry for entry in inside if isinstance(entry, Mapping | list | tuple | set)}
        if not level:
            return
    raise ValueError(f"{path} is nested too deeply: more than {MAX_NESTING} levels")


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object], durable: bool = False) -> None:
    """Call `write` on a temporary file beside `path`, then rename it: a killed run leaves no half file.

    Args:
        path: the file to write.
        write: fills the file that it is given.
        durable: the content is on the disk before the file has its name, and the name when this returns: so a machine that
            loses its power leaves no half file either.

    Raises:
        OSError: naming `path`, if the disk is full or the like.
    """
    target = Path(path)
    check_writable(target, force=True)
    temporary = _choose_temporary(target)
    try:
        temporary.touch(exist_ok=False)  # with the permissions of an ordinary file, which `tempfile` does not give
        with _name_in_errors(target):
            write(temporary)
            if durable:
                flush_to_disk(temporary)
        temporary.replace(target)
        if durable:
            flush_to_disk(target.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno != errno.EINVAL:  # some file systems have no such thing for folders
            raise
    finally:
        os.close(descriptor)


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _name_in_errors(target: Path) -> Iterator[None]:
    """Errors of writing to an open file, such as a full disk, do not tell its name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


def write_torch(file: Path, content: Any) -> None:
    """Write PyTorch's format.

    Raises:
        OSError: if it cannot be written, where PyTorch itself raises a RuntimeError that tells nothing.
    """
    try:
        with file.open("wb") as stream:
            torch.save(content, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def check_replaceable(folder: Path, names: Collection[str]) -> None:
    """Refuse to replace a folder by one with other content, if something in it would be lost.

    Args:
        folder: to replace.
        names: the places of the new files in it. A folder inside is replaced if a new file lies in it.

    Raises:
        ValueError: naming what would be lost.
    """
    inner = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    for entry in list_entries(folder):
        name, is_folder = entry.relative_to(folder).as_posix(), entry.is_dir() and not entry.is_symlink()
        if name not in (inner if is_folder else names):
            raise ValueError(
                f"{folder} holds {name}, which would be lost: a folder is replaced only if all in it is written anew, "
                "so remove it or give another folder"
            )


def list_entries(folder: Path) -> list[Path]:
    """Everything in a folder and in the folders inside it, in order; a link to a folder is not followed."""
    found = []
    for entry in sorted(folder.iterdir()):
        found += [entry, *(list_entries(entry) if entry.is_dir() and not entry.is_symlink() else ())]
    return found


def write_folder_atomically(
    path: str | os.PathLike[str],
    write: Callable[[Path], object],
    force: bool = False,
    further: Collection[str] = (),
    staging: Path | None = None,
) -> None:
    """Call `write` on a temporary folder beside `path`, then rename it.

    Args:
        path: the folder to write.
        write: fills the folder that it is given.
        force: replace a folder that is there, if it holds no other files than the new one.
        further: names of files that may be lost too, because the caller writes them later.
        staging: in place of a temporary folder, one on the same disk in which files may be already. It is left as it is if
            writing fails, and is on the disk before it has its name.
    """
    target = Path(path)
    check_writable(target, force, folder=True)
    temporary = _choose_temporary(target)
    aside = temporary.with_suffix(".old")
    temporary = temporary if staging is None else staging
    try:
        temporary.mkdir(exist_ok=staging is not None)
        with _name_in_errors(target):
            write(temporary)
        if staging is not None:
            for entry in (*list_entries(temporary), temporary):
                flush_to_disk(entry)
        if target.exists():
            new = {entry.relative_to(temporary).as_posix() for entry in list_entries(temporary) if not entry.is_dir()}
            check_replaceable(target, {*new, *further})
            target.rename(aside)
        temporary.rename(target)
        if staging is not None:
            flush_to_disk(target.absolute().parent)
    finally:
        if aside.exists() and not target.exists():  # stopped between the two: what was there goes back
            aside.rename(target)
        if staging is None:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left in a folder that `write_atomically` wrote into."""
    for file in folder.glob(f".*{_TEMPORARY}"):
        file.unlink()


_TEMPORARY = ".tmp"


def _choose_temporary(target: Path) -> Path:
    """A name beside the target that no other run chooses."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}{_TEMPORARY}")


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header into one safetensors file."""
    content = pack_tensors(tensors, header)
    # The library's own writer reports a full disk by an exception of its own.
    write_atomically(path, lambda file: file.write_bytes(content))


def pack_tensors(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """The content of the file that `save_tensors` writes."""
    metadata = {key: json.dumps(value) for key, value in header.items()}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return _sort_header(safetensors.torch.save(plain, metadata=metadata))


def _sort_header(content: bytes) -> bytes:
    """The same safetensors file with the entries of its header in order, which the library leaves to chance."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a safetensors file, or is cut short, or its header is not ours.
    """
    with _open_tensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    return tensors, _read_header(path, metadata)


def load_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header alone of what `save_tensors` wrote; raises what `load_tensors` raises."""
    with _open_tensors(path) as file:
        metadata = file.metadata()
    return _read_header(path, metadata)


@contextlib.contextmanager
def _open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    check_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # the library raises its own type, and plain ones for some kinds of damage
        raise ValueError(f"{path} is not a safetensors file, or it is damaged: {error}") from error


def _read_header(path: str | os.PathLike[str], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        return {key: _parse_json(value, path) for key, value in (metadata or {}).items()}
    except ValueError as error:
        raise ValueError(f"the header of {path} was not written by onebasin: {error}") from error
