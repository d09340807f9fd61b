"""Every family of `FAMILIES` goes from save_pretrained through align and merge, and back with from_pretrained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from onebasin.checkpoints import find_architecture
from onebasin.symmetries.agreement import relative_difference
from onebasin.torch_internals import tree_map
from tests.cli.cli_files import assert_same, load
from tests.cli.hugging_face_families import FAMILIES, load_family, save_family

DOCS = Path(__file__).parents[2] / "docs"
QUICKLY = ("--no-check", "--method", "weight-matching")
"""What the commands do is checked here, so that they need not check the symmetry themselves."""


def run_model(model: Any, inputs: Any) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        tree_map(lambda leaf: outputs.append(leaf) if isinstance(leaf, torch.Tensor) else None, dict(model(**inputs)))
    return outputs


def compare(first: Any, second: Any, folder: Path, dtype: torch.dtype) -> float:
    """The largest difference of the outputs of two models, relative to their size."""
    inputs = find_architecture(str(folder)).example_inputs
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return relative_difference(*(run_model(model.to(dtype), inputs) for model in (first, second)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_align_and_merge(onebasin, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for folder, seed in (("a", 0), ("b", 1)):
        save_family(name, seed, tmp_path / folder)
    aligned = onebasin("align", "a", "b", "-o", "aligned", "--json", *QUICKLY)
    assert aligned.code == 0, aligned.err
    assert aligned.record["cost"] < aligned.record["start_cost"]
    merged = onebasin("merge", "a", "b", "-o", "merged", *QUICKLY)
    assert merged.code == 0, merged.err
    first, second, moved, mean = (load_family(name, tmp_path / each) for each in ("a", "b", "aligned", "merged"))
    states = zip(first.state_dict().items(), moved.state_dict().values(), mean.state_dict().values(), strict=True)
    for (key, one), other, found in states:
        if one.is_floating_point():
            torch.testing.assert_close(found, (one + other) / 2, msg=key)
    assert any(not torch.equal(one, second.state_dict()[key]) for key, one in moved.state_dict().items())
    dtype, tolerance = (torch.float32, 1e-4) if FAMILIES[name].float32 else (torch.float64, 1e-9)
    assert compare(moved, second, tmp_path / "b", dtype) < tolerance
    assert compare(first, second, tmp_path / "b", dtype) > 1e-2


@pytest.mark.parametrize("name", ["vit", "mixtral", "marian"])
def test_apply_reads_what_transformers_saves(onebasin, tmp_path, monkeypatch, name):
    """A saved permutation knows the names of the module; the configuration beside the weights leads to those in the file."""
    monkeypatch.chdir(tmp_path)
    for folder, seed in (("a", 0), ("b", 1)):
        save_family(name, seed, tmp_path / folder)
    assert onebasin("align", "a", "b", "-o", "aligned", "-p", "p.safetensors", *QUICKLY).code == 0
    assert onebasin("apply", "p.safetensors", "b", "-o", "applied").code == 0
    assert onebasin("apply", "p.safetensors", "applied", "-o", "back", "--inverse").code == 0
    assert_same(load(tmp_path / "applied"), load(tmp_path / "aligned"))
    assert_same(load(tmp_path / "back"), load(tmp_path / "b"))


def test_the_documentation_lists_the_families():
    page = (DOCS / "howto" / "hugging-face.md").read_text()
    assert f"{len(FAMILIES)} families" in page
    for name in FAMILIES:
        assert f"`{name}`" in page
