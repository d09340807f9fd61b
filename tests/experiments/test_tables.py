"""Every experiment runs end to end on tiny data and draws its tables and figures from the records."""

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import convergence, depth, figures, sensitivity, table1, table2
from experiments.frame import run_experiment
from experiments.table2 import METHODS
from experiments.table2_drawing import Cells, _are_same_networks, _columns
from experiments.tasks import TASKS, _read, load
from onebasin.datasets import downloads


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random images in place of CIFAR-10 and MNIST, and the working folder where nothing is in the way."""
    rng = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for part, num in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (num, 28, 28), np.uint8)
        header = np.array([0x0803, num, 28, 28], ">i4").tobytes()
        files[f"MNIST/raw/{part}-images-idx3-ubyte.gz"] = gzip.compress(header + images.tobytes())
        labels = np.array([0x0801, num], ">i4").tobytes() + (np.arange(num) % 10).astype(np.uint8).tobytes()
        files[f"MNIST/raw/{part}-labels-idx1-ubyte.gz"] = gzip.compress(labels)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        content = {b"data": rng.integers(0, 256, (20, 3072), np.uint8), b"labels": [i % 10 for i in range(20)]}
        files[f"cifar-10-batches-py/{name}"] = pickle.dumps(content, 3)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    sums = {name.removesuffix(".gz"): (hashlib.md5(content).hexdigest(),) for name, content in files.items()}
    monkeypatch.setattr(downloads, "_MD5", sums)
    monkeypatch.setenv("ONEBASIN_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _read.cache_clear()
    load.cache_clear()
    yield tmp_path
    _read.cache_clear()
    load.cache_clear()


def test_table1(tiny: Path, capsys: pytest.CaptureFixture):
    configs = [
        {"init": init, "hidden": 2, "method": m, "first": 0, "num": 2}
        for init in ("Rnd", "Pol1")
        for m in ("wm", "wm-restarts", "sinkhorn", "sinkhorn-no-polish")
    ]
    records = run_experiment("table1", configs, tiny / "table1.jsonl")
    table1.draw(records, tiny)
    assert "| Sinkhorn L2 (ours), defaults: copy detection, then descent and polish | 2/2 |" in capsys.readouterr().out
    assert (tiny / "table1.md").is_file()


def test_table2(tiny: Path):
    configs = [
        {"task": "Pol1", "width": 10, "method": m, "num_pairs": 2, "first": 0, "num": 2, "options": {}}
        for m in ("naive", "repair", "wm", "activation")
    ]
    short = {"steps": 10}
    configs += [{**configs[0], "method": m, "options": short} for m in ("ste", "l2", "mid", "wm+rnd")]
    records = run_experiment("table2", configs, tiny / "table2.jsonl")
    by_method = {record["config"]["method"]: record["result"] for record in records}
    ends = by_method["naive"]["train"]["ends"]
    for method, result in by_method.items():
        assert result["train"]["ends"] == pytest.approx(np.array(ends), rel=1e-3), f"{method} changed a function"
    assert np.mean(by_method["mid"]["train"]["barrier"]) <= np.mean(by_method["naive"]["train"]["barrier"])
    table2.draw(records, tiny)
    assert (tiny / "table2-curves.png").stat().st_size > 10_000


def test_classification_has_accuracy(tiny: Path):
    config = {"task": "MNIST", "width": 8, "method": "wm", "num_pairs": 1, "first": 0, "num": 1, "options": {}}
    result = table2.run(config, "cpu")
    assert 0 <= result["test"]["middle_accuracy"][0] <= 1


def test_settings_are_tried_on_other_networks_and_validation_data(tiny: Path):
    configs = sensitivity.configs(quick=True)[:2]
    records = run_experiment("sensitivity", configs, tiny / "sensitivity.jsonl")
    sensitivity.draw(records, tiny)
    assert (tiny / "sensitivity.md").read_text().count("| base") == 1
    seen = load(TASKS["Pol3"], "train").x
    assert not torch.equal(load(TASKS["Pol3"], "validation").x, seen)


def test_deep_networks(tiny: Path):
    configs = [
        {"network": n, "seeds": [0, 1], "method": m, "epochs": 1, "num_train": 20, "steps": 1}
        for n, m in (("resnet20", "wm"), ("vit", "naive"))
    ]
    records = run_experiment("depth", configs, tiny / "depth.jsonl")
    depth.draw(records, tiny)
    assert (tiny / "depth.md").is_file()


def test_convergence_and_figures(tiny: Path):
    records = run_experiment("convergence", convergence.configs(quick=True)[:1], tiny / "convergence.jsonl")
    convergence.draw(records, tiny)
    assert records[0]["result"]["exact"]
    records = run_experiment("figures", [{"figure": "matrices", "seed": 0}], tiny / "figures.jsonl")
    figures.draw(records, tiny)
    assert records[0]["result"]["Sinkhorn L2"] == records[0]["result"]["expected"]
    assert records[0]["result"]["weight matching"] != records[0]["result"]["expected"]


def test_rows_of_networks_from_two_machines_are_not_paired():
    """Half of the pairs end at other losses: the same seeds, trained elsewhere."""

    def record(method, ends):
        split = {"barrier": [0.1, 0.2], "ends": ends}
        return {"config": {"task": "MNIST", "width": 64, "method": method, "first": 0}, "result": {"test": split}}

    here, elsewhere = [[0.2, 0.3], [0.21, 0.31]], [[0.2, 0.3], [0.22, 0.31]]
    cells = Cells([record("wm", here), record("mid", here), record("ste", elsewhere)])
    assert _are_same_networks(cells, "MNIST", 64, "mid", "wm", 2)
    assert not _are_same_networks(cells, "MNIST", 64, "ste", "wm", 2)
    assert not _are_same_networks(cells, "MNIST", 64, "mid", "rnd", 2)
    assert _are_same_networks(cells, "MNIST", 64, "ste", "wm", 1)


def test_rows_on_fewer_pairs_stand_beside_ours_on_the_same_pairs():
    def record(method, barriers):
        split = {"barrier": barriers, "auc": barriers, "ends": [[0.2, 0.3]] * len(barriers), "middle_accuracy": []}
        config = {"task": "MNIST", "width": 64, "method": method, "first": 0}
        return {"config": config, "result": {"train": split, "test": split, "seconds_each": 1.0}}

    whole = {"naive": [1.0, 3.0], "wm": [0.5, 0.5], "ste": [0.5, 0.5], "activation": [0.2, 0.2]}
    cells = Cells([*(record(method, values) for method, values in whole.items()), record("authors-l2", [0.25])])
    (all_pairs, rows), (first_pair, fewer) = _columns(cells, "MNIST", 64)
    assert "2 pairs" in all_pairs[0]
    assert [row[0] for row in rows] == [METHODS[method] for method in METHODS if method in whole]
    assert "1 pair;" in first_pair[0]
    assert {row[0]: row[2] for row in fewer}[METHODS["authors-l2"]] == "0.250"  # over the naive barrier of the first pair
    assert METHODS["activation"] not in [row[0] for row in fewer]


def test_descents_of_older_records_are_marked():
    result = {split: {"barrier": [0.1]} for split in ("train", "test")}
    records = [
        {"config": {"task": "Pol1", "width": 10, "method": method, "first": 0}, "result": result, "commit": commit}
        for method, commit in (("wm", "ce9201e"), ("mid", "ce9201e"), ("rnd", "abc"))
    ]
    labels = [Cells(records).label("Pol1", method, 10) for method in ("wm", "mid", "rnd")]
    assert labels == ["weight matching", "Sinkhorn Mid †", "Sinkhorn Rnd"]
