"""The continual-learning experiment: its trials can be made, its tables say what the records say."""

import numpy as np
import pytest
import torch

from experiments import continual, continual_tables
from experiments.continual_settings import ABLATIONS, AUTHORS, list_trials
from onebasin.continual import AccuracyMatrix, Joint, RebasinStrategy, rotated


def make_record(stage: str, runs: list[tuple[str, int, list[list[float]]]]) -> dict:
    config = {"stage": stage, "benchmark": "mnist", "layers": 1}
    result = {"runs": [{"row": row, "seed": seed, "variant": {}, "rows": rows, "moved": [0.5]} for row, seed, rows in runs]}
    return {"config": config, "result": result}


def test_every_run_on_mnist_can_be_made():
    num_made = 0
    for trial in list_trials(quick=False):
        if trial["benchmark"] == "mnist":
            for run in trial["runs"]:
                strategy = continual.make_strategy(trial, run, trial["seeds"][0], "cpu")
                assert isinstance(strategy, RebasinStrategy) == (run["strategy"] == "rebasin")
                num_made += 1
    assert num_made > 100


def test_settings_are_the_papers():
    trial = {"benchmark": "mnist", "layers": 1}
    authors = continual.make_strategy(trial, {"strategy": "rebasin", "variant": {"batch_size": 500, "epochs": 5}}, 0, "cpu")
    delta = authors.make_optimizer(authors.optimizer, [torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    plans = authors.make_optimizer(authors.plan_optimizer, [torch.nn.Parameter(torch.zeros(1))])
    assert (delta["lr"], delta["weight_decay"]) == (0.05, 0.1)
    assert isinstance(plans, torch.optim.Adam)
    assert plans.param_groups[0]["lr"] == 0.1
    assert (authors.alpha, authors.clip, authors.memory.per_class) == (0.8, 1e-3, 5)
    assert ABLATIONS["as the authors"] == {}
    assert AUTHORS["cifar"]["rebasin"]["lr"] == 0.5


def test_no_seed_is_both_tuned_and_tested_on():
    seeds: dict[bool, set[int]] = {True: set(), False: set()}
    for trial in list_trials(quick=False):
        if trial["stage"] != "cost":
            seeds[trial["stage"] == "tune"] |= set(trial["seeds"])
    assert not seeds[True] & seeds[False]


def test_scores_and_comparison():
    runs = [("re-basin", seed, [[0.9], [0.8 + 0.01 * seed, 0.7]]) for seed in range(3)]
    runs += [("other", seed, [[0.9], [0.7, 0.7 + 0.01 * seed**2]]) for seed in range(3)]
    rows = continual_tables.by_row(continual_tables.collect([make_record("chosen", runs)], "chosen", "mnist"))
    accuracy, forgetting, _ = continual_tables.scores(rows["re-basin"].values())
    assert accuracy == pytest.approx([75, 75.5, 76])
    assert forgetting == pytest.approx([0.1, 0.09, 0.08])
    differences = np.array([(0.7 + 0.7 + 0.01 * s**2) / 2 - (0.8 + 0.01 * s + 0.7) / 2 for s in range(3)]) * 100
    mean, error, p_value = continual_tables.compare(rows["other"], rows["re-basin"])
    assert mean == pytest.approx(differences.mean())
    assert error == pytest.approx(differences.std(ddof=1) / 3**0.5)
    assert p_value < 0.05


def test_drawing(tmp_path, capsys):
    runs = [(row, seed, [[0.9], [0.8, 0.7]]) for row in ("re-basin", "replay") for seed in range(2)]
    failed = {"config": {"stage": "tune", "benchmark": "mnist", "layers": 1}, "result": {"error": "RuntimeError: no room"}}
    continual_tables.draw([make_record("chosen", runs), failed], tmp_path)
    assert "75.00 ± 0.00 | 0.100 ± 0.000" in (tmp_path / "continual.md").read_text()
    assert "no room" in capsys.readouterr().out


def test_joint_training_learns_once(monkeypatch):
    images, labels = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    stream = rotated((images, labels), (images, labels), 3)
    monkeypatch.setattr(continual, "_make_stream", lambda *_: stream)
    runs = [{"row": name, "strategy": name, "variant": {"epochs": 1, "batch_size": 10}} for name in ("joint", "finetune")]
    config = {"stage": "authors", "benchmark": "mnist", "num_tasks": 3, "layers": 1, "seeds": [0], "runs": runs}
    joint, plain = continual.run(config, "cpu")["runs"]
    assert [len(row) for row in joint["rows"]] == [3]
    assert AccuracyMatrix(plain["rows"]).num_tasks == 3
    assert Joint is continual.STRATEGIES["joint"]
