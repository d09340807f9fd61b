"""The benchmarks of cost: their floors are what is computed, and a worker that fails loses no other row."""

import math
import sys

import pytest
from torch.utils.flop_counter import FlopCounterMode

import onebasin as ob
from benchmarks import copy_descents, descent, measuring
from benchmarks.align_tables import load_records
from benchmarks.growth import fit_exponent
from benchmarks.measuring import run_sizes
from benchmarks.solvers import make_task
from benchmarks.steps import count_flops, make_batch, make_pair, our_step, training_step

WIDTH = 128  # from here on the operator has no matrix products of its own, which the counter would count


@pytest.mark.parametrize(("kind", "depth"), [("training", 2), ("L2", 2), ("L2", 4), ("Mid", 2), ("Rnd", 2)])
def test_the_floor_counts_the_products_of_a_step(kind, depth):
    batch = make_batch("cpu")
    model, to = make_pair(WIDTH, depth, "cpu")
    symmetry = ob.symmetry(to, batch[0][:1], verify=False)
    step = training_step(WIDTH, "cpu") if kind == "training" else our_step(model, to, symmetry, kind)
    with FlopCounterMode(display=False) as counter:
        step(batch)
    assert counter.get_total_flops() == pytest.approx(count_flops(WIDTH, kind, depth), rel=0.01)


def test_the_floor_of_a_real_network():
    """Its products are counted as they are run: for the MLP they can be told beforehand."""
    parts = descent.our_parts(make_task("mlp", None, "cpu"))
    assert descent.count_flops(parts["step"]) == pytest.approx(count_flops(512, "L2"), rel=0.01)
    assert descent.count_flops(parts["distance"]) == descent.count_flops(parts["step"])


def test_a_whole_descent_on_a_copy():
    records = copy_descents.measure("mlp", {"ours": copy_descents.OURS["ours"]}, rounds=1)
    assert [(r["exact"], r["steps"] <= 5) for r in records] == [(True, True)]
    assert copy_descents.describe(records).endswith("| 1.00 | 1.00 |")


def test_exponents():
    assert fit_exponent([(n, 3 * n**2.5) for n in (64, 128, 256, 512)]) == pytest.approx(2.5)
    # the lower half, where something else dominates, does not count
    assert fit_exponent([(n, max(n**2, 10**6)) for n in (64, 128, 2048, 4096)]) == pytest.approx(2.0)
    assert fit_exponent([(64, 1.0)]) is None


WORKER = """
import json, sys, time
sizes = [int(s) for s in sys.argv[sys.argv.index("--sizes") + 1:]]
for size in sizes:
    if size == 3:
        raise MemoryError("out of memory")
    if size == 5:
        time.sleep(60)
    print("noise that is not JSON")
    print(json.dumps({"seconds": size * 2.0}), flush=True)
"""


def test_a_worker_that_fails_loses_no_other_row(tmp_path, monkeypatch):
    (tmp_path / "some_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(run_sizes(sys.executable, "some_worker", ["x"], [1, 2, 3, 4, 5, 6], limit=4))
    assert [(r["size"], r.get("seconds")) for r in found] == [(1, 2.0), (2, 4.0), (3, None), (4, 8.0), (5, None)]
    assert "MemoryError: out of memory" in found[2]["failed"]
    assert found[4]["failed"] == "not done in 4 s"


def test_the_floor_is_cubic_in_the_end():
    widths = (2**k for k in range(6, 14))
    slope = fit_exponent([(w, count_flops(w, "L2")) for w in widths])
    assert slope is not None
    assert 2.8 < slope < 3
    assert math.isclose(count_flops(512, "Mid"), count_flops(512, "training") + count_flops(512, "L2"))


@pytest.mark.parametrize(
    ("out", "peer", "message"),
    [("nowhere/x.json", None, "does not exist"), (None, "nowhere", "neither an interpreter nor a folder")],
)
def test_missing_files_are_told_before_any_work(tmp_path, out, peer, message):
    with pytest.raises(SystemExit, match=message):
        measuring.check_files(None if out is None else tmp_path / out, None if peer is None else str(tmp_path / peer))


def test_a_file_that_has_no_records_is_told(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(SystemExit, match="is no file of records"):
            load_records(tmp_path / name)
