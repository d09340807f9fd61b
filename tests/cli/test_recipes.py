import pytest
import torch

from tests.cli.cli_files import MLP, load
from tests.cli.cli_networks import make_mlp

RECIPE = """models:
  - {path: a.safetensors, weight: 1}
  - {path: c.pt, weight: 3}
model: cli_networks:make_with_inputs
method: weight-matching
set: {max_sweeps: 2}
detect-copy: false
layer-weights:
  "1.*": [1, 0]
"""


@pytest.fixture
def models(folder):
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    return folder


def test_a_recipe_is_the_command_line_in_a_file(onebasin, models):
    (models / "r.yaml").write_text(RECIPE)
    ran = onebasin("merge", "--recipe", "r.yaml", "-o", "m.pt", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["weights"] == [0.25, 0.75]
    assert ran.record["method"] == "weight-matching"
    assert len(ran.record["history"]) == 2
    typed = ("a.safetensors", "c.pt", "--weights", "1,3", *MLP, "--method", "weight-matching", "--set", "max_sweeps=2")
    assert onebasin("merge", *typed, "--no-detect-copy", "--layer-weights", "1.*=1,0", "-o", "t.pt").code == 0
    merged, same, first = (load(models / name) for name in ("m.pt", "t.pt", "a.safetensors"))
    for key, value in merged.items():
        assert torch.equal(value, same[key])
        assert torch.equal(value, first[key]) == key.startswith("1.")


def test_the_command_line_has_the_last_word(onebasin, models):
    (models / "r.yaml").write_text(RECIPE + "out: never.pt\n")
    ran = onebasin("merge", "--recipe", "r.yaml", "-o", "m.pt", "--weights", "1,1", "--json")
    assert ran.record["weights"] == [0.5, 0.5]
    assert not (models / "never.pt").exists()
    assert onebasin("merge", "--recipe", "r.yaml", "--json").record["out"] == "never.pt"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a, b]\nmethods: auto\n", "r.yaml, line 2: methods is no field of a recipe: address, allow, check"),
        ("models: [a, b]\nseed: 1\nseed: 2\n", "r.yaml, line 3: seed is there twice"),
        ("models: [a, b\nseed: 1\n", "r.yaml, line 2: "),
        ("models: {a: 1}\n", "r.yaml, line 1: models must be a list of models, not"),
        ("models: [{path: a, wieght: 1}, b]\n", "r.yaml, line 1: models: entry 1 must be a path, or a path and a weight"),
        ("models: [{path: a, weight: 1}, b]\n", "1 of 2 have a weight"),
        ("weights: [1, 2]\nmodels: [{path: a, weight: 1}, {path: b, weight: 1}]\n", "line 2: models have weights already"),
        ("weights: [1, x]\n", "line 1: weights: a weight must be a number, not x"),
        ("weights: 1\n", "line 1: weights must be a list of weights, not 1"),
        ("layer-weights: [1]\n", "line 1: layer-weights must be lists of weights by pattern"),
        ("layer-weights: {a: 1}\n", "line 1: layer-weights, a must be a list of weights"),
        ("check: maybe\n", "line 1: check must be true or false, not maybe"),
        ("\n\nmethod: [auto]\n", "line 3: method must be one value"),
        ("models: [a, b]\nseed: many\n", "r.yaml, line 2: seed cannot be 'many': "),
        ("restarts: -1\n", "r.yaml, line 1: restarts cannot be '-1': "),
        ("method: best\n", "r.yaml, line 1: method cannot be 'best': 'best' is not one of 'auto', 'sinkhorn'"),
        ("out-dtype: int8\n", "r.yaml, line 1: out-dtype cannot be 'int8': 'int8' is not one of 'float64', "),
        ("- a\n", "r.yaml is not a recipe: it needs fields"),
        ("", "r.yaml is not a recipe"),
        ("a: !!python/object/apply:os.system ['touch executed']\n", "line 1: could not determine a constructor"),
        ("\x00", "r.yaml is not YAML"),
        ("a: " + "[" * 5000, "r.yaml is not YAML"),
        ("recipe: r.yaml\n", "recipe is no field"),
    ],
)
def test_errors_name_the_line_or_the_field(onebasin, models, text, message):
    (models / "r.yaml").write_text(text)
    ran = onebasin("merge", "--recipe", "r.yaml", "-o", "m.pt")
    assert ran.code == 3
    assert message in " ".join(ran.err.split())
    assert not (models / "m.pt").exists()
    assert not (models / "executed").exists()


def test_a_recipe_is_an_input(onebasin, models):
    (models / "r.yaml").write_text(RECIPE)
    ran = onebasin("merge", "--recipe", "r.yaml", "-o", "m.pt", "--report", "r.yaml", "--force")
    assert ran.code == 3
    assert "inputs are never changed" in ran.err
    assert onebasin("merge", "--recipe", "missing.yaml", "-o", "m.pt").code == 3


def test_layer_weights_are_checked(onebasin, models):
    common = ("merge", "a.safetensors", "c.pt", *MLP, "-o", "m.pt", "--layer-weights")
    assert "no tensor has such a name" in onebasin(*common, "head.*=1,0").err
    assert "layer weights of '1.*': there are 2 models and 3 weights" in onebasin(*common, "1.*=1,0,0").err
    assert "cannot read --layer-weights" in onebasin(*common, "1.*").err
    assert "cannot read --layer-weights" in onebasin(*common, "1.*=a,b").err
