"""Write checkpoints in the layout of the one they came from: shard by shard and, if the format allows, tensor by tensor."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import (
    SAFETENSORS_TYPES,
    TORCH_ENDINGS,
    Checkpoint,
    Conversion,
    FileLayout,
    take_part,
)
from onebasin.checkpoints.companion_files import CARD_NAME, copy_companion, find_companions
from onebasin.checkpoints.distributed import CONVERSION, is_distributed
from onebasin.checkpoints.hashing import hash_file
from onebasin.checkpoints.input_protection import check_apart
from onebasin.checkpoints.remote_files import is_remote, write_url
from onebasin.checkpoints.staging import Staging, is_finished
from onebasin.checkpoints.untied_heads import untie_configuration
from onebasin.checkpoints.weight_files import find_format, write_safetensors, write_state
from onebasin.checkpoints.written_types import convert_configuration, convert_types
from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on
from onebasin.engines.memory_limits import MemoryEstimate
from onebasin.engines.work_meter import WRITING
from onebasin.tensors.comparison import is_mixed
from onebasin.tensors.files import (
    check_replaceable,
    check_writable,
    read_json,
    remove_temporaries,
    write_atomically,
    write_folder_atomically,
)
from onebasin.tensors.progress import Progress
from onebasin.tensors.row_blocks import count_entries
from onebasin.tensors.states import LazyState, RowReader, State, read_state

_HELD_AT_ONCE = 5
"""Copies, in float32 or wider, of a tensor or a block that is read, moved, mixed, converted and written."""
_TYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


def check_output(
    path: str | os.PathLike[str],
    like: Checkpoint,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str] | Checkpoint] = (),
    further: Collection[str] = (),
    dtype: torch.dtype | None = None,
    staged: int = 0,
) -> None:
    """Refuse, before any work, an output that cannot or should not be written.

    Args:
        path: the file or folder to write.
        like: the checkpoint whose layout it will have.
        force: allow to replace a file, or a folder in which nothing is but what will be written.
        inputs: files, folders and checkpoints that must stay as they are, beside `like`.
        further: for a folder, the names of other files that will be written into it.
        dtype: the type in which floating tensors will be written, if it is another one.
        staged: bytes of it that are on the disk already.

    Raises:
        ValueError: if it is, lies in, or holds one of the inputs, exists and `force` is not given, is in a folder that does
            not exist, has an ending that names no format, is a folder with other things in it, or the disk has too little
            space; if it is a URL, or a further file has the name of one of the checkpoint.
    """
    if is_remote(path):
        raise ValueError(f"{write_url(path)} cannot be written: give a local or shared folder, and copy it from there")
    target = Path(path)
    check_apart(target, [like, *inputs])
    if like.layout.place.is_dir() and is_distributed(like.layout.place):
        raise ValueError(
            f"{like.path} is a distributed checkpoint, which is read but not written: make a file of it first, "
            f"{CONVERSION.format(folder=like.path)}"
        )
    check_writable(target, force, folder=like.layout.is_folder)
    if like.layout.is_folder:
        names = _list_names(like)
        for name in names.intersection(further) - {CARD_NAME}:
            raise ValueError(f"{target / name} is a file of the checkpoint itself: every output needs a place of its own")
        if target.is_dir():
            check_replaceable(target, names.union(further))
    if not like.layout.is_folder:
        find_format(target)
    existing = target
    while not existing.exists():
        existing = existing.absolute().parent
    tensors = like.original if dtype is None else convert_types(like.original, dtype)
    free, needed = shutil.disk_usage(existing).free, tensors.num_bytes + find_companions(like).num_bytes - staged
    if needed > free:
        raise ValueError(f"{target} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there")


def estimate_writing(
    path: str | os.PathLike[str], like: Checkpoint, dtype: torch.dtype | None = None, row_keys: Collection[str] = ()
) -> MemoryEstimate:
    """What `write_checkpoint` holds at a time: a tensor, or a block of its rows; of a PyTorch file all tensors in it.

    Args:
        path: the output.
        like: the checkpoint whose layout it will have.
        dtype: the type of floating tensors in it, if it is another one.
        row_keys: the tensors that can be written row by row.
    """
    held = [
        (count_entries(value) if key in row_keys else value.numel()) * (max(value.itemsize, 4) if is_mixed(value) else 8)
        for key, value in like.shapes.items()
    ]
    whole = 0
    for file, names in like.layout.files.items():
        if (file if like.layout.is_folder else Path(path)).suffix in TORCH_ENDINGS:
            shapes = [like.original.shapes[name] for name in names if name in like.original.shapes]
            sizes = (dtype.itemsize if dtype and each.is_floating_point() else each.itemsize for each in shapes)
            whole = max(whole, sum(each.numel() * size for each, size in zip(shapes, sizes, strict=True)))
    return MemoryEstimate(driver=whole, worker=_HELD_AT_ONCE * max(held, default=0))


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    like: Checkpoint,
    force: bool = False,
    progress: Progress | None = None,
    beside: Mapping[str, Callable[[Path], None]] | None = None,
    further: Collection[str] = (),
    entries: Mapping[Any, Any] | None = None,
    dtype: torch.dtype | None = None,
    engine: Engine = LOCAL,
) -> None:
    """Write a state with the names, files and format of the checkpoint it was made from.

    A folder keeps its shards and its index; a Hugging Face folder keeps its configuration and tokenizer files as well, as
    `find_companions` finds them. The format of a single file follows from its ending. The output appears under its name only
    when it is complete.

    Args:
        path: a file, or a folder if `like` is one.
        state: its keys are those of `like`. Tensors are read one at a time. Other tensors in the files of `like` are copied.
            Of tied keys one tensor is written, unless `untie_checkpoint` has given them names of their own.
        like: the checkpoint whose layout to use.
        force: replace what exists; a folder only if nothing is in it but what is written.
        progress: called with what is being done, how many tensors are written, and how many there are.
        beside: for a folder, other files to write into it, by name. A README.md of `like` is in its place by then, so that
            it can be added to.
        further: for a folder, names of files that the caller will write into it later.
        entries: for a PyTorch file with the state dict in a container, what to write beside it, see `move_training_entries`.
            Entries beside it in the file of `like` are not copied: they belong to the model as it was.
        dtype: the type of all floating tensors in the output, which its configuration tells as well. If None, they have the
            types of `state`.
        engine: by which the safetensors files of a folder are written, each by one worker. If it has a journal, files that
            are in there already are not written again.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from onebasin.checkpoints import open_checkpoint, write_checkpoint
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save(torch.nn.Linear(4, 2).state_dict(), folder / "a.pt")
    >>> a = open_checkpoint(folder / "a.pt")
    >>> write_checkpoint(folder / "half.safetensors", a.map(lambda key, value: value / 2), like=a)
    >>> torch.equal(open_checkpoint(folder / "half.safetensors")["bias"], a["bias"] / 2)
    True
    """
    target = Path(path).absolute()  # workers have other working folders
    journal = engine.journal
    if is_finished(journal, target):
        return
    staging = Staging(journal, target) if journal is not None and like.layout.is_folder else None
    known = [*(beside or {}), *further]
    check_output(path, like, force, further=known, dtype=dtype, staged=0 if staging is None else staging.num_bytes)
    check_entries(path, like, entries)
    tensors = _name_as_in_files(read_state(state), like)
    tensors = tensors if dtype is None else convert_types(tensors, dtype)
    rows = {key for key, name in like.names.items() if tensors.has_rows(name)}
    engine.check_memory(estimate_writing(path, like, dtype, rows))
    if engine.is_remote and like.layout.is_folder:
        engine.check_states({str(path): tensors})
    elif progress is not None and engine.meter.report is None:
        tensors = _count_reads(tensors, progress)
    if like.layout.is_folder:
        with engine.broadcast(tensors):
            write = functools.partial(_fill_folder, tensors, like, entries, beside or {}, dtype, engine, staging)
            write_folder_atomically(target, write, force, further, None if staging is None else staging.folder)
        return

    def write_file(temporary: Path) -> None:
        with engine.counting(), spent_on("write"):
            if find_format(target) == "safetensors":
                write_safetensors(temporary, tensors, like.layout.metadata.get(file))
            else:
                write_state(temporary, tensors, like.layout, entries)
        if journal is not None:
            journal.promise(target, {"": hash_file(temporary)})

    (file,) = like.layout.files
    write_atomically(path, write_file, durable=journal is not None)


def _fill_folder(
    tensors: LazyState,
    like: Checkpoint,
    entries: Mapping[Any, Any] | None,
    beside: Mapping[str, Callable[[Path], None]],
    dtype: torch.dtype | None,
    engine: Engine,
    staging: Staging | None,
    folder: Path,
) -> None:
    """Write all files of an output into a folder, in which files may be that a killed run has finished."""
    done = set() if staging is None else staging.clean({*_list_names(like), *beside}, engine)
    for name, source in find_companions(like).copied.items():
        copy_companion(source, folder / name)
    _write_folder(_Folder(folder, "", engine, staging, done), tensors, like.layout, entries)
    for place in ("", *like.layout.parts):
        _convert_configuration(folder / place / "config.json", dtype, bool(like.layout.untied))
    for name, write_file in beside.items():
        write_file(folder / name)
    if staging is not None:
        staging.promise()


def check_entries(path: str | os.PathLike[str], like: Checkpoint, entries: Mapping[Any, Any] | None) -> None:
    """Refuse a format that has no room for what lies beside a model.

    Raises:
        ValueError: if there are entries, and the output is a safetensors file.
    """
    if entries and not like.layout.is_folder and find_format(Path(path)) != "torch":
        raise ValueError(
            f"{path} can hold tensors alone, but there are other entries beside the model ({', '.join(map(str, entries))}): "
            "give a name that ends in .pt, or --model-only"
        )


def _list_names(like: Checkpoint) -> set[str]:
    """The places of all files in a folder that is written like a checkpoint."""
    return {*find_companions(like).copied, *like.layout.weight_files}


def _name_as_in_files(state: State, like: Checkpoint) -> LazyState:
    """The tensors under their names in the files of `like`, together with its other tensors."""
    keys: dict[str, str] = {}
    for key, name in like.names.items():
        keys.setdefault(name, key)
    parts = {name: (each, number) for each in like.conversions for number, name in enumerate(each.names)}
    _check_unsaved(state, like)
    given, shapes = state.shapes, dict(like.original.shapes)
    shapes |= {name: given[key] for name, key in keys.items()}
    shapes |= {name: shapes[name].to(given[each.keys[0]].dtype) for name, (each, _) in parts.items()}

    return LazyState(shapes, _NamedAsInFiles(state, like.original, keys, parts))


@dataclass(frozen=True)
class _NamedAsInFiles(RowReader):
    """Reads the tensors of a state under their names in the files of a checkpoint.

    Attributes:
        state: the tensors.
        original: the checkpoint, for tensors that the state does not have.
        keys: of the state, by names in the files.
        parts: for tensors that are stacked otherwise in the files, the conversion, and which of its tensors it is.
    """

    state: State
    original: LazyState
    keys: Mapping[str, str]
    parts: Mapping[str, tuple[Conversion, int]]

    def __call__(self, name: str) -> Tensor:
        if name in self.parts:
            conversion, number = self.parts[name]
            return self._restore(conversion)[number]
        return self.state[self.keys[name]] if name in self.keys else self.original[name]

    def has_rows(self, key: str) -> bool:
        if key in self.parts:
            return False
        return isinstance(self.state, LazyState) and self.state.has_rows(self.keys[key]) if key in self.keys else True

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        if key in self.keys and isinstance(self.state, LazyState):
            return self.state.read_rows(self.keys[key], start, stop)
        return self.original.read_rows(key, start, stop)

    @functools.cached_property
    def _restore(self) -> Callable[[Conversion], list[Tensor]]:
        # Of an expert's tensors, which follow each other, two kinds are stacked differently.
        return functools.lru_cache(maxsize=2)(lambda each: each.restore([self.state[key] for key in each.keys]))

    def __reduce__(self) -> Any:
        return _NamedAsInFiles, (self.state, self.original, self.keys, self.parts)


def _check_unsaved(state: State, like: Checkpoint) -> None:
    """Refuse a state with changes in tensors that the files do not hold, because the model makes them itself."""
    for key in like.unsaved:
        if not torch.equal(state[key].cpu().to(like[key].dtype), like[key]):
            raise ValueError(f"{key!r} would change, but {like.path} does not hold it: the model makes it itself")


def _count_reads(tensors: LazyState, progress: Progress) -> LazyState:
    """The same tensors; each one that is read is reported as written."""
    numbers = itertools.count(1)

    def count(name: str, value: Tensor) -> Tensor:
        progress("writing", next(numbers), len(tensors))
        return value

    return tensors.map(count)


@dataclass(frozen=True)
class _Folder:
    """A folder that is being written.

    Attributes:
        whole: the folder of the output.
        part: of a pipeline, with a slash at its end; "" if it is none.
        engine: that writes shards.
        staging: if there is a journal.
        done: the places of files that need not be written again.
    """

    whole: Path
    part: str
    engine: Engine
    staging: Staging | None
    done: set[str]

    @property
    def path(self) -> Path:
        return self.whole / self.part


def _write_folder(folder: _Folder, tensors: LazyState, layout: FileLayout, entries: Mapping[Any, Any] | None) -> None:
    """Write the weight files of a folder or, for a pipeline, those of its parts."""
    engine, staging = folder.engine, folder.staging
    for name, part in layout.parts.items():
        (folder.path / name).mkdir(exist_ok=True)
        own = LazyState(take_part(tensors.shapes, name), functools.partial(_read_part, tensors, name))
        _write_folder(replace(folder, part=f"{name}/"), own, part, entries)
    shards: list[_Shard] = []
    for file, names in layout.files.items() if not layout.parts else ():
        if file.suffix in TORCH_ENDINGS:
            own = LazyState({name: tensors.shapes[name] for name in names}, tensors.read)
            with engine.counting(), spent_on("write"):
                write_state(folder.path / file.name, own, layout, entries)
        elif f"{folder.part}{file.name}" not in folder.done:
            shards.append(_Shard(folder.path / file.name, names, layout.metadata.get(file), staging is not None))

    def size(shard: _Shard) -> float:
        return sum(tensors.shapes[name].nbytes for name in shard.names)

    written = engine.map(functools.partial(_write_shard, tensors), shards, WRITING, size)
    for shard, digest in zip(shards, written, strict=True):
        if staging is not None and digest is not None:
            staging.keep(f"{folder.part}{shard.file.name}", digest)
    remove_temporaries(folder.path)
    if layout.index is not None:
        index = read_json(layout.index)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": tensors.num_bytes}
        index["weight_map"] |= {name: file.name for file, names in layout.files.items() for name in names}
        (folder.path / layout.index.name).write_text(json.dumps(index, indent=2) + "\n")


class _Shard(NamedTuple):
    """A safetensors file to write.

    Attributes:
        file: the file.
        names: of the tensors in it.
        metadata: in its header.
        is_kept: whether a run that goes on after it was killed will rely on the file.
    """

    file: Path
    names: tuple[str, ...]
    metadata: Mapping[str, str] | None
    is_kept: bool


def _write_shard(tensors: LazyState, shard: _Shard) -> str | None:
    """Write a file; returns its SHA-256 if it is kept."""
    own = LazyState({name: tensors.shapes[name] for name in shard.names}, tensors.read)
    digest = hashlib.sha256() if shard.is_kept else None
    with spent_on("write"):
        write = functools.partial(write_safetensors, tensors=own, metadata=shard.metadata, digest=digest)
        write_atomically(shard.file, write, durable=shard.is_kept)
    return None if digest is None else digest.hexdigest()


def _read_part(tensors: LazyState, part: str, key: str) -> Tensor:
    return tensors[f"{part}.{key}"]


def _convert_configuration(file: Path, dtype: torch.dtype | None, is_untied: bool) -> None:
    content = read_json(file) if (dtype is not None or is_untied) and file.is_file() else None
    if isinstance(content, dict):
        content = content if dtype is None else convert_configuration(content, dtype)
        content = untie_configuration(content) if is_untied else content
        file.write_text(json.dumps(content, indent=2) + "\n")
