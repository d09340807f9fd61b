import os
import shutil

import pytest
import torch

from onebasin.engines.journal import Journal, hash_output
from onebasin.tensors.files import load_tensors, save_tensors

ANEW = "begin anew without --resume"


def take_all(values):
    """Every value is right."""


def begin(folder, **fingerprint):
    journal = Journal(folder, fingerprint)
    journal.begin()
    return journal


def find_record(folder, name="000001"):
    (file,) = folder.glob(f"{name}-*.safetensors")
    return file


def test_results_are_kept_by_their_number(tmp_path):
    journal = begin(tmp_path / "j", seed=0)
    values = {"cost": 0.1 + 0.2, "is_better": True, "none": None, "index of h": torch.tensor([1, 0])}
    assert journal.recall(journal.next(), take_all) is None
    journal.keep(1, values)
    again = Journal(tmp_path / "j", {"seed": 0}, resume=True)
    again.begin()
    found = again.recall(again.next(), take_all)
    assert found is not None
    assert torch.equal(found.pop("index of h"), values.pop("index of h"))
    assert found == values
    assert again.num_recalled == 1
    assert again.recall(again.next(), take_all) is None
    again.remove()
    assert not (tmp_path / "j").exists()


def test_a_journal_of_another_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no journal .* to go on from"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)
    begin(tmp_path / "j", seed=0).keep(1, {"cost": 1.0})
    with pytest.raises(ValueError, match=f"of another run: its seed differs.*{ANEW}"):
        Journal(tmp_path / "j", {"seed": 1}, resume=True)
    (tmp_path / "j" / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="of another run"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)
    assert begin(tmp_path / "j", seed=1).recall(1, take_all) is None  # begun anew


def test_a_folder_that_is_no_journal_is_left_alone(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        begin(tmp_path / "j", seed=0)
    assert (tmp_path / "j" / "notes.txt").read_text() == "mine"
    (tmp_path / "linked").symlink_to(tmp_path / "j")
    with pytest.raises(ValueError, match="move it away"):
        begin(tmp_path / "linked", seed=0)


def test_nothing_is_removed_before_the_run_begins(tmp_path):
    begin(tmp_path / "j", seed=0).keep(1, {"cost": 1.0})
    Journal(tmp_path / "j", {"seed": 1})  # refused later by another check
    assert Journal(tmp_path / "j", {"seed": 0}, resume=True).recall(1, take_all) == {"cost": 1.0}


def zero(file):
    tensors, header = load_tensors(file)
    save_tensors(file, {name: torch.zeros_like(value) for name, value in tensors.items()}, header)


def cut(file):
    file.write_bytes(file.read_bytes()[:-3])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def link(file):
    shutil.move(file, file.parent.parent / "away")
    file.symlink_to(file.parent.parent / "away")


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def repeat(file):
    shutil.copy(file, file.with_name(file.name.replace("000001-", "000001-" + "0" * 64)[:71] + ".safetensors"))


def rename(file):
    file.rename(file.with_name("000001.safetensors"))


@pytest.mark.parametrize("attack", [zero, cut, flip, link, replace_by_folder, repeat, rename])
def test_a_damaged_record_is_refused(tmp_path, attack):
    begin(tmp_path / "j", seed=0).keep(1, {"cost": 1.0, "index": torch.tensor([2, 0, 1])})
    attack(find_record(tmp_path / "j"))
    with pytest.raises(ValueError, match=f"is damaged .*{ANEW}"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True).recall(1, take_all)


def test_values_that_are_not_right_are_refused(tmp_path):
    begin(tmp_path / "j").keep(1, {"cost": 1.0})

    def expect_index(values):
        values["index"]

    with pytest.raises(ValueError, match=f"000001: 'index'.*{ANEW}"):
        Journal(tmp_path / "j", {}, resume=True).recall(1, expect_index)


def test_a_fingerprint_that_was_cut_short_and_strange_files_are_refused(tmp_path):
    begin(tmp_path / "j", seed=0)
    text = (tmp_path / "j" / "run.json").read_text()
    (tmp_path / "j" / "run.json").write_text(text[:-4])
    with pytest.raises(ValueError, match=f"run.json cannot be read.*{ANEW}"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)
    (tmp_path / "j" / "run.json").write_text(text)
    (tmp_path / "j" / ".run.json.0011.tmp").write_text("of a killed process")
    Journal(tmp_path / "j", {"seed": 0}, resume=True)
    (tmp_path / "j" / "model.safetensors").write_text("x")
    with pytest.raises(ValueError, match=f"model.safetensors in it was not written by a run.*{ANEW}"):
        Journal(tmp_path / "j", {"seed": 0}, resume=True)


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    journal, synced = begin(tmp_path / "j"), []

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    journal.keep(1, {"cost": 1.0})
    assert synced[0].endswith(".tmp")
    assert synced[1] == str(tmp_path / "j")


def test_a_finished_output_is_recognised(tmp_path):
    journal, out = begin(tmp_path / "j"), tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("a")
    journal.promise(out, hash_output(out))
    again = Journal(tmp_path / "j", {}, resume=True)
    assert again.is_finished(out)
    (out / "report.html").write_text("what the run writes later")
    assert again.is_finished(out)
    (out / "a").write_text("b")
    assert not again.is_finished(out)
    assert not again.is_finished(tmp_path / "other")
    (tmp_path / "file").write_text("x")
    journal.promise(tmp_path / "file", {"": hash_output(tmp_path / "file")[""]})
    assert Journal(tmp_path / "j", {}, resume=True).is_finished(tmp_path / "file")
