"""PyTorch files that would run code if they were unpickled as they are, or that are damaged."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.cli.attacks import MARKER

STATE = {"1.weight": torch.zeros(2, 3)}


class Runs:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch() -> Any:
    return Runs(open, MARKER, "w")


class Built:
    """Pickled as a call that is given a state afterwards."""

    def __reduce__(self) -> Any:
        return (dict, (), None, None, iter([("x", touch())]))


def save(content: Any, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function by its name."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def archive(content: bytes, **others: bytes) -> bytes:
    """PyTorch's archive around a pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in {"data.pkl": content, "version": b"3\n", "byteorder": b"little", **others}.items():
            file.writestr(f"archive/{name}", data)
    return stream.getvalue()


def script() -> bytes:
    return archive(pickle.dumps(STATE.keys().__class__.__name__), **{"constants.pkl": pickle.dumps(()), "code/x.py": b"1"})


def replace_in_archive(old: str, new: bytes) -> bytes:
    """A good file with another content of one of its members."""
    stream, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(save(STATE)))
    with zipfile.ZipFile(stream, "w") as file:
        for name in source.namelist():
            file.writestr(name, new if name.endswith(old) else source.read(name))
    return stream.getvalue()


def wrong_checksum() -> bytes:
    content = bytearray(save({"1.weight": torch.full((64,), 7.5)}))
    place = content.index(struct.pack("<f", 7.5) * 8)
    content[place] ^= 1
    return bytes(content)


SHELL = f"touch {MARKER}"
CODE = f"open({MARKER!r}, 'w')"
PICKLES: dict[str, Callable[[], bytes]] = {
    "open": lambda: save(touch()),
    "open in a state": lambda: save({**STATE, "x": touch()}),
    "open as a key": lambda: save({touch(): torch.zeros(2)}),
    "open in a container": lambda: save({"state_dict": STATE, "epoch": touch()}),
    "open in a list": lambda: save({"state_dict": {**STATE, "x": [1, (2, touch())]}}),
    "open in an optimiser": lambda: save({"state": {0: {"step": touch()}}, "param_groups": [{"params": [0]}]}),
    "open while a dict is filled": lambda: save({**STATE, "x": Built()}),
    "open in the older format": lambda: save({**STATE, "x": touch()}, legacy=True),
    "a plain pickle": lambda: pickle.dumps({**{"w": [1.0]}, "x": touch()}),
    "a module": lambda: save(torch.nn.Linear(2, 2)),
    "a module in a container": lambda: save({"model": torch.nn.Linear(2, 2)}),
    "a type": lambda: save({"1.weight": torch.nn.Linear}),
    "exec": lambda: save(Runs(exec, CODE)),
    "eval": lambda: save(Runs(eval, CODE)),
    "import": lambda: save(Runs(__import__, "antigravity_of_nobody")),
    "getattr": lambda: save(Runs(getattr, "x", "upper")),
    "system": lambda: call("os", "system", SHELL),
    "posix system": lambda: call("posix", "system", SHELL),
    "popen": lambda: call("os", "popen", SHELL),
    "subprocess": lambda: call("subprocess", "getoutput", SHELL),
    "builtin eval": lambda: call("builtins", "eval", CODE),
    "old builtin exec": lambda: call("__builtin__", "execfile", MARKER),
    "runpy": lambda: call("runpy", "run_path", "nets.py"),
    "imported file": lambda: call("hostile_module", "run", "x"),
    "torch load": lambda: call("torch", "load", "b.pt"),
    "torch hub": lambda: call("torch.hub", "load", "x"),
    "numpy load": lambda: call("numpy", "load", "x.npy"),
    "bdb": lambda: call("bdb", "Bdb", "x"),
    "system in an archive": lambda: archive(call("os", "system", SHELL)),
    "eval in an archive": lambda: archive(call("builtins", "eval", CODE)),
    "system in the version": lambda: archive(b"N.", version=call("os", "system", SHELL)),
    "code in an archive": script,
    "a name that climbs": lambda: archive(b"N.", **{"../../executed": b"x"}),
    "an endless loop": lambda: b"\x80\x02" + b"]q\x00h\x00a" * 10 + b".",
    "deep nesting": lambda: b"\x80\x02" + b"(" * 50_000 + b"N" + b"t" * 50_000 + b".",
    "a large memo": lambda: b"\x80\x02Nr\xff\xff\xff\xff.",
    "a long string": lambda: b"\x80\x02X\xff\xff\xff\x7fabc.",
    "an empty stack": lambda: b"\x80\x02.",
    "a protocol of the future": lambda: b"\x80\xff.",
    "cut short": lambda: save(STATE)[:-40],
    "only the start": lambda: save(STATE)[:64],
    "one byte": lambda: b"\x80",
    "empty": lambda: b"",
    "an empty archive": lambda: b"PK\x05\x06" + bytes(18),
    "no pickle in it": lambda: archive(b""),
    "no tensors": lambda: save({}),
    "numbers": lambda: save({"1.weight": 3}),
    "a tensor alone": lambda: save(torch.zeros(3)),
    "a list": lambda: save([torch.zeros(3)]),
    "keys that are numbers": lambda: save({0: torch.zeros(3)}),
    "a sparse tensor": lambda: save({"1.weight": torch.eye(3).to_sparse()}),
    "a quantised tensor": lambda: save({"1.weight": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}),
    "NaN": lambda: save({"1.weight": torch.full((12, 64), torch.nan)}),
    "a missing storage": lambda: replace_in_archive("data/0", b""),
    "a wrong byte order": lambda: replace_in_archive("byteorder", b"middle"),
    "a wrong checksum": wrong_checksum,
    "a page": lambda: b"<html>not found</html>",
}


def write(folder: Path, name: str) -> None:
    """The file x.pt, and modules that it may try to import."""
    (folder / "hostile_module.py").write_text(f"{CODE}\ndef run(x): return {{}}\n")
    (folder / "nets.py").write_text(CODE)
    (folder / "x.pt").write_bytes(PICKLES[name]())
