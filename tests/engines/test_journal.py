import pytest
import torch

from onebasin.engines.journal import Journal


def test_results_are_kept_by_their_number(tmp_path):
    journal = Journal(tmp_path / "j", {"seed": 0})
    values = {"cost": 0.1 + 0.2, "is_better": True, "none": None, "index of h": torch.tensor([1, 0])}
    assert journal.recall(journal.next()) is None
    journal.keep(1, values)
    again = Journal(tmp_path / "j", {"seed": 0}, resume=True)
    found = again.recall(again.next())
    assert found is not None
    assert torch.equal(found.pop("index of h"), values.pop("index of h"))
    assert found == values
    assert again.num_recalled == 1
    assert again.recall(again.next()) is None
    again.remove()
    assert not (tmp_path / "j").exists()


def test_a_journal_of_another_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no journal .* to go on from"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)
    Journal(tmp_path / "j", {"seed": 0}).keep(1, {"cost": 1.0})
    with pytest.raises(ValueError, match="of another run: its seed differs"):
        Journal(tmp_path / "j", {"seed": 1}, resume=True)
    (tmp_path / "j" / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="of another run"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)
    assert Journal(tmp_path / "j", {"seed": 1}).recall(1) is None  # begun anew


def test_a_folder_that_is_no_journal_is_left_alone(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        Journal(tmp_path / "j", {"seed": 0})
    assert (tmp_path / "j" / "notes.txt").read_text() == "mine"
