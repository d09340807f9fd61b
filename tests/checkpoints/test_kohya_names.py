import pytest
import torch

import onebasin as ob
from onebasin.checkpoints import move_adapter, open_checkpoint
from onebasin.checkpoints.kohya_names import is_kohya, translate_names
from onebasin.checkpoints.moving import move_file
from onebasin.tensors.states import read_state
from tests.checkpoints.adapted_network import adapted

OTHER = {
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.randn(3, 9),
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.randn(4, 3),
    "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(3.0),
}


def to_kohya(lora: dict[str, torch.Tensor], prefix: str = "lora_unet") -> dict[str, torch.Tensor]:
    found = {}
    for name in ("first", "conv", "last"):
        for part, new in (("A", "down"), ("B", "up")):
            found[f"{prefix}_{name}.lora_{new}.weight"] = lora[f"base_model.model.{name}.lora_{part}.weight"]
        found[f"{prefix}_{name}.alpha"] = torch.tensor(1.5)
    return found


def test_it_moves_as_the_same_lora_in_the_names_of_peft(tmp_path):
    _, _, permutation, lora, _ = adapted()
    kohya = {**to_kohya(lora), **OTHER}
    torch.save(kohya, tmp_path / "lora.pt")
    moved = move_file(permutation, tmp_path / "lora.pt")
    assert moved.kind == "lora"
    assert "LoRAs of other networks stay as they are: lora_te" in moved.notes
    moved.write(tmp_path / "out.pt")
    found = open_checkpoint(tmp_path / "out.pt").load()
    expected = {**to_kohya(move_adapter(permutation, read_state(lora).lazily()).load()), **OTHER}
    assert found.keys() == kohya.keys()
    assert any(not torch.equal(found[key], kohya[key]) for key in kohya)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_dots_and_underscores_in_names_of_modules():
    axes = {"down_blocks.0.to_q.weight": "h i", "text_model.fc_1.weight": "o h"}
    symmetry = ob.Symmetry.from_axes(axes, ["h"]).bind({key: torch.zeros(4, 4) for key in axes})
    lora = {
        "lora_unet_down_blocks_0_to_q.lora_up.weight": torch.zeros(4, 2),
        "lora_unet_text_model_fc_1.lora_down.weight": torch.zeros(2, 4),
    }
    assert list(translate_names(symmetry, lora).names.values()) == [
        "down_blocks.0.to_q.lora_B.weight", "text_model.fc_1.lora_A.weight"
    ]  # fmt: skip


def test_text_encoders_without_their_inner_name():
    symmetry = ob.Symmetry.from_axes({"encoder.fc1.weight": "h i"}, ["h"]).bind({"encoder.fc1.weight": torch.zeros(4, 3)})
    lora = {"lora_te_text_model_encoder_fc1.lora_up.weight": torch.zeros(4, 2)}
    assert list(translate_names(symmetry, lora).names.values()) == ["encoder.fc1.lora_B.weight"]


def test_what_does_not_belong_is_refused():
    _, symmetry, _, lora, _ = adapted()
    kohya = to_kohya(lora)
    with pytest.raises(
        ValueError, match=r"'lora_te_text_model_encoder_layers_0_mlp_fc1\.lora_down\.weight' belongs to no weight"
    ):
        translate_names(symmetry, OTHER)
    with pytest.raises(ValueError, match=r"lora_unet_fourth\.lora_up\.weight"):
        translate_names(symmetry, {**kohya, "lora_unet_fourth.lora_up.weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"lora_unet_first\.lora_up\.weight"):
        translate_names(symmetry, {**kohya, "lora_unet_first.lora_up.weight": torch.zeros(9, 3)})
    with pytest.raises(ValueError, match="lora_te1 and lora_te2 both fit"):
        translate_names(symmetry, {**to_kohya(lora, "lora_te1"), **to_kohya(lora, "lora_te2")})
    twins = ob.Symmetry.from_axes({"a.b.weight": "h i", "a_b.weight": "h i"}, ["h"])
    with pytest.raises(ValueError, match="one name in kohya's form"):
        translate_names(twins.bind({key: torch.zeros(2, 2) for key in ("a.b.weight", "a_b.weight")}), kohya)


def test_other_names_are_not_taken_for_these():
    _, _, _, lora, _ = adapted()
    assert not is_kohya(lora)
    assert not is_kohya([])
    assert not is_kohya([*OTHER, "lora_unet_x.hada_w1_a"])


def test_a_pipeline_has_several_networks():
    axes = {
        "unet.conv.weight": "h i", "text_encoder.encoder.fc1.weight": "k i", "text_encoder_2.encoder.fc1.weight": "l i"
    }  # fmt: skip
    symmetry = ob.Symmetry.from_axes(axes, ["h", "k", "l"]).bind({key: torch.zeros(4, 3) for key in axes})
    lora = {
        "lora_unet_conv.lora_up.weight": torch.zeros(4, 2),
        "lora_te1_text_model_encoder_fc1.lora_up.weight": torch.zeros(4, 2),
        "lora_te2_text_model_encoder_fc1.lora_down.weight": torch.zeros(2, 3),
    }
    found = translate_names(symmetry, lora)
    assert list(found.names.values()) == [
        "unet.conv.lora_B.weight", "text_encoder.encoder.fc1.lora_B.weight", "text_encoder_2.encoder.fc1.lora_A.weight"
    ]  # fmt: skip
    assert found.other_networks == ()
    twice = {"lora_te_encoder_fc1.lora_up.weight": torch.zeros(4, 2), **lora}
    with pytest.raises(ValueError, match="lora_te and lora_unet and lora_te1 and lora_te2 both fit"):
        translate_names(symmetry, twice)
