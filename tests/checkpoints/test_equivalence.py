import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import open_models, probes
from onebasin.checkpoints.equivalence import compare_checkpoints
from tests.checkpoints.language_models import make_model, save_model


def compare(a, b, specification=None, tolerance=1e-9):
    models = open_models([a, b], specification, verify=False)
    return compare_checkpoints(models, models.own_architectures(), tolerance)


@pytest.mark.parametrize(
    ("kind", "key", "row"),
    [
        ("GPT2LMHeadModel", "transformer.wte.weight", 77),
        ("GPT2LMHeadModel", "transformer.wpe.weight", 39),
        ("BertForMaskedLM", "bert.embeddings.position_embeddings.weight", 33),
        ("BertForMaskedLM", "bert.embeddings.token_type_embeddings.weight", 2),
        ("BertForMaskedLM", "bert.embeddings.token_type_embeddings.weight", 1),
        ("LlamaForCausalLM", "model.embed_tokens.weight", 89),
        ("RobertaForMaskedLM", "roberta.embeddings.position_embeddings.weight", 41),
    ],
)
def test_one_row_that_differs_is_seen(tmp_path, kind, key, row):
    model = make_model(kind)
    a = save_model(tmp_path / "a", model)
    assert compare(a, a).difference == 0.0
    with torch.no_grad():
        dict(model.named_parameters())[key][row, 0] += 0.01  # a layer norm would take off what is added to all units
    found = compare(a, save_model(tmp_path / "b", model))
    assert found.difference > 1e-6
    assert found.unreached == ()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GPT2LMHeadModel", {"n_head": 2}),
        ("LlamaForCausalLM", {"hidden_act": "relu"}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
        ("BertForMaskedLM", {"layer_norm_eps": 1e-3}),
    ],
)
def test_each_side_has_its_own_configuration(tmp_path, kind, changes):
    model = make_model(kind)
    a, b = save_model(tmp_path / "a", model), save_model(tmp_path / "b", model, **changes)
    assert compare(a, b).difference > 1e-6


class Partial(nn.Sequential):
    """Has a parameter that no call uses."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.spare = nn.Parameter(torch.ones(3))


def make_partial():
    return Partial(), torch.zeros(2, 4)


def test_tensors_that_no_input_reaches_are_compared(tmp_path):
    state = make_partial()[0].state_dict()
    torch.save(state, tmp_path / "a.pt")
    state["1.num_batches_tracked"] += 5
    torch.save(state, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", f"{__name__}:make_partial")
    assert (found.difference, found.unreached, found.different) == (0.0, ("spare",), ())
    state["spare"][1] += 1
    torch.save(state, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", f"{__name__}:make_partial")
    assert (found.difference, found.different) == (0.0, ("spare",))


def test_rows_that_were_not_reached_follow_those_that_were(tmp_path, monkeypatch):
    model = make_model("LlamaForCausalLM", tie_word_embeddings=False)
    a = save_model(tmp_path / "a", model)
    symmetry = ob.symmetry(model.eval(), {"input_ids": torch.arange(8)[None], "use_cache": False})
    model.load_state_dict(symmetry.random(torch.Generator().manual_seed(0)).apply(model))
    b = save_model(tmp_path / "b", model)
    monkeypatch.setattr(probes, "_MAX_OPERATIONS", 2 * sum(p.numel() for p in model.parameters()) * 60)
    found = compare(a, b)
    looked_up, size = found.rows["model.embed_tokens.weight"]
    assert 16 < looked_up < size == 90
    assert f"{looked_up} of 90 rows of model.embed_tokens.weight" in found.describe_inputs()
    assert found.unreached == ("model.embed_tokens.weight",)
    assert found.different == ()
    assert found.difference < 1e-9
    with torch.no_grad():
        model.model.embed_tokens.weight[71, 3] += 0.01
    found = compare(a, save_model(tmp_path / "c", model))
    assert found.difference > 1e-6 or found.different == ("model.embed_tokens.weight",)


def test_a_configuration_that_does_not_fit_is_refused(tmp_path):
    model = make_model("LlamaForCausalLM")
    a, b = save_model(tmp_path / "a", model), save_model(tmp_path / "b", model, intermediate_size=32)
    with pytest.raises(ValueError, match=r"has shape \(.*24.*\), .*b has \(.*32.*\)"):
        compare(a, b)
