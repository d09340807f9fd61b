from types import SimpleNamespace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.inputs import AlignmentOptions, read_alignment_options
from onebasin.datasets import digits
from tests.cli.cli_files import MLP, assert_same, digest, load
from tests.cli.cli_networks import make_with_inputs


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
    assert (goal.low, goal.high, goal.repaired) == (0.0, 0.7, None)
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
        assert words in " ".join(ran.err.split())
    assert digest(folder) == before


SCALED = ("a.safetensors", "c.pt", *MLP, "--method", "weight-matching", "--symmetry", "positive")
ON_DATA = ("--data", "digits", "--objective", "midpoint")


@pytest.fixture
def trained(folder):
    """c.pt is a network of its own, whose scales can be learned."""
    torch.manual_seed(3)
    torch.save(make_with_inputs()[0].state_dict(), folder / "c.pt")


@pytest.mark.usefixtures("trained")
def test_how_scales_are_learned_can_be_set(onebasin, folder):
    (model, x), (target, _) = make_with_inputs(), make_with_inputs()
    model.load_state_dict(load(folder / "c.pt"))
    target.load_state_dict(load(folder / "a.safetensors"))

    def cost(**settings):
        goal = {"data": digits("train"), "objective": ob.Midpoint(nn.functional.cross_entropy)}
        how = {"example_inputs": x, "method": "weight-matching", "kinds": "positive", **goal}
        return ob.align(model, to=target, scaling=ob.Scaling(**settings), **how).cost

    costs = {}
    for settings in ({"steps": 0}, {"steps": 3}, {"steps": 3, "lr": 0.2, "limit": 0.5}):
        given = [word for name, value in settings.items() for word in ("--scaling", f"{name}={value}")]
        ran = onebasin("align", *SCALED, *ON_DATA, *given, "-o", "out.pt", "--force", "--json")
        assert ran.code == 0, ran.err
        costs[str(settings)] = ran.record["cost"]
        assert ran.record["cost"] == pytest.approx(cost(**settings), rel=1e-5)
    assert len(set(costs.values())) == 3


@pytest.mark.usefixtures("trained")
def test_merge_and_port_set_how_scales_are_learned(onebasin, folder):
    merged = [load_merge(onebasin, folder, "--scaling", f"steps={steps}") for steps in (0, 3)]
    assert not torch.equal(merged[0]["1.weight"], merged[1]["1.weight"])
    (folder / "r.yaml").write_text("scaling: {steps: 3, lr: 5e-2}\n")
    assert torch.equal(load_merge(onebasin, folder, "--recipe", "r.yaml")["1.weight"], merged[1]["1.weight"])
    ported = []
    for steps in (0, 3):
        command = ("port", "c.pt", "--base", "c.pt", "--to", "a.safetensors", "-o", "p.pt", "--force", "--json")
        ran = onebasin(*command, *SCALED[2:], *ON_DATA, "--scaling", f"steps={steps}")
        assert ran.code == 0, ran.err
        ported.append(ran.record["cost"])
    assert ported[1] < ported[0]


def load_merge(onebasin, folder, *options):
    ran = onebasin("merge", *SCALED, *ON_DATA, *options, "-o", "m.pt", "--force")
    assert ran.code == 0, ran.err
    return load(folder / "m.pt")


@pytest.mark.usefixtures("trained")
def test_both_ends_can_be_learned(onebasin, folder):
    """The target is written too: both compute what they did, and it is not what it was."""
    both = ("--scaling", "both=true", "--scaling", "steps=3")
    ran = onebasin("align", *SCALED, *ON_DATA, *both, "-o", "out.pt", "--target-out", "t.pt", "--json")
    assert ran.code == 0, ran.err
    for first, second in (("a.safetensors", "t.pt"), ("c.pt", "out.pt")):
        assert not torch.equal(load(folder / first)["1.weight"], load(folder / second)["1.weight"])
        assert onebasin("verify", first, second, *MLP, "--tolerance", "1e-5").code == 0
    ran = onebasin("merge", *SCALED, *ON_DATA, *both, "-o", "m.pt", "--json")
    assert ran.code == 0, ran.err
    assert list(ran.record["changes"]) == ["a.safetensors", "c.pt"]


@pytest.mark.parametrize(("steps", "is_held"), [(None, False), (0, False), (3, True)])
def test_large_models_are_loaded_if_their_scales_are_to_be_learned(steps, is_held):
    learning = None if steps is None else ob.Scaling(steps=steps)
    options = AlignmentOptions({"scaling": learning}, None, runs_networks=False, device="cpu")
    models = SimpleNamespace(checkpoints=[SimpleNamespace(num_entries=10**9)])
    assert options.holds_models(models, "positive") == is_held  # pyright: ignore[reportArgumentType]


REFUSED = [
    (("align", *SCALED, "--scaling", "steps"), 2, "Invalid value for --scaling: cannot read 'steps': write NAME=VALUE"),
    (("align", *SCALED, "--scaling", "step=3"), 3, "--scaling has no 'step'; it has steps, lr, limit, basis_lr, both"),
    (("align", *SCALED, "--scaling", "steps=1.5"), 3, "--scaling: steps must be a whole number"),
    (("align", *SCALED, "--scaling", "lr=fast"), 3, "--scaling: lr must be a number above 0"),
    (("align", *SCALED, "--scaling", "both=yes"), 3, "--scaling: both must be True or False"),
    (("align", *SCALED[:-1], "permutation", "--scaling", "steps=3"), 2, "there are no scales to learn"),
    (("align", *SCALED, "--scaling", "both=true"), 2, "give --objective midpoint or random-point, and --data"),
    (("align", *SCALED, *ON_DATA, "--scaling", "both=true"), 2, "both=true changes TARGET too: --target-out writes it"),
    (("merge", *SCALED[:-2], "--scaling", "steps=3"), 2, "there are no scales to learn"),
    (("merge", "b.pt", *SCALED, *ON_DATA, "--scaling", "both=true"), 2, "both=true is for two models"),
    (
        ("port", "c.pt", "--base", "c.pt", "--to", "a.safetensors", *SCALED[2:], *ON_DATA, "--scaling", "both=true"),
        2,
        "both=true would change NEW too",
    ),
]


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(("command", "code", "words"), REFUSED)
def test_a_wrong_way_to_learn_scales_is_refused(onebasin, folder, command, code, words):
    before = digest(folder)
    ran = onebasin(*command, "-o", "out.pt")
    assert ran.code == code
    assert words in " ".join(ran.err.split())
    assert digest(folder) == before
