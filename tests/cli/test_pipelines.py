"""Pipelines of diffusers through the commands: every part is aligned, the rest is carried over, the result loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import onebasin as ob
from onebasin.checkpoints import find_architecture, open_models, write_checkpoint
from tests.cli.cli_files import assert_same, load
from tests.tiny_pipelines import make_model, make_text_encoder, write_pipeline, write_small_pipeline

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
QUICKLY = ("--no-check", "--method", "weight-matching")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The pipelines a and b; the autoencoder of a is in shards."""
    folder = tmp_path_factory.mktemp("pipelines")
    for seed, name in enumerate("ab"):
        write_small_pipeline(folder / name, seed)
    shutil.rmtree(folder / "a" / "vae")
    make_model("AutoencoderTiny", 0).save_pretrained(folder / "a" / "vae", max_shard_size="4KB")
    assert len(list((folder / "a" / "vae").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def pair(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        shutil.copytree(written / name, tmp_path / name)
    return tmp_path


def list_files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def change(file: Path, **entries) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def load_part(kind, folder: Path):
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.double().eval()


def run_parts(folder: Path) -> list[torch.Tensor]:
    """What the parts compute, by the classes of their libraries."""
    generator = torch.Generator().manual_seed(0)
    vae = load_part(diffusers.AutoencoderTiny, folder / "vae")
    text = load_part(transformers.CLIPTextModel, folder / "text_encoder")
    image = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        latents = vae.encode(image).latents
        return [latents, vae.decode(latents).sample, text(torch.arange(10)[None]).last_hidden_state]


def test_a_planted_permutation_is_found_in_every_part(onebasin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {"unet": make_model("UNet2DConditionModel", 0), "vae": make_model("AutoencoderKL", 0)}
    write_pipeline(tmp_path / "a", {**parts, "text_encoder": make_text_encoder(0)})
    models = open_models([tmp_path / "a"], verify=False)
    planted = models.symmetry.random(torch.Generator().manual_seed(0))
    write_checkpoint(tmp_path / "b", planted.apply(models.checkpoints[0]), models.checkpoints[0])
    assert onebasin("align", "a", "b", "-o", "out", "--no-check").code == 0
    for part in (*parts, "text_encoder"):
        expected, moved = load(tmp_path / "a" / part), load(tmp_path / "b" / part)
        assert any(not torch.equal(moved[key], value) for key, value in expected.items())
        assert_same(load(tmp_path / "out" / part), expected)
    found = ob.Permutation.load(tmp_path / "out" / "permutation.safetensors")
    assert {name.partition(".")[0] for name in found.symmetry.groups} == {"unet", "vae", "text_encoder"}
    with torch.no_grad():
        images = [sample(tmp_path / name) for name in ("b", "out")]
    torch.testing.assert_close(*images, rtol=1e-6, atol=1e-6)


def sample(folder: Path) -> torch.Tensor:
    """What the whole pipeline makes of a prompt."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder).to(dtype=torch.float64)
    pipeline.set_progress_bar_config(disable=True)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.arange(12)[None]
    text = pipeline.text_encoder(tokens).last_hidden_state
    made = pipeline(prompt_embeds=text, guidance_scale=1, num_inference_steps=2, latents=latents, output_type="pt")
    return made.images


def test_the_results_load_and_compute_what_they_should(onebasin, pair):
    aligned = onebasin("align", "a", "b", "-o", "aligned", "--json", *QUICKLY)
    assert aligned.code == 0, aligned.err
    assert aligned.record["cost"] < aligned.record["start_cost"]
    assert list_files(pair / "aligned") == list_files(pair / "b") | {"README.md", "permutation.safetensors"}
    torch.testing.assert_close(run_parts(pair / "aligned"), run_parts(pair / "b"), rtol=1e-9, atol=1e-9)
    merged = onebasin("merge", "a", "b", "-o", "merged", "--json", *QUICKLY)
    assert merged.code == 0, merged.err
    assert list_files(pair / "merged") == list_files(pair / "a") | {"README.md"}
    run_parts(pair / "merged")
    for part in ("vae", "text_encoder"):
        first, second, mean = (load(pair / name / part) for name in ("a", "aligned", "merged"))
        for key, value in first.items():
            torch.testing.assert_close(mean[key], (value + second[key]) / 2)
    for place in ("tokenizer/vocab.json", "scheduler/scheduler_config.json", "vae/config.json"):
        assert (pair / "merged" / place).read_bytes() == (pair / "a" / place).read_bytes()


def test_a_permutation_of_a_pipeline_is_applied_and_undone(onebasin, pair):
    symmetry = find_architecture("b").symmetry(verify=False)
    symmetry.random(torch.Generator().manual_seed(0)).save("p.safetensors")
    assert onebasin("apply", "p.safetensors", "b", "-o", "moved").code == 0
    assert onebasin("apply", "p.safetensors", "moved", "-o", "back", "--inverse").code == 0
    assert any(not torch.equal(v, load(pair / "moved" / "vae")[k]) for k, v in load(pair / "b" / "vae").items())
    for part in ("vae", "text_encoder"):
        assert_same(load(pair / "back" / part), load(pair / "b" / part))
    assert onebasin("verify", "b", "moved").code == 0
    assert onebasin("verify", "a", "b").code == 1
    shown = onebasin("inspect", "b", "--no-check", "--json").record
    assert {name.partition(".")[0] for name in shown["groups"]} == {"vae", "text_encoder"}
    refused = onebasin("apply", "p.safetensors", "b/vae", "-o", "part")
    assert refused.code == 3


def test_a_single_folder_of_diffusers(onebasin, pair):
    aligned = onebasin("align", "a/vae", "b/vae", "-o", "vae", *QUICKLY)
    assert aligned.code == 0, aligned.err
    load_part(diffusers.AutoencoderTiny, pair / "vae")
    assert onebasin("verify", "b/vae", "vae").code == 0


def test_what_is_written_replaces_nothing_else(onebasin, pair):
    align = ("align", "a", "b", "-o", "out", *QUICKLY)
    assert onebasin(*align).code == 0
    before = {place: (pair / "out" / place).read_bytes() for place in list_files(pair / "out")}
    assert onebasin(*align).code == 3
    listed = onebasin(*align, "--force", "--dry-run", "--json").record["would_replace"]
    assert {Path(place).relative_to("out").as_posix() for place in listed} == before.keys()
    (pair / "out" / "vae" / "mine.txt").write_text("mine")
    refused = onebasin(*align, "--force")
    assert refused.code == 3
    assert "vae/mine.txt, which would be lost" in refused.err
    assert {place: (pair / "out" / place).read_bytes() for place in before} == before
    (pair / "out" / "vae" / "mine.txt").unlink()
    (pair / "out" / "vae" / "empty").mkdir()
    assert onebasin(*align, "--force").code == 3
    (pair / "out" / "vae" / "empty").rmdir()
    assert onebasin(*align, "--force").code == 0
    assert list_files(pair / "out") == before.keys()
    assert onebasin("align", "a", "b", "-o", "b/vae/out", *QUICKLY).code == 3


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("vae/config.json", {"upsampling_scaling_factor": 3}, "upsampling_scaling_factor is 2 in a/vae and 3 in b/vae"),
        (
            "text_encoder/config.json",
            {"hidden_act": "gelu"},
            "hidden_act is quick_gelu in a/text_encoder and gelu in b",
        ),
        (
            "scheduler/scheduler_config.json",
            {"prediction_type": "v_prediction"},
            "prediction_type is epsilon in a/sched",
        ),
        ("tokenizer/vocab.json", {"t1": 2, "t2": 1}, "the tokenizers differ in vocab.json of a/tokenizer and b/tokenizer"),
    ],
)
def test_what_shapes_do_not_show(onebasin, pair, file, entries, message):
    change(pair / "b" / file, **entries)
    refused = onebasin("align", "a", "b", "-o", "out", *QUICKLY)
    assert refused.code == 3
    assert message in refused.err.replace("\n", "")
    assert onebasin("align", "a", "b", "-o", "out", *QUICKLY, "--allow").code == 0


def test_what_has_no_effect(onebasin, pair):
    change(pair / "b" / "vae" / "config.json", _diffusers_version="0.1", decay=0.9, _name_or_path="x")
    change(pair / "b" / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
    (pair / "b" / "vae" / "README.md").write_text("of the part")
    aligned = onebasin("align", "a", "b", "-o", "out", *QUICKLY)
    assert aligned.code == 0, aligned.err
    assert (pair / "out" / "vae" / "README.md").read_text() == "of the part"


def test_a_safety_checker_is_carried_over(onebasin, pair):
    for name in "ab":
        shutil.copytree(pair / name / "text_encoder", pair / name / "safety_checker")
        change(pair / name / "model_index.json", safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])
    merged = onebasin("merge", "a", "b", "-o", "out", "--json", *QUICKLY)
    assert merged.code == 0, merged.err
    assert_same(load(pair / "out" / "safety_checker"), load(pair / "a" / "safety_checker"))
    assert any("left as they are: safety_checker." in note for note in merged.record["notes"])


def test_another_type(onebasin, pair):
    assert onebasin("merge", "a", "b", "-o", "out", "--out-dtype", "float16", *QUICKLY).code == 0
    assert {value.dtype for value in load(pair / "out").values() if value.is_floating_point()} == {torch.float16}
    assert json.loads((pair / "out" / "text_encoder" / "config.json").read_text())["dtype"] == "float16"


def test_mergekit_does_not_take_pipelines(onebasin, pair):
    refused = onebasin("merge", "a", "b", "-o", "out", "--then", "ties", *QUICKLY)
    assert refused.code == 3
    assert "mergekit merges folders of transformers, and a is none" in refused.err


def test_the_line_between_two_pipelines(onebasin, pair, monkeypatch):
    (pair / "images.py").write_text(
        "import torch\n"
        "def batches():\n"
        "    images = torch.zeros(2, 3, 8, 8)\n"
        "    return [({'vae': {'sample': images, 'latents': torch.zeros(2, 4, 4, 4)}}, images)]\n"
        "def loss(outputs, target):\n"
        "    return (outputs['vae'][1] - target).square().mean()\n"
    )
    ran = onebasin("barrier", "a", "b", "--data", "images:batches", "--loss", "images:loss", "--points", "3", "--json")
    assert ran.code == 0, ran.err
    assert len(ran.record["paths"]["as they are"]["metrics"]["loss"]) == 3


@pytest.mark.parametrize(
    ("form", "parts"),
    [("text_encoder.{}.lora_{}.weight", ("B", "A")), ("lora_te_text_model_{}.lora_{}.weight", ("up", "down"))],
)
def test_a_lora_follows(onebasin, pair, form, parts):
    symmetry = find_architecture("b").symmetry(verify=False)
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    permutation.save("p.safetensors")
    module = "encoder.layers.0.mlp.fc1"
    names = [form.format(module.replace(".", "_") if form.startswith("lora_te") else module, part) for part in parts]
    torch.save({names[0]: torch.randn(12, 2), names[1]: torch.randn(2, 8)}, "lora.pt")
    assert onebasin("apply", "p.safetensors", "lora.pt", "-o", "moved.pt").code == 0
    given, moved = (torch.load(name) for name in ("lora.pt", "moved.pt"))
    key = f"text_encoder.{module}.weight"
    expected = permutation.move(given[names[0]] @ given[names[1]], symmetry.layouts[key])
    torch.testing.assert_close(moved[names[0]] @ moved[names[1]], expected)
    assert not torch.equal(moved[names[0]], given[names[0]])
