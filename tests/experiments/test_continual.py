"""The continual-learning experiment: its trials can be made, its tables say what the records say."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import continual, continual_tables
from experiments.continual_settings import ABLATIONS, TUNING, list_trials
from experiments.frame import identify, read_records
from onebasin.continual import AccuracyMatrix, RebasinStrategy, rotated

RESULTS = Path(__file__).parent.parent.parent / "results"
TRIAL = {"benchmark": "mnist", "layers": 1, "strategy": "rebasin"}


def make_record(stage: str, row: str, matrices: list[list[list[float]]]) -> dict:
    config = {"stage": stage, "benchmark": "mnist", "layers": 1, "row": row}
    runs = [{"seed": seed, "variant": {}, "rows": rows, "moved": [0.5]} for seed, rows in enumerate(matrices)]
    machine = {"seconds": 1.0, "machine": "a machine", "torch": "2", "commit": "abc"}
    return {"config": config, "result": {"runs": runs, "tuning": []}, **machine}


def test_every_run_on_mnist_can_be_made():
    num_made = 0
    for trial in list_trials(quick=False):
        if trial["benchmark"] == "mnist":
            for variant in trial["variants"]:
                strategy = continual.make_strategy(trial, variant, trial["seeds"], "cpu")
                assert isinstance(strategy, RebasinStrategy) == (trial["strategy"] == "rebasin")
                num_made += 1
    assert num_made > 50


def test_settings_are_the_papers():
    authors = continual.make_strategy(TRIAL, {"batch_size": 500, "epochs": 5}, [0], "cpu")
    assert isinstance(authors, RebasinStrategy)
    delta = authors.make_optimizer(authors.optimizer, [torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    plans = authors.make_optimizer(authors.plan_optimizer, [torch.nn.Parameter(torch.zeros(1))])
    assert (delta["lr"], delta["weight_decay"]) == (0.05, 0.1)
    assert isinstance(plans, torch.optim.Adam)
    assert plans.param_groups[0]["lr"] == 0.1
    assert (authors.alpha, authors.clip, authors.memory.per_class) == (0.8, 1e-3, 5)
    assert ABLATIONS["as the authors"] == {}


def test_trials_have_the_names_of_the_records():
    """A trial is known by its whole configuration, so an option keeps its name there when the library renames it."""
    records = read_records(RESULTS / "continual.jsonl")
    known = {identify(record["config"]) for record in records}
    settled = [trial for trial in list_trials(quick=False) if "settled" in trial["row"]]
    assert [identify(trial) in known for trial in settled] == [True] * 3
    for trial in settled:
        if trial["benchmark"] == "mnist":
            strategy = continual.make_strategy(trial, trial["variants"][0], [0], "cpu")
            assert isinstance(strategy, RebasinStrategy)
            assert strategy.share_after_fusion == 0.5


def test_no_seed_is_both_tuned_and_tested_on():
    for trial in list_trials(quick=False):
        assert not set(TUNING[trial["benchmark"]][0]) & set(trial["seeds"])
    assert {seed for trial in list_trials(quick=False) for seed in trial["seeds"]} == set(range(20))


def test_scores_and_comparison():
    records = [
        make_record("tuned", "re-basin", [[[0.9], [0.8 + 0.01 * seed, 0.7]] for seed in range(3)]),
        make_record("tuned", "other", [[[0.9], [0.7, 0.7 + 0.01 * seed**2]] for seed in range(3)]),
    ]
    rows = continual_tables.collect(records, "tuned", "mnist")
    accuracy, forgetting, _ = continual_tables.scores(rows["re-basin"].values())
    assert accuracy == pytest.approx([75, 75.5, 76])
    assert forgetting == pytest.approx([0.1, 0.09, 0.08])
    differences = np.array([(0.7 + 0.7 + 0.01 * s**2) / 2 - (0.8 + 0.01 * s + 0.7) / 2 for s in range(3)]) * 100
    mean, error, p_value = continual_tables.compare(rows["other"], rows["re-basin"])
    assert mean == pytest.approx(differences.mean())
    assert error == pytest.approx(differences.std(ddof=1) / 3**0.5)
    assert p_value < 0.05


def test_drawing(tmp_path, capsys):
    matrices = [[[0.9], [0.8, 0.7]]] * 2
    failed = {"config": {"stage": "tuned"}, "result": {"error": "RuntimeError: no room"}}
    records = [make_record("tuned", row, matrices) for row in ("re-basin", "replay")]
    continual_tables.draw([*records, failed], tmp_path)
    assert "75.00 ± 0.00 | 0.100 ± 0.000" in (tmp_path / "continual.md").read_text()
    assert "no room" in capsys.readouterr().out


@pytest.fixture
def small_stream(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    images = torch.rand(10, 1, 28, 28, generator=generator)[labels] + 0.1 * torch.rand(200, 1, 28, 28, generator=generator)
    stream = rotated((images, labels), (images, labels), 3)
    asked: list[bool] = []
    monkeypatch.setattr(continual, "_make_stream", lambda benchmark, validation, device: asked.append(validation) or stream)
    return asked


def test_a_setting_is_chosen_on_validation_data(small_stream):
    variants = [{"epochs": 2, "batch_size": 20, "lr": lr} for lr in (1e-6, 0.1)]
    config = {**TRIAL, "stage": "tuned", "strategy": "replay", "num_tasks": 3, "seeds": [0, 1], "variants": variants}
    result = continual.run(config, "cpu")
    assert small_stream == [True, False]
    assert [run["seed"] for run in result["tuning"]] == [100, 100]
    assert [run["variant"]["lr"] for run in result["runs"]] == [0.1, 0.1]
    assert all(AccuracyMatrix(run["rows"]).num_tasks == 3 for run in result["runs"])


def test_joint_training_learns_once(small_stream):
    config = {**TRIAL, "stage": "authors", "strategy": "joint", "num_tasks": 3, "seeds": [0], "variants": [{"epochs": 1}]}
    (run,) = continual.run(config, "cpu")["runs"]
    assert [len(row) for row in run["rows"]] == [3]
    assert small_stream == [False]
