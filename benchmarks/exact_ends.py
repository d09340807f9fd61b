"""Does a learned transform leave the function of a transformer as it is? Networks of the published size, in float64.

    python -m benchmarks.exact_ends [--steps N] [--out results/exact-ends.json]

Two networks of each recipe of the experiment "transformers", with random weights, gains and offsets. All kinds of symmetry
are learned on the loss between them in float32, and the transform is applied to the second network in float64. Prints by how
much its outputs change, relative to the largest; a few minutes on one core.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.measuring import find_commit
from experiments.kept_functions import measure_end
from experiments.transformer_networks import RECIPES, VOCABULARY, Transformer, loss

BATCH, LENGTH = 16, 32


def main() -> None:
    """Learn, apply, print; write the records with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of Adam on the loss (default 20)")
    parser.add_argument("--out", type=Path, help="write the records to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | changes of basis | loss between them | change of the end in float64 |\n|---|---|---|---|")
    records = []
    for name in RECIPES:
        record = measure(name, options.steps)
        records.append(record)
        print(f"| {name} | {sum(record['bases'].values())} | {record['loss']:.4f} | {record['change']:.1e} |", flush=True)
    if options.out is not None:
        content = {"torch": torch.__version__, "commit": find_commit(), "steps": options.steps, "records": records}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def measure(name: str, steps: int) -> dict[str, Any]:
    """The record of one recipe."""
    torch.manual_seed(0)
    source, target = (_make(Transformer(RECIPES[name])) for _ in range(2))
    data = [_draw(name) for _ in range(4)]
    inputs = data[0][0]
    found = ob.align(
        source,
        to=target,
        example_inputs=inputs[:2],
        method="weight-matching",
        kinds="all",
        objective=ob.RandomPoint(loss, low=0.4, high=0.6),
        data=data,
        scaling=ob.Scaling(steps=steps),
    )
    end = measure_end(source, found, inputs)
    kinds = Counter(found.transform.symmetry.bases[basis].kind for basis in found.matrices)
    return {
        "network": name,
        "parameters": sum(parameter.numel() for parameter in source.parameters()),
        "bases": dict(kinds),
        "scales": len(found.scales),
        "loss": found.cost,
        "change": end["change in float64"],
        "condition": end["condition"],
    }


def _make(model: nn.Module) -> nn.Module:
    """In eval mode, with gains and offsets that have to be folded."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _draw(name: str) -> tuple[Tensor, Tensor]:
    """Images or texts without meaning, and what to predict."""
    if name == "vit":
        return torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))


if __name__ == "__main__":
    main()
