"""Whatever does the work, the result is the same bits."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import open_checkpoint, write_checkpoint
from onebasin.engines import make_engine, opened
from onebasin.tensors.states import read_state
from tests.engines.sharded_networks import make_states


def read_bytes(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_alignment_and_files_are_the_same_bits(apart, pair, tmp_path):
    first, second, symmetry = pair
    found = {}
    for engine in (make_engine("local"), apart):
        result = ob.align(second, to=first, symmetry=symmetry, method="weight-matching", engine=engine)
        write_checkpoint(tmp_path / engine.name, result.model, second, engine=engine)
        found[engine.name] = result
    local, other = found["local"], found[apart.name]
    assert local.permutation == other.permutation
    assert not local.permutation.is_identity
    assert (local.cost, local.start_cost, local.history) == (other.cost, other.start_cost, other.history)
    assert local.cost < local.start_cost
    assert read_bytes(tmp_path / "local") == read_bytes(tmp_path / apart.name)
    assert {"read", "score", "assign", "write"} <= apart.seconds.keys()


@pytest.mark.parametrize("kind", ["l1", "inner", "cosine"])
def test_every_distance_is_the_same_number(apart, pair, kind):
    first, second, symmetry = pair
    options = {"symmetry": symmetry, "method": "weight-matching", "objective": ob.WeightDistance(kind)}
    costs = [ob.align(second, to=first, engine=engine, **options).cost for engine in (None, apart)]
    assert costs[0] == costs[1]


def test_a_copy_is_found(apart, pair, tmp_path):
    first, _, symmetry = pair
    planted = symmetry.random(torch.Generator().manual_seed(1))
    write_checkpoint(tmp_path / "copy", planted.apply(first), first, engine=apart)
    copy = open_checkpoint(tmp_path / "copy")
    result = ob.align(copy, to=first, symmetry=symmetry, method="weight-matching", engine=apart)
    assert (result.method, result.cost) == ("copy detection", 0.0)
    assert result.permutation == planted.inverse()


def test_merges_are_the_same_bits(apart, pair, tmp_path):
    first, second, symmetry = pair
    for engine in (None, apart):
        with opened(engine) as running:
            merged = ob.merge(
                [first, second, second], symmetry=symmetry, method="weight-matching", reference="mean", engine=running
            )
            write_checkpoint(tmp_path / running.name, merged, first, engine=running)
    assert read_bytes(tmp_path / "local") == read_bytes(tmp_path / apart.name)


def test_provenance_is_the_same(apart, pair):
    first, second, symmetry = pair
    found = [ob.provenance(first, second, symmetry=symmetry, engine=engine) for engine in (None, apart)]
    assert found[0].p_values == found[1].p_values
    assert found[0].changes == found[1].changes


def test_what_workers_cannot_do_is_refused(apart, pair):
    first, second, symmetry = pair
    given = {"to": first, "symmetry": symmetry, "engine": apart}
    with pytest.raises(ValueError, match=r"serves the method 'weight-matching', and sinkhorn needs .* in memory"):
        ob.align(second, method="sinkhorn", **given)
    with pytest.raises(ValueError, match="serves the method 'weight-matching'"):
        ob.align(second, **given)  # auto chooses a descent for networks of this size
    with pytest.raises(ValueError, match="serves the objective WeightDistance"):
        ob.align(second, method="weight-matching", objective=lambda *_: torch.zeros(()), **given)
    state = make_states()[1]
    with pytest.raises(ValueError, match="the model is in memory: give checkpoints"):
        ob.align(state, method="weight-matching", **given)
    with pytest.raises(ValueError, match="read by a function that cannot be sent"):
        ob.align(second.map(lambda key, value: value), method="weight-matching", **given)
    lazy = read_state(nn.Linear(3000, 3000, bias=False)).lazily()
    axes = ob.Symmetry.from_axes({"weight": "o h"}, free=["h"])
    with pytest.raises(ValueError, match="holds tensors in memory"):
        ob.align(lazy, to=lazy, symmetry=axes, method="weight-matching", engine=apart)
    with pytest.raises(ValueError, match="permutations alone"):
        ob.align(second, method="weight-matching", kinds="all", to=first, engine=apart)
    with pytest.raises(ValueError, match="holds no models in memory"):
        ob.merge([first, second, second], symmetry=symmetry, method="weight-matching", reference="common", engine=apart)
