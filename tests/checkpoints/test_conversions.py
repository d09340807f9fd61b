"""Checkpoints as transformers saves them: under other names than the module's, with experts one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebasin.checkpoints import open_checkpoint, open_models, write_checkpoint
from onebasin.checkpoints.conversions import convert_names, fit_to_model, list_unsaved

transformers = pytest.importorskip("transformers")
TEXT = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
KINDS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {**TEXT, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 3},
    "ViTForImageClassification": {**TEXT, "image_size": 8, "patch_size": 4},
    "EsmForMaskedLM": {**TEXT, "pad_token_id": 1, "position_embedding_type": "rotary", "max_position_embeddings": 16},
    "BertForMaskedLM": {**TEXT, "max_position_embeddings": 16},
    "MarianMTModel": {
        "vocab_size": 12, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 6, "decoder_ffn_dim": 6, "max_position_embeddings": 16,
        "pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 0, "forced_eos_token_id": 0,
    },
}  # fmt: skip


def make(kind: str) -> Any:
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**KINDS[kind]))


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = make(kind).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_of_the_module_and_go_back_exactly(tmp_path, kind, dtype):
    state = save(kind, tmp_path / "a", dtype).state_dict()
    fitted = fit_to_model(open_checkpoint(tmp_path / "a"), lambda: make(kind))
    assert fitted.shapes.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(fitted[key].to(value.dtype), value), key
    write_checkpoint(tmp_path / "o", fitted, fitted)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in "ao")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def test_experts_are_stacked_and_written_one_by_one(tmp_path):
    save("MixtralForCausalLM", tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    fitted = fit_to_model(checkpoint, lambda: make("MixtralForCausalLM"))
    assert any(".experts.2." in name for name in checkpoint)
    key = next(key for key in fitted if key.endswith("experts.down_proj"))
    assert fitted.shapes[key].shape == (3, 8, 6)
    order = torch.tensor([2, 0, 1])
    write_checkpoint(tmp_path / "o", fitted.map(lambda name, value: value[order] if name == key else value), fitted)
    moved = open_checkpoint(tmp_path / "o")
    changed = {name for name in checkpoint if not torch.equal(moved[name], checkpoint[name])}
    (pattern,) = {name.replace(".experts.0.", ".experts.{}.") for name in changed if ".experts.0." in name}
    assert changed == {pattern.format(number) for number in range(3)}
    for number in range(3):
        assert torch.equal(moved[pattern.format(number)], checkpoint[pattern.format(int(order[number]))])


def test_a_missing_expert_is_refused(tmp_path):
    save("MixtralForCausalLM", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if ".experts.1." in name)
    save_file({name: value for name, value in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be converted to the model's|has shape \(2, "):
        open_models([tmp_path])


class Doubling:
    """An operation that computes."""

    def convert(self, tensors, source_patterns, target_patterns, **_):
        return {target_patterns[0]: 2 * tensors[source_patterns[0]][0]}


class Repeating(Doubling):
    """An operation that leaves out half of the entries."""

    def convert(self, tensors, source_patterns, target_patterns, **_):
        (value,) = tensors[source_patterns[0]]
        half = value[: len(value) // 2]
        return {target_patterns[0]: torch.cat([half, half])}


@pytest.mark.parametrize(
    ("operation", "reason"), [(Doubling(), "computes with its numbers"), (Repeating(), "leaves out or repeats")]
)
def test_what_is_more_than_a_rearrangement_is_refused(tmp_path, monkeypatch, operation, reason):
    from transformers import conversion_mapping, core_model_loading

    save("BertForMaskedLM", tmp_path)
    converter = core_model_loading.WeightConverter("query.weight", "query.weight", operations=[operation])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    with pytest.raises(ValueError, match=rf"query.weight' in .* and 0 others cannot be converted .* and back: .*{reason}"):
        convert_names(open_checkpoint(tmp_path), make("BertForMaskedLM"))


def test_copies_of_one_tensor_must_agree_and_are_all_written(tmp_path):
    """Old files of ESM hold the frequencies of rotary embeddings once for each layer."""
    save("EsmForMaskedLM", tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    saved = next(name for name in tensors if "inv_freq" in name)
    value = tensors.pop(saved)
    copies = [saved.replace("*", str(number)) for number in range(2)]
    save_file({**tensors, **{name: value.clone() for name in copies}}, file)
    fitted = fit_to_model(open_checkpoint(tmp_path / "a"), lambda: make("EsmForMaskedLM"))
    key = next(key for key in fitted if "inv_freq" in key)
    write_checkpoint(tmp_path / "o", fitted.map(lambda name, old: -old if name == key else old), fitted)
    written = open_checkpoint(tmp_path / "o")
    assert all(torch.equal(written[name], -value) for name in copies)
    save_file({**tensors, copies[0]: value, copies[1]: value + 1}, file)
    with pytest.raises(ValueError, match="are one tensor of the model, but differ"):
        fit_to_model(open_checkpoint(tmp_path / "a"), lambda: make("EsmForMaskedLM"))


def test_names_that_are_ignored_stay(tmp_path):
    save("ViTForImageClassification", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "vit.encoder.layer.7.more": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"'vit.encoder.layer.7.more' in .* is not in the model \(1 such\)"):
        fit_to_model(open_checkpoint(tmp_path), lambda: make("ViTForImageClassification"))
    fitted = fit_to_model(open_checkpoint(tmp_path), lambda: make("ViTForImageClassification"), ["*.more"])
    assert "vit.encoder.layer.7.more" not in fitted
    assert "vit.encoder.layer.7.more" in fitted.original


def test_tensors_that_the_model_makes_itself_cannot_change(tmp_path):
    save("MarianMTModel", tmp_path / "a")
    fitted = fit_to_model(open_checkpoint(tmp_path / "a"), lambda: make("MarianMTModel"))
    assert fitted.unsaved == list_unsaved(make("MarianMTModel")) != []
    assert any("the model makes it itself" in note for note in fitted.notes)
    with pytest.raises(ValueError, match=r"embed_positions.weight' would change, but .* does not hold it"):
        write_checkpoint(tmp_path / "o", fitted.map(lambda key, value: value.flip(0)), fitted)


def test_models_of_others_are_left_alone(tmp_path):
    torch.save({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    assert convert_names(checkpoint, torch.nn.Linear(2, 2)) is checkpoint
