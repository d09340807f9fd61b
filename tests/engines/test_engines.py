"""Whatever does the work, the result is the same bits."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import open_checkpoint, write_checkpoint
from onebasin.checkpoints.hashing import hash_files
from onebasin.engines import make_engine, opened
from onebasin.tensors import row_blocks
from onebasin.tensors.states import read_state
from tests.engines.sharded_networks import make_states


def read_bytes(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_alignment_and_files_are_the_same_bits(apart, pair, tmp_path, monkeypatch, in_blocks):
    if in_blocks:
        monkeypatch.setattr(row_blocks, "MAX_ENTRIES", 30)
        monkeypatch.setattr(row_blocks, "_MULTIPLE", 1)
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


def test_paths_hold_in_other_working_folders(apart, pair, tmp_path, monkeypatch):
    """Workers have been started before, and elsewhere."""
    _, _, symmetry = pair
    assert list(apart.map(abs, [-1])) == [1]
    monkeypatch.chdir(tmp_path)
    first, second = open_checkpoint("a"), open_checkpoint("b")
    torch.save(first.load(), "a.pt")
    result = ob.align(second, to=open_checkpoint("a.pt"), symmetry=symmetry, method="weight-matching", engine=apart)
    write_checkpoint("out", result.model, second, engine=apart)
    monkeypatch.chdir("/")
    assert torch.equal(first["embed.weight"], open_checkpoint(tmp_path / "a")["embed.weight"])
    assert len(read_bytes(tmp_path / "out")) == 5
    assert hash_files(first, apart) == hash_files(open_checkpoint(tmp_path / "a"))
    write_checkpoint(tmp_path / "again", first, first, engine=apart)


def test_progress_is_one_number_over_all_stages(apart, pair):
    first, second, symmetry = pair
    told = []
    options = {"symmetry": symmetry, "method": "weight-matching", "engine": apart}
    ob.align(second, to=first, progress=lambda *each: told.append(each), **options)
    stages = list(dict.fromkeys(what for what, _, _ in told))
    assert stages == ["checking, MB", "measuring, MB", "looking for a copy, MB", "matching, MB"]
    assert all(0 <= done <= total for _, done, total in told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_the_timeline_has_a_row_for_each_worker(apart, pair):
    first, second, symmetry = pair
    ob.align(second, to=first, symmetry=symmetry, method="weight-matching", engine=apart)
    rows = apart.timeline.rows
    assert "this process" in rows
    assert len(rows) >= 2
    for row in rows.values():
        assert all(sum(each) <= apart.timeline.width * 1.01 for each in zip(*row.values(), strict=True))


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


def test_provenance_says_what_it_needs_before_it_reads(pair, monkeypatch):
    first, second, symmetry = pair
    read = []
    monkeypatch.setattr("onebasin.checkpoints.reading._SafetensorsReader._read", lambda *given: read.append(given))
    with make_engine("local", memory=10**6) as engine, pytest.raises(ValueError, match=r"the limit is 0.00 GB"):
        ob.provenance(first, second, symmetry=symmetry, engine=engine)
    with make_engine("local", memory=10**6) as engine, pytest.raises(ValueError, match=r"the limit is 0.00 GB"):
        ob.align(second, to=first, symmetry=symmetry, method="weight-matching", engine=engine)
    assert not read
