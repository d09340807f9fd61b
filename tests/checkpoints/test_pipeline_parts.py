import json

import pytest

from onebasin.checkpoints.pipeline_parts import Part, find_parts, is_pipeline

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "requires_safety_checker": True,
    "unet": ["diffusers", "UNet2DConditionModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "image_encoder": [None, None],
}


def write(folder, **changes):
    (folder / "model_index.json").write_text(json.dumps({**INDEX, **changes}))
    for name in ("unet", "text_encoder", "tokenizer", "safety_checker"):
        (folder / name).mkdir(exist_ok=True)
    return folder


def test_parts_by_what_becomes_of_them(tmp_path):
    parts = find_parts(write(tmp_path))
    assert list(parts) == ["unet", "text_encoder", "tokenizer", "safety_checker"]
    assert [name for name, part in parts.items() if part.is_moved] == ["unet", "text_encoder"]
    assert [name for name, part in parts.items() if part.has_weights] == ["unet", "text_encoder", "safety_checker"]


@pytest.mark.parametrize(
    "name",
    ["DDIMScheduler", "CLIPTokenizer", "T5TokenizerFast", "CLIPImageProcessor", "CLIPFeatureExtractor", "PixtralProcessor"],
)
def test_classes_without_weights(name):
    assert not Part("transformers", name).has_weights


def test_every_other_folder_has_no_parts(tmp_path):
    assert not is_pipeline(tmp_path)
    assert find_parts(tmp_path) == find_parts(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": ["pipeline", "Evil"]}, "code in a folder is never run"),
        ({"_class_name": None}, "does not name a class"),
        ({"_class_name": "a.b"}, "does not name a class"),
        ({"unet": ["evil", "Evil"]}, "takes the part unet from 'evil'"),
        ({"unet": ["diffusers.models", "Evil"]}, "should name a library and a class"),
        ({"unet": ["diffusers", None]}, "should name a library and a class"),
        ({"unet": ["diffusers"]}, "should name a library and a class"),
        ({"../unet": ["diffusers", "UNet2DModel"]}, "is not the name of a part"),
        ({"forward": ["diffusers", "UNet2DModel"]}, "is not the name of a part"),
        ({"vae": ["diffusers", "AutoencoderKL"]}, "is not a folder"),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        find_parts(write(tmp_path, **changes))


def test_an_index_without_models_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "Pipeline"}')
    with pytest.raises(ValueError, match="names no part with weights"):
        find_parts(tmp_path)


def test_a_part_must_not_be_a_link(tmp_path):
    write(tmp_path)
    (tmp_path / "unet").rmdir()
    (tmp_path / "unet").symlink_to(tmp_path / "text_encoder")
    with pytest.raises(ValueError, match="is not a folder"):
        find_parts(tmp_path)
