"""Pipelines of diffusers from strangers: what their index and parts name is not run, read, asked for or carried out."""

import json
import os
import shutil
from typing import Any

import pytest

from tests.cli.attacks import MARKER, SECRET, check_refused, look
from tests.tiny_pipelines import write_small_pipeline

pytest.importorskip("diffusers")
EVIL = "evil/evil"
CODE = f"open({MARKER!r}, 'w')\nclass Evil: pass\n"
INDEX: dict[str, dict[str, Any]] = {
    "a pipeline of code": {"_class_name": ["pipeline", "Evil"]},
    "a pipeline of code by path": {"_class_name": "../evil"},
    "a pipeline of a hub": {"_class_name": EVIL},
    "no pipeline": {"_class_name": None},
    "a part of code": {"vae": ["evil", "Evil"]},
    "a part of code beside others": {"more": ["evil", "Evil"]},
    "a tokenizer of code": {"tokenizer": ["evil", "EvilTokenizer"]},
    "a part of another library": {"vae": ["os", "system"]},
    "a module in a library": {"vae": ["diffusers.models.autoencoders", "AutoencoderTiny"]},
    "a class outside of the list": {"vae": ["diffusers", "UNet3DConditionModel"]},
    "a class that is a pipeline": {"vae": ["diffusers", "DiffusionPipeline"]},
    "a class that is a function": {"vae": ["diffusers", "load_image"]},
    "the class of another part": {"vae": ["diffusers", "AutoencoderKL"]},
    "the library of another part": {"vae": ["transformers", "CLIPTextModel"]},
    "another text encoder": {"text_encoder": ["transformers", "CLIPModel"]},
    "a class of code": {"vae": ["diffusers", CODE]},
    "a class as a number": {"vae": ["diffusers", 3]},
    "half a class": {"vae": ["diffusers", None]},
    "three words": {"vae": ["diffusers", "AutoencoderTiny", "x"]},
    "nothing": {"vae": []},
    "a part outside": {"../outside": ["diffusers", "AutoencoderTiny"]},
    "a part by its whole path": {"/etc": ["diffusers", "AutoencoderTiny"]},
    "the folder itself": {".": ["diffusers", "AutoencoderTiny"]},
    "the folder above": {"..": ["diffusers", "AutoencoderTiny"]},
    "a part in a part": {"vae/inner": ["diffusers", "AutoencoderTiny"]},
    "a part without a name": {"": ["diffusers", "AutoencoderTiny"]},
    "a part with a line break": {"a\nb": ["diffusers", "AutoencoderTiny"]},
    "a part that is a method": {"forward": ["diffusers", "AutoencoderTiny"]},
    "a part that is not there": {"unet": ["diffusers", "UNet2DModel"]},
    "a tokenizer that is not there": {"tokenizer_2": ["transformers", "CLIPTokenizer"]},
    "a part without weights": {"tokenizer": ["diffusers", "AutoencoderTiny"]},
    "no parts": {"vae": [None, None], "text_encoder": [None, None]},
}
PARTS: dict[str, dict[str, Any]] = {
    "no class": {"_class_name": None},
    "a class of code": {"_class_name": ["evil", "Evil"]},
    "another class": {"_class_name": "AutoencoderKL"},
    "a class outside of the list": {"_class_name": "UNet3DConditionModel"},
    "code of the folder": {"auto_map": {"AutoModel": "evil.Evil"}},
    "an activation of code": {"act_fn": CODE},
    "a million blocks": {"num_encoder_blocks": [10**6, 1]},
    "a million kinds of blocks": {"encoder_block_out_channels": [4] * 10**6, "num_encoder_blocks": [1] * 10**6},
    "a width beyond memory": {"latent_channels": 2**60},
    "a width as text": {"latent_channels": "4"},
    "another width": {"encoder_block_out_channels": [8, 4]},
    "a block more": {"num_decoder_blocks": [2, 1]},
    "blocks that do not fit": {"num_decoder_blocks": [1]},
}
FILES = (b"", b"{", b"null", b"[]", b"{}", b'"x"', b'{"a":' * 100_000, b'{"_class_name": "\xff"}', CODE.encode())
COMMANDS = {
    "inspect": ("inspect", "pipeline", "--no-check"),
    "merge": ("merge", "pipeline", "pipeline", "-o", "out", "--no-check"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "pipeline"
    write_small_pipeline(folder, seed=0)
    return folder


@pytest.fixture
def pipeline(offline, small):
    """A pipeline with code beside everything, another one outside, and no way out of the machine."""
    folder = offline / "pipeline"
    shutil.copytree(small, folder)
    shutil.copytree(small / "vae", offline / "outside")
    for place in (offline, folder, folder / "vae"):
        for name in ("evil.py", "pipeline.py"):
            (place / name).write_text(CODE)
    return folder


def change(file, entries) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", INDEX)
def test_an_index(onebasin, attacked, pipeline, name, command):
    change(pipeline / "model_index.json", INDEX[name])
    check_refused(onebasin, attacked, *COMMANDS[command])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARTS)
def test_the_configuration_of_a_part(onebasin, attacked, pipeline, name):
    change(pipeline / "vae" / "config.json", PARTS[name])
    check_refused(onebasin, attacked, *COMMANDS["merge"])


@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "text_encoder/config.json"])
@pytest.mark.parametrize("content", FILES)
def test_damaged_files(onebasin, attacked, pipeline, file, content):
    (pipeline / file).write_bytes(content)
    check_refused(onebasin, attacked, *COMMANDS["merge"])


@pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer", "scheduler"])
@pytest.mark.parametrize("target", ["../outside", "/etc", "pipeline/vae", "nowhere", ""])
def test_a_part_that_is_a_link_or_missing(onebasin, attacked, pipeline, part, target):
    shutil.rmtree(pipeline / part)
    if target:
        (pipeline / part).symlink_to(target)
    assert part in check_refused(onebasin, attacked, *COMMANDS["merge"])


@pytest.mark.parametrize(
    "file", ["vae/diffusion_pytorch_model.safetensors", "vae/config.json", "text_encoder/model.safetensors"]
)
def test_a_file_of_a_part_that_is_missing(onebasin, attacked, pipeline, file):
    (pipeline / file).unlink()
    check_refused(onebasin, attacked, *COMMANDS["merge"])


def test_an_index_of_shards_stays_in_its_part(onebasin, attacked, pipeline):
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    index = {"weight_map": {"w": "../../outside/diffusion_pytorch_model.safetensors"}}
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert "must name files beside it" in check_refused(onebasin, attacked, *COMMANDS["merge"])


def test_no_output_replaces_a_part_of_an_input(onebasin, attacked, pipeline):
    for out in ("pipeline/vae", "pipeline/new", "pipeline/vae/new", "."):
        check_refused(onebasin, attacked, "merge", "pipeline", "pipeline", "-o", out, "--no-check", "--force")
    report = ("--report", "pipeline/tokenizer/vocab.json", "--force")
    check_refused(onebasin, attacked, *COMMANDS["merge"], *report)


def test_secrets_stay_where_they_are(onebasin, attacked, pipeline):
    for part in ("", "vae", "tokenizer"):
        (pipeline / part / "leak.json").symlink_to(attacked.parent / "secret.json")
        (pipeline / part / "users.txt").symlink_to("/etc/passwd")
        (pipeline / part / "away").symlink_to("/")
        os.mkfifo(pipeline / part / "pipe.json")
    (pipeline / "unnamed").mkdir()
    (pipeline / "unnamed" / "config.json").write_text("{}")
    ran = onebasin(*COMMANDS["merge"], "--json", "--method", "weight-matching")
    assert ran.code == 0, ran.err
    found = look(attacked / "out")
    assert SECRET.encode() not in b"".join(content for content in found.values() if isinstance(content, bytes))
    names = {name.rpartition("/")[2] for name in found}
    assert not names & {"leak.json", "users.txt", "away", "pipe.json", "evil.py", "pipeline.py", "unnamed"}
    assert not (attacked / MARKER).exists()
    assert any("leak.json (a link)" in note and "unnamed (a folder)" in note for note in ran.record["notes"])
