"""Records that tables are drawn from are those of trials that a command can run."""

import importlib
from pathlib import Path

import pytest

from experiments import deep
from experiments.frame import identify, read_records

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", ["deep", "many", "soft", "transformers"])
def test_every_record_is_of_a_known_trial(name):
    known = {identify(config) for config in importlib.import_module(f"experiments.{name}").configs(quick=False)}
    records = [identify(record["config"]) for record in read_records(RESULTS / f"{name}.jsonl")]
    assert records
    assert [record for record in records if record not in known] == []
    assert len(set(records)) == len(records)


def test_deep_rows_have_one_number_of_synthetic_images():
    result = {key: {"accuracy": 0.5, "loss": 1.0} for key in ("half way, plain", "at 0.25", "at 0.5", "at 0.75")}
    config = {"recipe": "resnet20-long", "method": "synthetic+scales"}
    records = [{"config": config, "result": result, "commit": commit} for commit in ("17200e4", "fbdb7b3", "fbdb7b3")]
    rows = [(label.rpartition(", ")[2], len(results)) for _, label, results in deep._group(records)]
    assert rows == [("4,000 images", 1), ("8,000 images", 2)]
