import pytest

from onebasin.cli.inputs import read_alignment_options
from tests.cli.cli_files import MLP, assert_same, digest, load


def test_data_that_does_not_fit_is_refused_before_anything_is_written(onebasin, folder):
    before = digest(folder)
    for data, words in (("odd_batches", "cannot be run on this data"), ("generator", "can be read once")):
        for command in ("align", "merge"):
            files = ("a.safetensors", "b.pt", "-o", "c.pt", "--report", "r.html")
            ran = onebasin(command, *files, *MLP, "--data", f"cli_networks:{data}")
            assert ran.code == 3
            assert words in ran.err
    assert digest(folder) == before


def test_the_first_batch_shows_what_inputs_look_like(onebasin, folder):
    plain = ("--model", "cli_networks:make_mlp")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain).code == 3
    data = ("--data", "digits")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain, *data).code == 0
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.pt", *plain, *data).code == 0
    assert onebasin("barrier", "a.safetensors", "c.pt", *plain, *data, "--points", "2").code == 0
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))


def test_an_objective_has_its_options(onebasin, folder):
    data = ("--data", "digits", "--method", "ste", "--set", "steps=1", "--no-detect-copy", "--repaired")
    points = ("--objective", "random-point", "--low", "0.3", "--high", "0.7")
    for command in ("align", "merge"):
        assert onebasin(command, "a.safetensors", "b.pt", "-o", "c.pt", *MLP, *data, *points, "--force").code == 0
    options = {"method": "auto", "data": "digits", "loss": "mse", "settings": None, "device": "cpu"}
    goal = read_alignment_options(objective="random-point", low=0.3, high=0.7, repaired=True, **options).arguments[
        "objective"
    ]
    assert (goal.low, goal.high, goal.repaired) == (0.3, 0.7, True)
    goal = read_alignment_options(objective="random-point", high=0.7, **options).arguments["objective"]
    assert (goal.low, goal.high, goal.repaired) == (0.0, 0.7, False)
    assert read_alignment_options(objective="midpoint", repaired=True, **options).arguments["objective"].repaired


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--low", "0.3"), "only --objective random-point draws points between two weights, and it is not given"),
        (("--high", "0.7", "--objective", "midpoint"), "and it is midpoint"),
        (("--repaired",), "only --objective midpoint and random-point take the loss of networks"),
        (("--repaired", "--objective", "weight-distance"), "and it is weight-distance"),
        (("--low", "0.7", "--high", "0.3", "--objective", "random-point"), "0 <= low < high <= 1 is needed"),
    ],
)
def test_options_that_an_objective_does_not_have_are_refused(onebasin, folder, options, words):
    before = digest(folder)
    for command in ("align", "merge"):
        ran = onebasin(command, "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--data", "digits", *options)
        assert ran.code in (2, 3)
        assert words in " ".join(ran.err.replace("│", " ").split())
    assert digest(folder) == before
