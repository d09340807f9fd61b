import pytest

from onebasin.checkpoints.staging import Staging, is_finished
from onebasin.engines import LOCAL, Journal
from onebasin.tensors.files import hash_file

NAMES = ("a.safetensors", "b.safetensors", "config.json", "unet/c.safetensors")


@pytest.fixture
def staging(tmp_path):
    journal = Journal(tmp_path / ".out.resume", {})
    journal.begin()
    found = Staging(journal, tmp_path / "out")
    assert found.clean(NAMES, LOCAL) == set()
    (found.folder / "unet").mkdir(parents=True)
    for name in NAMES:
        (found.folder / name).write_text(name)
    for name in ("a.safetensors", "unet/c.safetensors"):
        found.keep(name, hash_file(found.folder / name))
    return found


def go_on(staging):
    return Staging(Journal(staging.journal.folder, {}, resume=True), staging.target)


def test_finished_files_are_left_and_all_others_removed(staging):
    (staging.folder / ".b.safetensors.00ff.tmp").write_text("half")
    assert staging.num_bytes == sum(map(len, NAMES)) + 4
    again = go_on(staging)
    assert again.clean(NAMES, LOCAL) == {"a.safetensors", "unet/c.safetensors"}
    assert {each.name for each in again.folder.iterdir()} == {"a.safetensors", "unet"}


def change(staging):
    (staging.folder / "a.safetensors").write_text("other")


def add(staging):
    (staging.folder / "other.txt").write_text("x")


def add_folder(staging):
    (staging.folder / "vae").mkdir()


def link(staging):
    (staging.folder / "config.json").unlink()
    (staging.folder / "config.json").symlink_to("/etc/hostname")


def link_folder(staging):
    staging.folder.rename(staging.target)
    staging.folder.symlink_to(staging.target)


def swap(staging):
    staging.keep("a.safetensors", hash_file(staging.folder / "b.safetensors"))


@pytest.mark.parametrize("attack", [change, add, add_folder, link, link_folder, swap])
def test_what_no_run_has_written_is_refused(staging, attack):
    attack(staging)
    with pytest.raises(ValueError, match=r"is damaged .*begin anew without --resume"):
        go_on(staging).clean(NAMES, LOCAL)


def test_an_output_that_was_promised_is_recognised(staging):
    staging.promise()
    again = go_on(staging)
    assert not is_finished(again.journal, staging.target)
    staging.folder.rename(staging.target)
    assert is_finished(again.journal, staging.target)
    assert not is_finished(staging.journal, staging.target)  # begun anew: it is not this run's
    assert not is_finished(None, staging.target)
    (staging.target / "a.safetensors").write_text("other")
    assert not is_finished(again.journal, staging.target)
