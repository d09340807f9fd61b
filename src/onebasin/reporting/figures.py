"""Pictures inside an HTML page: SVG in the colours of the page's theme, and small PNG images of matrices."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
from torch import Tensor

from onebasin.plots.style import COLORS, GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The style sheet of the page defines these, for a light and for a dark background; black becomes the colour of its text.
_VARIABLES = {color.lower(): f"var(--line-{i})" for i, color in enumerate(COLORS)}
_VARIABLES |= {GREY: "var(--line-grey)", "#000000": "currentColor"}
_MAX_CELLS = 64
_SHADES = (0, 140, 200, 255)  # how opaque a pixel is that holds none, few, some or most of the units of its row
_NUM_LEVELS = 7  # of the strength of a colour


def themed_svg(figure: Figure, label: str) -> str:
    """A matplotlib figure as an ``<svg>`` element that takes its colours and its font from the page around it.

    It holds only the ids that it uses itself, no style sheet (which would affect the page) and no address. The same figure
    gives the same text.

    Args:
        figure: the figure; its background is left out.
        label: what it shows, for readers who cannot see it.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    root = ElementTree.fromstring(buffer.getvalue())
    used = set(re.findall(r"#([\w-]+)", " ".join(v for e in root.iter() for v in e.attrib.values())))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: _recolor(value) for key, value in element.attrib.items()}
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        element.attrib = attributes
        element[:] = [child for child in element if not child.tag.endswith(("style", "metadata"))]
    root.attrib = {"class": "plot", "role": "img", "aria-label": label, "viewBox": root.attrib["viewBox"]}
    return ElementTree.tostring(root, encoding="unicode")


def _recolor(value: str) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), value)


def matrix_png(sources: Tensor) -> str:
    """A permutation as a picture of its matrix, targets down and sources across: a black PNG, as a ``data:`` address.

    Up to 64 units each entry is one pixel. Beyond that a pixel is a block of entries, darker the more units it holds.

    Args:
        sources: where each unit comes from, (n,).
    """
    size = len(sources)
    cells = min(size, _MAX_CELLS)
    targets = np.arange(size) * cells // size
    counts = np.zeros((cells, cells))
    np.add.at(counts, (targets, sources.numpy() * cells // size), 1)
    full = counts.sum(axis=1, keepdims=True)
    shades = np.ceil(counts / full * (len(_SHADES) - 1)).astype(np.uint8)
    return _encode(shades, bytes(3 * len(_SHADES)), bytes(_SHADES), num_bits=2)


def heat_png(matrix: Tensor) -> str:
    """A matrix as a picture: positive entries in one colour, negative ones in another, the more opaque the larger.

    Up to 64 units each entry is one pixel. Beyond that a pixel is the largest entry of a block. Opacity grows with the root
    of an entry, so that small ones are seen.

    Args:
        matrix: (n, n).
    """
    size = len(matrix)
    cells = min(size, _MAX_CELLS)
    starts = [number * size // cells for number in range(cells)]
    values = matrix.double().numpy()
    ends = [op.reduceat(op.reduceat(values, starts, axis=0), starts, axis=1) for op in (np.maximum, np.minimum)]
    strongest = np.where(ends[0] >= -ends[1], *ends)
    levels = np.rint(_NUM_LEVELS * np.sqrt(np.abs(strongest) / (np.abs(values).max() or 1.0))).astype(np.uint8)
    pixels = np.where(levels == 0, 0, np.where(strongest > 0, levels, levels + _NUM_LEVELS)).astype(np.uint8)
    colors = [bytes.fromhex(color[1:]) for color in COLORS[:2]]
    palette = bytes(3) + b"".join(color * _NUM_LEVELS for color in colors)
    opacity = [255 * level // _NUM_LEVELS for level in range(1, _NUM_LEVELS + 1)]
    return _encode(pixels, palette, bytes([0, *opacity, *opacity]), num_bits=4)


def _encode(pixels: np.ndarray, palette: bytes, opacity: bytes, num_bits: int) -> str:
    """A PNG as a ``data:`` address. Each pixel is the number of a colour, in so many bits."""
    height, width = pixels.shape
    bits = (pixels[..., None] >> np.arange(num_bits - 1, -1, -1, dtype=np.uint8)) & 1
    rows = np.packbits(bits.reshape(height, -1), axis=1)
    unfiltered = np.insert(rows, 0, 0, axis=1).tobytes()  # each row begins with the number of its filter; 0 is none
    header = struct.pack(">IIBBBBB", width, height, num_bits, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"tRNS", opacity), (b"IDAT", zlib.compress(unfiltered, 9))]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in [*chunks, (b"IEND", b"")])
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
