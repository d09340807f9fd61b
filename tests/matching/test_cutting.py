import pytest
import torch

import onebasin as ob
from onebasin.matching.cutting import cut_keys, cut_symmetry, find_blocks
from onebasin.relaxation.objectives import WeightDistance
from onebasin.tensors import row_blocks
from onebasin.tensors.states import LazyState, RowReader

AXES = {"embed": "v s", "up": "h s", "down": "s h", "heads": "(n d) s", "out": "s (n d)", "scales": "n"}
SIZES = {"embed": (200, 6), "up": (90, 6), "down": (6, 90), "heads": (80, 6), "out": (6, 80), "scales": (4,)}


class Reader(RowReader):
    def __init__(self, state):
        self.state = state

    def __call__(self, key):
        return self.state[key]

    def read_rows(self, key, start, stop):
        return self.state[key][start:stop]


def make_lazy(state, read=None):
    return LazyState({key: value.to("meta") for key, value in state.items()}, read or Reader(state))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "MAX_ENTRIES", 256)


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    first = {key: torch.randn(shape, generator=generator) for key, shape in SIZES.items()}
    symmetry = ob.Symmetry.from_axes(AXES, ["s", "h", "d[n]"], first)
    moved = symmetry.random(generator).apply(first)
    second = {key: value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in moved.items()}
    return first, second, symmetry


def test_tensors_are_cut_where_no_group_moves_their_rows(small_blocks, pair):
    first, second, symmetry = pair
    blocks = find_blocks(symmetry, tuple(first), make_lazy(first), make_lazy(second))
    assert blocks.keys() == {"embed"}  # rows of "heads" belong to heads, which have units of their own
    assert find_blocks(symmetry, tuple(first), make_lazy(first), make_lazy(second, second.__getitem__)) == {}
    cut = cut_symmetry(symmetry, blocks)
    assert cut.groups == symmetry.groups
    names = cut_keys(["up", "embed"], blocks)
    assert names == ("up", *(f"embed[{start}:{min(start + 32, 200)}]" for start in range(0, 200, 32)))
    assert cut.layouts.keys() == {*symmetry.layouts, *names} - {"embed"}
    assert [term.size for term in cut.layouts["embed[192:200]"]] == [8, 6]


@pytest.mark.parametrize("keys", [None, ("embed", "up")])
def test_what_is_found_is_the_same_in_blocks(small_blocks, pair, keys):
    first, second, symmetry = pair
    options = {"symmetry": symmetry, "method": "weight-matching", "objective": WeightDistance(keys=keys)}
    whole = ob.align(second, to=first, **options)
    cut = ob.align(make_lazy(second), to=make_lazy(first), **options)
    assert cut.permutation == whole.permutation
    assert not whole.permutation.is_identity
    assert cut.cost == pytest.approx(whole.cost, rel=1e-5)
    assert cut.start_cost == pytest.approx(whole.start_cost, rel=1e-5)
    assert cut.permutation.symmetry.layouts.keys() == symmetry.layouts.keys()
    assert set(cut.model) == set(first)


def test_a_copy_is_found_in_blocks(small_blocks, pair):
    first, _, symmetry = pair
    planted = symmetry.random(torch.Generator().manual_seed(1))
    found = ob.align(make_lazy(planted.apply(first)), to=make_lazy(first), symmetry=symmetry, method="weight-matching")
    assert (found.method, found.cost) == ("copy detection", 0.0)
    assert found.permutation == planted.inverse()
