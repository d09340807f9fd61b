import json
from pathlib import Path

import pytest

from experiments import deep, transformers

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(("experiment", "name"), [(deep, "deep"), (transformers, "transformers")])
def test_the_picture_is_that_of_the_records(experiment, name, tmp_path):
    records = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    experiment.draw(records, tmp_path)
    assert (tmp_path / f"{name}.svg").read_text().count("<path") > 20
    assert (tmp_path / f"{name}.md").read_text() == (RESULTS / f"{name}.md").read_text()


def test_records_without_the_methods_of_the_picture_have_none(tmp_path):
    records = [json.loads(line) for line in (RESULTS / "transformers.jsonl").read_text().splitlines()]
    transformers.draw([record for record in records if record["config"]["method"] != "naive"], tmp_path)
    assert not (tmp_path / "transformers.svg").exists()
