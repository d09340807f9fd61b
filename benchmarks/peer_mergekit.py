"""An aligned folder goes straight into mergekit: ``make mergekit``, or ``python -m benchmarks.peer_mergekit COMMAND``.

COMMAND is mergekit's ``mergekit-yaml``, which lives in an environment of its own. A small random Llama and a permuted copy
of it are merged by mergekit (linear, half and half) as they are, and after ``onebasin align``; and by ``onebasin merge
--then`` with several of its methods. Aligned, each merge is the first network.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from onebasin.checkpoints import open_checkpoint, open_models, write_checkpoint
from onebasin.cli.app import run as onebasin
from onebasin.matching.skeletons import Skeleton
from onebasin.symmetries.verification import compare

RECIPE = """merge_method: linear
dtype: bfloat16
models:
  - model: {first}
    parameters: {{weight: 0.5}}
  - model: {second}
    parameters: {{weight: 0.5}}
"""


def write_pair(folder: Path, seed: int = 0) -> None:
    """A random Llama in `folder`/a, and a permuted copy in `folder`/b."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "a")
    opened = open_models([folder / "a"])
    planted = opened.symmetry.random(torch.Generator().manual_seed(seed))
    (checkpoint,) = opened.checkpoints
    write_checkpoint(folder / "b", planted.apply(checkpoint), checkpoint)


def merge(command: str, folder: Path, first: str, second: str, out: str) -> None:
    """Run mergekit on two folders."""
    recipe = folder / f"{out}.yaml"
    recipe.write_text(RECIPE.format(first=folder / first, second=folder / second))
    subprocess.run([command, recipe, folder / out], check=True, capture_output=True, text=True)


METHODS = ("linear", "slerp", "ties", "dare_ties", "task_arithmetic")


def merge_then(command: str, folder: Path, method: str) -> Path:
    """Align the pair and merge it by a method of mergekit."""
    out = folder / f"then-{method}"
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(command).absolute().parent}{os.pathsep}{before}"
    try:
        arguments = ["merge", str(folder / "a"), str(folder / "b"), "-o", str(out), "--then", method, "--json"]
        assert onebasin(arguments) == 0
    finally:
        os.environ["PATH"] = before
    return out


def run(command: str, folder: Path) -> dict[str, Any]:
    """Merge the pair as it is and aligned; how far each merge is from the first network."""
    write_pair(folder)
    merge(command, folder, "a", "b", "as-they-are")
    assert onebasin(["align", str(folder / "a"), str(folder / "b"), "-o", str(folder / "aligned"), "--json"]) == 0
    merge(command, folder, "a", "aligned", "merged")
    opened = open_models([folder / name for name in ("a", "as-they-are", "merged")])
    first, plain, aligned = (checkpoint.load() for checkpoint in opened.checkpoints)
    merged = open_models([folder / "a", *(merge_then(command, folder, method) for method in METHODS)]).checkpoints
    functions = Skeleton(opened.architecture.build(), opened.architecture.example_inputs).functions
    return {
        "recipe": RECIPE,
        "files": sorted(file.name for file in (folder / "merged").iterdir()),
        "equal_tensors_as_they_are": sum(torch.equal(first[key], plain[key]) for key in first),
        "equal_tensors_aligned": sum(torch.equal(first[key], aligned[key]) for key in first),
        "tensors": len(open_checkpoint(folder / "a")),
        "outputs_differ_as_they_are": compare(functions, first, plain),
        "outputs_differ_aligned": compare(functions, first, aligned),
        "methods": {method: compare(functions, first, found) for method, found in zip(METHODS, merged[1:], strict=True)},
    }


def main() -> None:
    """Print the record; write it with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", help="mergekit-yaml")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    code = "from importlib.metadata import version as v; print(v('mergekit'), v('torch'), v('transformers'))"
    python = Path(options.command).with_name("python")
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        record = {
            **dict(zip(("mergekit", "torch", "transformers"), found, strict=True)),
            **run(options.command, Path(folder)),
        }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
