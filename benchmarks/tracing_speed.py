"""How long tracing takes: GPT-2 small with its check, a Llama of a billion parameters, networks of many small operations.

python -m benchmarks.tracing_speed
"""

from __future__ import annotations

import contextlib
import resource
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

import onebasin as ob
from onebasin.cli.torchvision_operators import declare_missing_operators
from onebasin.programs.calls import read_calls
from onebasin.symmetries.verification import verify_programs
from onebasin.tensors.states import read_state
from onebasin.tracing import trace_calls

Result = TypeVar("Result")


def timed(what: str, call: Callable[[], Result]) -> Result:
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    print(f"{what}: {time.process_time() - processor:.1f} s of processor, {time.perf_counter() - wall:.1f} s of wall clock")
    return result


def main() -> None:
    warnings.simplefilter("ignore")
    declare_missing_operators()
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
        config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, use_cache=False)
        llama = LlamaForCausalLM(config).eval()
        calls = read_calls({"input_ids": torch.arange(8).view(1, 8)})
    print(f"Llama, {sum(p.numel() for p in llama.parameters()) / 1e9:.2f} billion parameters, on the meta device")
    symmetry, _ = timed("  traced", lambda: trace_calls(llama, calls))
    print(f"  {symmetry.summary()}; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory at most")

    gpt = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    calls = read_calls({"input_ids": torch.arange(8).view(1, 8)})
    print(f"GPT-2, {sum(p.numel() for p in gpt.parameters()) / 1e6:.0f} million parameters")
    symmetry, programs = timed("  traced", lambda: trace_calls(gpt, calls))
    error = timed("  verified", lambda: verify_programs(symmetry, programs, read_state(gpt)))
    print(f"  {symmetry.summary()}; relative error {error:.0e}")
    trace_many_operations()


def trace_many_operations() -> None:
    """Networks that take long for their size; GhostNet where timm is installed."""
    from torchvision import models

    makers: dict[str, Callable[[], nn.Module]] = {
        "ShuffleNet v2": models.shufflenet_v2_x1_0, "Swin v2 T": models.swin_v2_t, "MViT v1 B": models.video.mvit_v1_b,
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        import timm

        makers["GhostNet"] = lambda: timm.create_model("ghostnet_100")
    for name, make in makers.items():
        model = make().eval()
        inputs = torch.rand(1, 3, 16, 224, 224) if name.startswith("MViT") else torch.rand(1, 3, 64, 64)
        timed(f"{name}, traced", lambda model=model, inputs=inputs: ob.symmetry(model, inputs, verify=False))


if __name__ == "__main__":
    main()
