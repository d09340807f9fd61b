"""Large tensors of a problem cut into blocks of rows, each of which is then a tensor of its own.

Where no group moves the first axis of a tensor, as the tokens of an embedding, inner products over all of it are sums over
blocks of its rows. So a block at a time is held, and blocks can be given to different workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import Factor, Layout
from onebasin.tensors.row_blocks import list_blocks, name_block
from onebasin.tensors.states import LazyState

Blocks = Mapping[str, Sequence[tuple[int, int]]]
"""For each tensor that is cut, the first rows of its blocks, and the rows behind their last."""


def find_blocks(symmetry: Symmetry, keys: Collection[str], *states: LazyState) -> Blocks:
    """The tensors to cut: large ones, whose rows no group moves, and of which all states can read rows alone."""
    if symmetry.scales or symmetry.bases:
        return {}
    found = {
        key: list_blocks(states[0].shapes[key])
        for key in keys
        if key in symmetry.row_keys and all(state.has_rows(key) for state in states)
    }
    return {key: blocks for key, blocks in found.items() if len(blocks) > 1}


def cut_symmetry(symmetry: Symmetry, blocks: Blocks) -> Symmetry:
    """The same groups, with blocks in place of tensors."""
    layouts: dict[str, Layout] = {}
    for key, layout in symmetry.layouts.items():
        if key in blocks:
            layouts |= {name_block(key, *rows): (Factor(rows[1] - rows[0]), *layout[1:]) for rows in blocks[key]}
        else:
            layouts[key] = layout
    ties = tuple(keys for keys in symmetry.ties if not any(key in blocks for key in keys))
    return replace(symmetry, layouts=layouts, ties=ties)


def cut_keys(keys: Sequence[str], blocks: Blocks) -> tuple[str, ...]:
    """Keys of tensors, with those of blocks in place of those that are cut."""
    return tuple(
        name for key in keys for name in ([name_block(key, *rows) for rows in blocks[key]] if key in blocks else [key])
    )
