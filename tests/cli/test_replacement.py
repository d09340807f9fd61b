"""``--force`` replaces what the command writes itself, and never an input or another file."""

import os
import shutil

import pytest

from tests.cli.cli_files import MLP, digest

ALIGN = ("align", "la", "lb", "-o", "out", *MLP, "--method", "weight-matching")
MERGE = ("merge", "la", "lb", "-o", "out", *MLP, "--method", "weight-matching")
APPLY = ("apply", "p.safetensors", "la", "-o", "out")
CANONICAL = ("canonical", "la", "-o", "out", *MLP)
BARRIER = ("barrier", "la", "lb", "--data", "digits", *MLP, "--points", "2")


@pytest.fixture
def folders(onebasin, folder):
    """Two folders with checkpoints, and other ways to them."""
    assert onebasin("apply", "p.safetensors", "a.safetensors", "-o", "moved.safetensors").code == 0
    for name, source in (("la", "a.safetensors"), ("lb", "moved.safetensors")):
        (folder / name).mkdir()
        shutil.move(folder / source, folder / name / "model.safetensors")
        (folder / name / "tokenizer.json").write_text("{}")
        (folder / name / "config.json").write_text("{}")
    (folder / "way").symlink_to("la")
    (folder / "shard.safetensors").symlink_to("lb/model.safetensors")
    (folder / "nets.py").write_text("from cli_networks import make_with_inputs as make\n")
    os.link(folder / "la" / "config.json", folder / "hard.html")
    return folder


PLACES = (
    "la/config.json", "la/new.html", "lb/model.safetensors", "shard.safetensors", "way/config.json", "way/../la/new.html",
    "lb/../la/tokenizer.json", "hard.html", "la", "way",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "command",
    [
        (*ALIGN, "--report"), (*ALIGN, "-p"), (*ALIGN[:3], *ALIGN[5:], "-o"), (*ALIGN, "--symmetry", "all", "--target-out"),
        (*MERGE, "--report"), (*MERGE[:3], *MERGE[5:], "-o"), (*BARRIER, "--report"), ("apply", "p.safetensors", "la", "-o"),
        ("canonical", "la", *MLP, "-o"),
    ],
)  # fmt: skip
def test_inputs_are_never_replaced(onebasin, folders, command, place):
    if "lb" not in command and place in ("lb/model.safetensors", "shard.safetensors"):
        pytest.skip("not an input of this command")
    before = digest(folders)
    for more in ((), ("--dry-run",)):
        ran = onebasin(*command, place, "--force", *more)
        assert ran.code == 3, (ran.out, ran.err)
        assert len(ran.err.strip().splitlines()) == 1
        assert digest(folders) == before
        assert not (folders / "out").exists()


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ((*ALIGN, "--init", "p.safetensors", "-p"), "p.safetensors"),
        ((*BARRIER, "-p", "p.safetensors", "--report"), "p.safetensors"),
        ((*ALIGN[:5], "--model", "nets:make", "--report"), "nets.py"),
        ((*ALIGN, "--loss", "nets:make", "--report"), "nets.py"),
        (("apply", "p.safetensors", "la/model.safetensors", "-o"), "p.safetensors"),
        ((*ALIGN[:5], "--model", "la", "--report"), "la/config.json"),
    ],
)
def test_files_of_options_are_never_replaced(onebasin, folders, command, place):
    before = digest(folders)
    ran = onebasin(*command, place, "--force")
    assert ran.code == 3
    assert "inputs are never changed" in ran.err
    assert digest(folders) == before


def test_an_optimizer_is_not_replaced_through_a_link(onebasin, folder):
    import torch

    from tests.cli.cli_networks import make_mlp

    model = make_mlp()
    torch.save(torch.optim.SGD(model.parameters(), momentum=0.9).state_dict(), folder / "o.pt")
    (folder / "way.pt").symlink_to("o.pt")
    before = digest(folder)
    ran = onebasin("apply", "p.safetensors", "o.pt", "-o", "way.pt", "--force", "--kind", "optimizer")
    assert ran.code == 3
    assert digest(folder) == before


