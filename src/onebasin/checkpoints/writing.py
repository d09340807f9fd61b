"""Write checkpoints in the layout of the one they came from: shard by shard and, if the format allows, tensor by tensor."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
from onebasin.checkpoints.input_protection import check_apart
from onebasin.checkpoints.training_states import copy_tensors
from onebasin.checkpoints.untied_heads import untie_configuration
from onebasin.checkpoints.written_types import convert_configuration, convert_types
from onebasin.engines import LOCAL, Engine
from onebasin.engines.clock import spent_on
from onebasin.engines.memory_limits import Need
from onebasin.tensors.files import (
    check_replaceable,
    check_writable,
    read_json,
    remove_temporaries,
    write_atomically,
    write_folder_atomically,
    write_torch,
)
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import LazyState, State, read_state

_HELD_AT_ONCE = 8
"""Copies of a tensor that is read, moved, mixed in a wider type, and written."""
_TYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


def check_output(
    path: str | os.PathLike[str],
    like: Checkpoint,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str] | Checkpoint] = (),
    further: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse, before any work, an output that cannot or should not be written.

    Args:
        path: the file or folder to write.
        like: the checkpoint whose layout it will have.
        force: allow to replace a file, or a folder in which nothing is but what will be written.
        inputs: files, folders and checkpoints that must stay as they are, beside `like`.
        further: for a folder, the names of other files that will be written into it.
        dtype: the type in which floating tensors will be written, if it is another one.

    Raises:
        ValueError: if it is, lies in, or holds one of the inputs, exists and `force` is not given, is in a folder that does
            not exist, has an ending that names no format, is a folder with other things in it, or the disk has too little
            space; if a further file has the name of one of the checkpoint.
    """
    target = Path(path)
    check_apart(target, [like, *inputs])
    if like.path.is_dir() and is_distributed(like.path):
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
        _find_format(target)
    existing = target
    while not existing.exists():
        existing = existing.absolute().parent
    tensors = like if dtype is None else convert_types(like, dtype)
    free, needed = shutil.disk_usage(existing).free, tensors.num_bytes + find_companions(like).num_bytes
    if needed > free:
        raise ValueError(f"{target} needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there")


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
    check_output(path, like, force, further=[*(beside or {}), *further], dtype=dtype)
    check_entries(path, like, entries)
    target = Path(path)
    tensors = _name_as_in_files(read_state(state), like)
    tensors = tensors if dtype is None else convert_types(tensors, dtype)
    if engine.is_apart and like.layout.is_folder:
        engine.check_states({str(path): tensors})
        largest = max((value.nbytes for value in tensors.shapes.values()), default=0)
        engine.check_memory(Need(driver=0, worker=_HELD_AT_ONCE * largest))
    elif progress is not None:
        tensors = _count_reads(tensors, progress)
    if like.layout.is_folder:
        staging = engine.journal.stage(target) if engine.journal is not None else None

        def write(folder: Path) -> None:
            for name, source in find_companions(like).copied.items():
                copy_companion(source, folder / name)
            with engine.hold(tensors):
                _write_folder(folder, tensors, like.layout, entries, engine, progress)
            for place in ("", *like.layout.parts):
                _convert_configuration(folder / place / "config.json", dtype, bool(like.layout.untied))
            for name, write_file in (beside or {}).items():
                write_file(folder / name)

        write_folder_atomically(target, write, force, further, staging)
        return
    (file,) = like.layout.files
    if _find_format(target) == "safetensors":
        metadata = like.layout.metadata.get(file)
        write_atomically(target, lambda temporary: _write_safetensors(temporary, tensors, metadata))
    else:
        write_atomically(target, lambda temporary: _write_torch(temporary, tensors, like.layout, entries))


def check_entries(path: str | os.PathLike[str], like: Checkpoint, entries: Mapping[Any, Any] | None) -> None:
    """Refuse a format that has no room for what lies beside a model.

    Raises:
        ValueError: if there are entries, and the output is a safetensors file.
    """
    if entries and not like.layout.is_folder and _find_format(Path(path)) != "torch":
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
class _NamedAsInFiles:
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


