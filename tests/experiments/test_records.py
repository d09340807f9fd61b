"""Records that tables are drawn from are those of trials that a command can run."""

import importlib
from pathlib import Path

import pytest

from experiments.frame import identify, read_records

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", ["deep", "many", "soft", "transformers"])
def test_every_record_is_of_a_known_trial(name):
    known = {identify(config) for config in importlib.import_module(f"experiments.{name}").configs(quick=False)}
    records = [identify(record["config"]) for record in read_records(RESULTS / f"{name}.jsonl")]
    assert records
    assert [record for record in records if record not in known] == []
    assert len(set(records)) == len(records)
