"""A tied checkpoint gets names for tensors of its own, and a configuration that says so."""

import json

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import fit_names, open_checkpoint, open_models, write_checkpoint
from onebasin.checkpoints.conversions import fit_to_model
from onebasin.checkpoints.factories import find_factory
from onebasin.checkpoints.untied_heads import complete_ties, untie_checkpoint, untie_configuration
from onebasin.tensors.states import find_ties
from tests.checkpoints.language_models import make_model, save_model

TIES = (("embed.weight", "head.weight"),)


def open_tied(path, *names):
    """A checkpoint of an embedding that is also the head, under some names."""
    save_file({name: torch.arange(6.0).view(3, 2) for name in names} | {names[0][:-12] + "x": torch.zeros(1)}, path)
    shapes = {"embed.weight": torch.empty(3, 2), "head.weight": torch.empty(3, 2), "x": torch.empty(1)}
    return fit_names(open_checkpoint(path), shapes, TIES)


def written(tmp_path, like):
    state = {"embed.weight": torch.zeros(3, 2), "head.weight": torch.ones(3, 2), "x": torch.zeros(1)}
    write_checkpoint(tmp_path / "out.safetensors", state, like)
    return open_checkpoint(tmp_path / "out.safetensors").load()


def test_a_head_gets_a_name_beside_the_embedding(tmp_path):
    like = open_tied(tmp_path / "a.safetensors", "embed.weight")
    assert set(written(tmp_path, like)) == {"embed.weight", "x"}
    untied = untie_checkpoint(like, ["head.weight"], TIES)
    assert untied.layout.untied == ("head.weight",)
    assert like.layout.untied == ()
    (tmp_path / "out.safetensors").unlink()
    found = written(tmp_path, untied)
    assert (found["embed.weight"].sum(), found["head.weight"].sum()) == (0, 6)
    assert untie_checkpoint(like, [], TIES) is like


def test_names_begin_as_the_others_in_the_file(tmp_path):
    like = open_tied(tmp_path / "a.safetensors", "module.embed.weight")
    assert set(written(tmp_path, untie_checkpoint(like, ["head.weight"], TIES))) == {
        "module.embed.weight", "module.head.weight", "module.x",
    }  # fmt: skip


def test_the_embedding_gets_a_name_where_the_file_has_the_head(tmp_path):
    save_file({"head.weight": torch.zeros(3, 2), "x": torch.zeros(1)}, tmp_path / "a.safetensors")
    shapes = {"embed.weight": torch.empty(3, 2), "head.weight": torch.empty(3, 2), "x": torch.empty(1)}
    like = fit_names(open_checkpoint(tmp_path / "a.safetensors"), shapes, TIES)
    found = written(tmp_path, untie_checkpoint(like, ["head.weight"], TIES))
    assert (found["embed.weight"].sum(), found["head.weight"].sum()) == (0, 6)


def test_a_file_that_has_both_keeps_its_names(tmp_path):
    torch.save({"embed.weight": torch.zeros(3, 2), "head.weight": torch.zeros(3, 2), "x": torch.zeros(1)}, tmp_path / "a.pt")
    shapes = {"embed.weight": torch.empty(3, 2), "head.weight": torch.empty(3, 2), "x": torch.empty(1)}
    like = fit_names(open_checkpoint(tmp_path / "a.pt"), shapes, TIES)
    untied = untie_checkpoint(like, ["head.weight"], TIES)
    assert untied.names == like.names
    assert set(written(tmp_path, untied)) == set(shapes)


def test_configurations_are_untied_at_every_depth():
    content = {"a": 1, "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}, "vision_config": {"b": 2}}
    assert untie_configuration(content) == {
        "a": 1, "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}, "vision_config": {"b": 2},
    }  # fmt: skip
    assert content["tie_word_embeddings"] is True


def fit(folder):
    checkpoint = open_checkpoint(folder)
    make = find_factory(str(folder)).make
    return fit_to_model(checkpoint, make), find_ties(make())


@pytest.mark.parametrize(("kind", "keys"), [
    ("GPT2LMHeadModel", ("lm_head.weight",)),
    ("BertForMaskedLM", ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")),
])  # fmt: skip
def test_all_that_a_configuration_unties_is_written(tmp_path, kind, keys):
    """BERT's configuration unties a bias too."""
    save_model(tmp_path / "a", make_model(kind))
    like, ties = fit(tmp_path / "a")
    untied = untie_checkpoint(like, keys[:1], ties)
    assert untied.layout.untied == keys
    write_checkpoint(tmp_path / "b", like, untied)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"] is False
    found, ties = fit(tmp_path / "b")
    assert ties == ()
    assert all(torch.equal(found[key], like[key]) for key in like)


def test_an_architecture_that_ties_all_the_same_is_refused(tmp_path):
    """T5 ties its head whatever its configuration says, which only turns a scale on and off."""
    save_model(tmp_path / "a", make_model("T5ForConditionalGeneration"))
    like, ties = fit(tmp_path / "a")
    (keys,) = (keys for keys in ties if "lm_head.weight" in keys)
    with pytest.raises(ValueError, match=r"a cannot be written untied: .* still ties .*Leave out --untie"):
        untie_checkpoint(like, keys[1:], ties)


def test_tied_and_untied_folders_are_read_by_one_architecture(tmp_path):
    save_model(tmp_path / "a", make_model("GPT2LMHeadModel"))
    like, ties = fit(tmp_path / "a")
    write_checkpoint(tmp_path / "b", like, untie_checkpoint(like, ["lm_head.weight"], ties))
    opened = [open_checkpoint(tmp_path / name) for name in "ab"]
    assert complete_ties(opened[:1] * 2) == (opened[:1] * 2, None)
    assert complete_ties(opened[1:] * 2) == (opened[1:] * 2, None)
    files, folder = complete_ties(opened)
    assert folder == str(tmp_path / "b")
    models = open_models(files, folder, verify=False)
    assert all(torch.equal(models.checkpoints[0][key], models.checkpoints[1][key]) for key in like)