@pytest.mark.parametrize("command", [ALIGN, MERGE, APPLY, CANONICAL])
@pytest.mark.parametrize("name", ["mine.pt", "mine.safetensors", "mine.txt", "mine.json", "mine.odt", ".hidden", "sub"])
def test_other_files_in_a_folder_are_kept(onebasin, folders, command, name):
    (folders / "out").mkdir()
    if name == "sub":
        (folders / "out" / name).mkdir()
    else:
        (folders / "out" / name).write_text("mine")
    (folders / "out" / "config.json").write_text("mine")
    before = digest(folders)
    ran = onebasin(*command, "--force")
    assert ran.code == 3
    assert f"out holds {name}, which would be lost" in ran.err
    assert digest(folders) == before


def test_a_second_run_replaces_the_first_with_the_report_in_it(onebasin, folders):
    command = (*ALIGN, "--report", "out/r.html")
    assert onebasin(*command).code == 0
    names = sorted(file.name for file in (folders / "out").iterdir())
    written = ["README.md", "config.json", "model.safetensors", "permutation.safetensors", "r.html", "tokenizer.json"]
    assert names == written
    ran = onebasin(*command, "--force", "--dry-run")
    assert ran.code == 0
    flat = " ".join(ran.out.split())
    assert f"would replace {', '.join(f'out/{name}' for name in names[:-1])} and out/{names[-1]}; nothing was" in flat
    record = onebasin(*command, "--force", "--dry-run", "--json").record
    assert record["would_replace"] == [f"out/{name}" for name in names]
    assert onebasin(*command, "--force").code == 0
    assert sorted(file.name for file in (folders / "out").iterdir()) == names


def test_dry_runs_list_what_would_be_replaced(onebasin, folders):
    (folders / "x.html").write_text("old")
    (folders / "c.pt").write_text("old")
    record = onebasin(*BARRIER, "--report", "x.html", "--force", "--dry-run", "--json").record
    assert record["would_replace"] == ["x.html"]
    assert "and replace x.html" in onebasin(*BARRIER, "--report", "x.html", "--force", "--dry-run").out
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "c.pt", "--force", "--dry-run")
    assert "would write c.pt; would replace c.pt; nothing was written" in ran.out
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "new.pt", "--dry-run", "--json")
    assert ran.record["would_replace"] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("-p", "out/config.json"), "is a file of the checkpoint itself"),
        (("-p", "out/model.safetensors"), "is a file of the checkpoint itself"),
        (("--report", "way/../out/tokenizer.json"), "is a file of the checkpoint itself"),
        (("-p", "out/x", "--report", "./out/x"), "named twice"),
        (("-p", "x.html", "--report", "x.html"), "named twice"),
    ],
)
def test_outputs_do_not_replace_each_other(onebasin, folders, more, message):
    before = digest(folders)
    ran = onebasin(*ALIGN, *more, "--force")
    assert ran.code == 3
    assert message in ran.err
    assert digest(folders) == before


def test_links_and_devices_as_outputs(onebasin, folders):
    (folders / "elsewhere").mkdir()
    (folders / "out").symlink_to("elsewhere")
    assert "is a link" in onebasin(*APPLY, "--force").err
    (folders / "null.pt").symlink_to("/dev/null")
    (folders / "dangling.pt").symlink_to("nothing")
    assert "not a file" in onebasin("apply", "p.safetensors", "b.pt", "-o", "null.pt", "--force").err
    assert "exists already" in onebasin("apply", "p.safetensors", "b.pt", "-o", "dangling.pt").err
    assert (folders / "dangling.pt").is_symlink()


def test_help_says_what_force_replaces(onebasin, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "inputs are never replaced" in " ".join(onebasin("merge", "--help").out.replace("│", " ").split())
