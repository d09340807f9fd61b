"""Planted transforms of every kind, found again in large networks from disk: ``python -m benchmarks.planted_transforms``.

A random network is written to files in float32, and beside it a copy whose units are permuted, scaled, rotated and mixed at
random. Weight matching must undo all of it, reading one tensor at a time. Each network has a process of its own, so that its
peak memory is known.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.billion import peak_gigabytes, random_checkpoint
from benchmarks.measuring import find_commit
from onebasin.checkpoints import fit_names, open_checkpoint, write_checkpoint
from onebasin.cli.torchvision_operators import declare_missing_operators

NETWORKS = ("vit-b", "gpt2", "llama-1b")


def make_network(name: str, num_layers: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network whose parameters take no memory, with inputs; all layers if their number is None."""
    declare_missing_operators()  # transformers imports it
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {
        "vit-b": ViTConfig(num_hidden_layers=num_layers or 12, num_labels=1000),
        "gpt2": GPT2Config(n_layer=num_layers or 12, use_cache=False),
        "llama-1b": LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=num_layers or 22,
            num_attention_heads=32,
            num_key_value_heads=4,
            vocab_size=32000,
            use_cache=False,
        ),
    }[name]
    kind = {"vit-b": ViTForImageClassification, "gpt2": GPT2LMHeadModel, "llama-1b": LlamaForCausalLM}[name]
    with torch.device("meta"):
        model = kind(config)
    if name == "llama-1b":
        model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its tables are no parameters
    for module in model.modules():
        for part, value in module.named_parameters(recurse=False):
            is_gain = part == "weight" and "Norm" in type(module).__name__
            row = torch.ones(value.shape[-1]) if is_gain else torch.randn(value.shape[-1])
            setattr(module, part, nn.Parameter(row.expand(value.shape), requires_grad=False))
    model.tie_weights()
    inputs = (
        {"pixel_values": torch.zeros(1, 3, 224, 224)}
        if name == "vit-b"
        else {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    )
    return model.eval(), inputs


def run(name: str, num_layers: int | None, threads: int, folder: Path) -> dict[str, Any]:
    """Plant a transform, find it, and compare all tensors."""
    torch.set_num_threads(threads)
    model, inputs = make_network(name, num_layers)
    begin, busy = time.perf_counter(), time.process_time()
    symmetry = ob.symmetry(model, inputs, kinds="all")
    traced, traced_busy = time.perf_counter() - begin, time.process_time() - busy
    shapes = {key: value.detach() for key, value in model.state_dict().items()}
    target = fit_names(random_checkpoint(folder / "a", shapes, symmetry, seed=0), shapes, symmetry.ties)
    planted = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    write_checkpoint(folder / "b", planted.apply(target), target)
    source = fit_names(open_checkpoint(folder / "b"), shapes, symmetry.ties)
    written, begin, busy = peak_gigabytes(), time.perf_counter(), time.process_time()
    found = ob.align(source, to=target, symmetry=symmetry, method="weight-matching", scaling=ob.Scaling(steps=0))
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    error = max(float((found.model[key] - target[key]).norm() / target[key].norm()) for key in shapes)
    return {
        "network": name,
        "commit": find_commit(),
        "parameters": sum(v.numel() for k, v in shapes.items() if not any(k in keys[1:] for keys in symmetry.ties)),
        "kinds": dict(Counter(basis.kind for basis in symmetry.bases.values())) | {"positive": len(symmetry.scales)},
        "groups": len(symmetry.groups),
        "cost": [found.start_cost, found.cost],
        "sweeps": len(found.history),
        "largest relative error of a tensor": error,
        "layers": num_layers or "all",
        "threads": threads,
        "load": os.getloadavg(),
        "trace seconds": traced,
        "align seconds": seconds,
        "trace core seconds": traced_busy,  # on all cores; unlike the clock, whoever else is at work
        "align core seconds": busy,
        "peak gigabytes": peak_gigabytes(),
        "peak gigabytes before": written,
    }


def _run_alone(connection: Any, *arguments: Any) -> None:
    connection.send(run(*arguments))


def main() -> None:
    """Print a line per network, and write the records with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default="all", choices=(*NETWORKS, "all"))
    parser.add_argument("--layers", type=int, help="of each, instead of all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where to write the checkpoints (10 GB); a temporary folder if not given"
    )
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    records = []
    for name in NETWORKS if "all" in options.networks else options.networks:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_alone, args=(theirs, name, options.layers, options.threads, folder))
        try:
            process.start()
            theirs.close()
            records.append(ours.recv())
            process.join()
        finally:
            shutil.rmtree(folder)
        print(json.dumps(records[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
