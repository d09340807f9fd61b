"""Damaged and hostile safetensors files: an eight-byte length, a JSON header, the data."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]
KEY = "3.weight"
"""A tensor of the file that is damaged, of 12 x 12 floats."""


def unpack(file: Path) -> tuple[Header, bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def change(**entries: Any) -> Callable[[Header, bytes], bytes]:
    """One tensor with other entries; None removes an entry."""

    def damage(header: Header, data: bytes) -> bytes:
        entry = {**header[KEY], **entries}
        return pack({**header, KEY: {name: value for name, value in entry.items() if value is not None}}, data)

    return damage


def put(key: str, value: Any) -> Callable[[Header, bytes], bytes]:
    return lambda header, data: pack({**header, key: value}, data)


def spoil(value: bytes) -> Callable[[Header, bytes], bytes]:
    """Another number in the data of the tensor."""

    def damage(header: Header, data: bytes) -> bytes:
        start = header[KEY]["data_offsets"][0]
        return pack(header, data[:start] + value + data[start + len(value) :])

    return damage


def leave_a_hole(header: Header, data: bytes) -> bytes:
    moved = {
        key: {**entry, "data_offsets": [offset + 8 for offset in entry["data_offsets"]]} if key != "__metadata__" else entry
        for key, entry in header.items()
    }
    return pack(moved, bytes(8) + data)


def repeat_key(header: Header, data: bytes) -> bytes:
    text = json.dumps(header)
    entry = json.dumps({KEY: {**header[KEY], "dtype": "I32"}})[1:-1]
    return pack(f"{text[:-1]}, {entry}}}".encode(), data)


def overlap(header: Header, data: bytes) -> bytes:
    other = next(key for key, entry in header.items() if key not in (KEY, "__metadata__") and entry["shape"] == [12])
    start = header[KEY]["data_offsets"][0]
    return pack({**header, other: {**header[other], "data_offsets": [start, start + 48]}}, data)


DAMAGES: dict[str, Callable[[Header, bytes], bytes]] = {
    "empty": lambda header, data: b"",
    "one byte": lambda header, data: b"\x08",
    "seven bytes": lambda header, data: bytes(7),
    "no header": lambda header, data: bytes(8),
    "only a length": lambda header, data: struct.pack("<Q", 100),
    "zeros": lambda header, data: bytes(4096),
    "length beyond the file": lambda header, data: pack(header, data, length=10**9),
    "length of 2**63": lambda header, data: pack(header, data, length=2**63),
    "length of 2**64 - 1": lambda header, data: pack(header, data, length=2**64 - 1),
    "length of 100 MB": lambda header, data: pack(header, data, length=10**8 + 1),
    "length too short": lambda header, data: pack(header, data, length=20),
    "length into the data": lambda header, data: pack(header, data, length=len(json.dumps(header)) + 64),
    "no JSON": lambda header, data: pack(b"{" * 64, data),
    "no text": lambda header, data: pack(b'{"\xff\xfe": 1}', data),
    "a list": lambda header, data: pack([header], data),
    "null": lambda header, data: pack(None, data),
    "a string": lambda header, data: pack("x", data),
    "a number": lambda header, data: pack(3, data),
    "deep nesting": lambda header, data: pack(b"[" * 100_000, data),
    "deep metadata": lambda header, data: pack(b'{"__metadata__":' + b'{"a":' * 50_000, data),
    "cut in the header": lambda header, data: pack(header, data)[:40],
    "cut in the data": lambda header, data: pack(header, data)[:-1],
    "without data": lambda header, data: pack(header),
    "with more data": lambda header, data: pack(header, data + b"more"),
    "a hole": leave_a_hole,
    "overlapping tensors": overlap,
    "a key twice": repeat_key,
    "offsets reversed": change(data_offsets=[576, 0]),
    "offsets below zero": change(data_offsets=[-576, 0]),
    "offsets beyond the file": change(data_offsets=[10**9, 10**9 + 576]),
    "offsets beyond 64 bits": change(data_offsets=[0, 2**70]),
    "offsets with a point": change(data_offsets=[0.5, 576.5]),
    "offsets as text": change(data_offsets=["0", "576"]),
    "three offsets": change(data_offsets=[0, 1, 576]),
    "no offsets": change(data_offsets=None),
    "shape below zero": change(shape=[-12, -12]),
    "one size below zero": change(shape=[12, -12]),
    "shape that overflows": change(shape=[2**62, 2**62]),
    "shape of 2**63": change(shape=[2**63]),
    "shape larger than the data": change(shape=[12, 13]),
    "shape smaller than the data": change(shape=[12, 11]),
    "shape with a point": change(shape=[12.5, 12]),
    "shape as text": change(shape="12, 12"),
    "shape of nothing": change(shape=[]),
    "shape of 10,000 axes": change(shape=[1] * 10_000),
    "no shape": change(shape=None),
    "unknown type": change(dtype="F31"),
    "type of another size": change(dtype="F64"),
    "type half as large": change(dtype="F16"),
    "type as a number": change(dtype=32),
    "type with a control": change(dtype="F32\x1b[2J"),
    "no type": change(dtype=None),
    "an entry that is null": put(KEY, None),
    "an entry that is a list": put(KEY, [1, 2]),
    "an entry more": put("odd\x1b[2J", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "metadata that is a list": put("__metadata__", ["x"]),
    "metadata of numbers": put("__metadata__", {"x": 1}),
    "NaN": spoil(b"\x00\x00\xc0\x7f"),
    "infinity": spoil(b"\x00\x00\x80\xff"),
    "no tensors": lambda header, data: pack({"__metadata__": {"format": "pt"}}),
    "a page": lambda header, data: b"<!DOCTYPE html><html>not found</html>",
    "a pointer": lambda header, data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "an archive": lambda header, data: b"PK\x05\x06" + bytes(18),
    "another format": lambda header, data: b"GGUF\x03\x00\x00\x00" + bytes(512),
    "a pickle": lambda header, data: b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch executed\x85R.",
}
