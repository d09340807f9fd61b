import inspect

import pytest
import torch

import onebasin as ob
from onebasin.checkpoints.diffusers_models import _INPUTS, PipelineModel, fill_in, find_class, make_inputs
from onebasin.checkpoints.probes import make_probes
from onebasin.programs.calls import Call
from onebasin.programs.isolation import isolated
from tests.tiny_pipelines import CONFIGURATIONS, make_model, make_text_encoder

diffusers = pytest.importorskip("diffusers")


def build(name, **changes):
    kind, config = find_class(diffusers, name), make_model(name, 0, **changes).config
    return kind.from_config(fill_in(config, kind)).eval()


def test_every_class_has_a_case():
    assert list(CONFIGURATIONS) == list(_INPUTS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_permutation_changes_nothing_that_other_networks_see(name):
    model = build(name)
    inputs = make_inputs(model)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert not symmetry.unreached
    original = make_model(name, 1).double()
    moved = make_model(name, 2).double()
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    assert not permutation.is_identity
    moved.load_state_dict(permutation.apply(original))
    inputs = {key: to_double(value) for key, value in inputs.items()}
    with torch.no_grad():
        for first, second in zip(see(original, inputs), see(moved, inputs), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


def to_double(value):
    if isinstance(value, dict):
        return {key: to_double(inner) for key, inner in value.items()}
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def see(model, inputs):
    """What diffusers' own class computes for a pipeline."""
    if "latents" not in inputs:
        return model(**inputs, return_dict=False)
    encoded = model.encode(inputs["sample"])
    latents = encoded.latent_dist.parameters if hasattr(encoded, "latent_dist") else encoded.latents
    return latents, model.decode(inputs["latents"]).sample


@pytest.mark.parametrize(
    "changes",
    [
        {"addition_embed_type": "text_time", "addition_time_embed_dim": 2, "projection_class_embeddings_input_dim": 18},
        {"time_cond_proj_dim": 6},
        {"class_embed_type": "timestep"},
        {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 5},
        {"encoder_hid_dim": 6, "encoder_hid_dim_type": "text_proj"},
    ],
    ids=["SDXL", "LCM", "labels that are steps", "labels that are vectors", "projected text"],
)
def test_further_inputs(changes):
    model = build("UNet2DConditionModel", **changes)
    assert model(**make_inputs(model)).sample.shape[1] == model.config.out_channels


def test_inputs_that_are_not_known():
    assert make_inputs(build("UNet2DConditionModel", encoder_hid_dim=6, encoder_hid_dim_type="image_proj")) is None
    assert make_inputs(build("UNet2DConditionModel", attention_type="gated")) is None
    assert make_inputs(build("UNet2DConditionModel", class_embed_type="identity")) is None


@pytest.mark.parametrize("name", ["DiffusionPipeline", "UNet3DConditionModel", "os", "", None, ["evil", "Evil"], 3])
def test_other_classes_are_refused(name):
    with pytest.raises(ValueError, match="is not one of UNet2DModel, "):
        find_class(diffusers, name)


def test_defaults_are_filled_in_and_other_entries_left_out():
    kind = find_class(diffusers, "AutoencoderKL")
    found = fill_in({"act_fn": "relu", "decay": 0.9, "_diffusers_version": "0.1"}, kind)
    assert found["act_fn"] == "relu"
    assert found["latent_channels"] == inspect.signature(kind.__init__).parameters["latent_channels"].default
    assert not {"decay", "_diffusers_version"} & found.keys()


def test_parts_are_called_one_by_one():
    pipeline = PipelineModel({"text": make_text_encoder(0), "vae": build("AutoencoderTiny")}).double().eval()
    inputs = [{"text": {"input_ids": torch.arange(4)[None]}}, {"vae": make_inputs(pipeline.get_submodule("vae"))}]
    with isolated(pipeline, Call((), {})):
        probes = make_probes(pipeline, inputs)
    tokens = {int(t) for call in probes if "text" in call.kwargs for t in call.kwargs["text"]["input_ids"].flatten()}
    assert tokens == set(range(40))
    assert [list(call.kwargs) for call in probes].count(["vae"]) == 4
    assert list(pipeline(**probes[0].kwargs)) == ["text"]