def _write_folder(
    folder: Path,
    tensors: LazyState,
    layout: FileLayout,
    entries: Mapping[Any, Any] | None,
    engine: Engine,
    progress: Progress | None,
) -> None:
    """Write the weight files of a folder or, for a pipeline, those of its parts."""
    for name, part in layout.parts.items():
        (folder / name).mkdir(exist_ok=True)
        own = LazyState(take_part(tensors.shapes, name), functools.partial(_read_part, tensors, name))
        _write_folder(folder / name, own, part, entries, engine, progress)
    shards: list[_Shard] = []
    for file, names in layout.files.items() if not layout.parts else ():
        if file.suffix in TORCH_ENDINGS:
            own = LazyState({name: tensors.shapes[name] for name in names}, tensors.read)
            with engine.counting(), spent_on("write"):
                _write_torch(folder / file.name, own, layout, entries)
        elif not (folder / file.name).is_file():  # else it is there from a run that was killed
            shards.append(_Shard(folder / file.name, names, layout.metadata.get(file)))
    done = sum(len(names) for names in layout.files.values()) - sum(len(shard.names) for shard in shards)
    for shard, _ in zip(shards, engine.map(functools.partial(_write_shard, tensors), shards), strict=True):
        done += len(shard.names)
        if progress is not None and engine.is_apart:
            progress("writing", done, len(tensors))
    remove_temporaries(folder)
    if layout.index is not None:
        index = read_json(layout.index)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": tensors.num_bytes}
        index["weight_map"] |= {name: file.name for file, names in layout.files.items() for name in names}
        (folder / layout.index.name).write_text(json.dumps(index, indent=2) + "\n")


class _Shard(NamedTuple):
    """A safetensors file to write, the tensors in it, and the metadata in its header."""

    file: Path
    names: tuple[str, ...]
    metadata: Mapping[str, str] | None


def _write_shard(tensors: LazyState, shard: _Shard) -> None:
    own = LazyState({name: tensors.shapes[name] for name in shard.names}, tensors.read)
    with spent_on("write"):
        write_atomically(shard.file, lambda temporary: _write_safetensors(temporary, own, shard.metadata))


def _read_part(tensors: LazyState, part: str, key: str) -> Tensor:
    return tensors[f"{part}.{key}"]


def _convert_configuration(file: Path, dtype: torch.dtype | None, is_untied: bool) -> None:
    content = read_json(file) if (dtype is not None or is_untied) and file.is_file() else None
    if isinstance(content, dict):
        content = content if dtype is None else convert_configuration(content, dtype)
        content = untie_configuration(content) if is_untied else content
        file.write_text(json.dumps(content, indent=2) + "\n")


def _find_format(target: Path) -> str:
    if target.suffix == ".safetensors":
        return "safetensors"
    if target.suffix in TORCH_ENDINGS:
        return "torch"
    raise ValueError(f"cannot tell the format of {target}: it should end in .safetensors, {', '.join(TORCH_ENDINGS)}")


def _write_safetensors(file: Path, tensors: LazyState, metadata: Mapping[str, str] | None) -> None:
    """Write the format directly, as the library would hold all tensors at once: header length, JSON header, tensors."""
    # The widest types first, so that every tensor begins at a multiple of its item size.
    ordered = sorted(tensors.shapes.items(), key=lambda entry: (-entry[1].dtype.itemsize, entry[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name, shape in ordered:
        if shape.dtype not in _TYPE_NAMES:
            raise ValueError(f"{name!r} has the type {shape.dtype}, which safetensors files have no name for")
        end = start + shape.nbytes
        header[name] = {"dtype": _TYPE_NAMES[shape.dtype], "shape": list(shape.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in ordered:
            _write_tensor(stream, name, shape, tensors[name])


def _write_tensor(stream: BinaryIO, name: str, shape: Tensor, value: Tensor) -> None:
    assert value.shape == shape.shape, f"{name} changed its shape"
    assert value.dtype == shape.dtype, f"{name} changed its type"
    flat = value.detach().cpu().contiguous().reshape(-1)
    stream.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _write_torch(file: Path, tensors: LazyState, layout: FileLayout, entries: Mapping[Any, Any] | None) -> None:
    """PyTorch's own format. Its writer holds all tensors of a file at once."""
    # A view would be saved with its whole storage, which for a mapped file is all of the file.
    state: dict[str, Any] = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    state.update(layout.extras)
    if layout.container:
        state = {layout.container: state, **copy_tensors(entries or {})}
    write_torch(file, state)
