import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import EXPERIMENTS
from experiments.frame import identify, read_records, run_experiment, select

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """An experiment that remembers what it ran."""
    import types

    ran = []
    module = types.ModuleType("experiments.toy")
    module.run = lambda config, device: ran.append(config) or {"square": config["x"] ** 2}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments.toy", module)
    return ran


def test_a_run_goes_on_where_it_stopped(toy: list[dict], tmp_path: Path):
    path = tmp_path / "toy.jsonl"
    configs = [{"x": x, "seed": 0} for x in range(4)]
    run_experiment("toy", configs[:2], path)
    records = run_experiment("toy", configs, path)
    assert [config["x"] for config in toy] == [0, 1, 2, 3]
    assert [record["result"]["square"] for record in records] == [0, 1, 4, 9]
    assert {"commit", "torch", "machine", "seconds"} <= records[0].keys()


def test_a_line_that_was_cut_off_is_run_again(toy: list[dict], tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "toy.jsonl"
    run_experiment("toy", [{"x": 1}, {"x": 2}], path)
    path.write_text(path.read_text()[:-20])
    records = run_experiment("toy", [{"x": 1}, {"x": 2}], path)
    assert [record["result"]["square"] for record in records] == [1, 4]
    assert len(toy) == 3
    assert "no record" in capsys.readouterr().err
    assert len(read_records(path)) == 2


def test_a_trial_is_known_by_its_whole_configuration():
    assert identify({"a": 1, "b": [2]}) == identify({"b": [2], "a": 1})
    assert identify({"a": 1}) != identify({"a": 1, "seed": 0})


def test_conditions_select_trials():
    configs = [{"task": t, "seed": s} for t in ("x", "y") for s in (0, 1)]
    assert select(configs, ["task=x", "seed=1"]) == [{"task": "x", "seed": 1}]
    assert len(select(configs, ["task=x,y"])) == 4
    named = [{"row": "alone"}, {"row": "alone, with scales"}]
    assert select(named, ["row=alone, with scales"]) == named[1:]
    with pytest.raises(ValueError, match="a key of seed, task"):
        select(configs, ["tusk=x"])
    with pytest.raises(ValueError, match="no trial has task=z"):
        select(configs, ["task=z"])


def test_processes_and_this_process_give_the_same(tmp_path: Path):
    configs = [{"init": "Rnd", "hidden": 2, "method": "wm", "first": first, "num": 1} for first in (0, 1)]
    here = run_experiment("table1", configs, tmp_path / "one.jsonl")
    there = run_experiment("table1", configs, tmp_path / "two.jsonl", num_processes=2)
    for a, b in zip(here, there, strict=True):
        assert a["config"] == b["config"]
        assert [x["l1_sum"] for x in a["result"]] == [x["l1_sum"] for x in b["result"]]


def test_a_trial_that_fails_in_a_process_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture):
    good = [{"init": "Rnd", "hidden": 2, "method": "wm", "first": first, "num": 1} for first in (0, 1)]
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyError, match="no-such-method"):
        run_experiment("table1", [{**good[0], "method": "no-such-method"}, *good], path, num_processes=2)
    assert sorted(record["config"]["first"] for record in read_records(path)) == [0, 1]
    assert "the others go on" in capsys.readouterr().err


def test_ray_gives_the_same(tmp_path: Path):
    ray = pytest.importorskip("ray")
    configs = [{"init": "Rnd", "hidden": 2, "method": "wm", "first": 0, "num": 1}]
    here = run_experiment("table1", configs, tmp_path / "one.jsonl")
    there = run_experiment("table1", configs, tmp_path / "two.jsonl", engine="ray")
    ray.shutdown()
    assert here[0]["result"][0]["l1_sum"] == there[0]["result"][0]["l1_sum"]


def test_the_command_speaks_plainly(tmp_path: Path):
    def call(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "experiments", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "table1" in call("--help").stdout
    failed = call("table2", "--draw", "--out", str(tmp_path))
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_records_in_the_repository_can_be_read():
    paths = [ROOT / "results" / f"{name}.jsonl" for name in EXPERIMENTS]
    for path in filter(Path.exists, paths):
        records = read_records(path)
        assert records, path
        assert len({identify(record["config"]) for record in records}) == len(records), f"{path} has a trial twice"
        assert all(len(record["commit"]) >= 7 for record in records), f"{path} has a record without its commit"
        json.dumps(records)
