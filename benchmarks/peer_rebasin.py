"""The package `rebasin` 0.0.47 on the classification models of torchvision, judged by the same oracle as ours.

    python -m benchmarks.peer_rebasin FILE

Runs in a venv of its own (torch, torchvision, rebasin; its import name is taken there) and writes {name: verdict}: `right`
or `wrong` is whether the permutations it finds, filled at random, leave the output alone in float64 on random weights.
It leaves the statistics of batch norms behind, to be measured anew; where that is all that is wrong the verdict says so.
`benchmarks.coverage --peer FILE` puts the verdicts beside ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.architectures import Architecture, torchvision_architectures

_SECONDS = 30
_PARAMETERS = 10**8


def judge(architecture: Architecture) -> str:
    torch.manual_seed(0)
    (example, other) = architecture.make(), architecture.make().model
    model, x = example.model, example.inputs(1, example.length)
    if sum(p.numel() for p in model.parameters()) > _PARAMETERS:
        return "not run: too large"
    model, other, x = randomise(model), randomise(other), x.double()
    with fresh_statistics(model):
        without = model(x)
    before = model(x)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            num_permutations = permute(model, other, x)
    except TimeoutError:
        return f"not run: over {_SECONDS} s"
    except Exception as error:
        return f"raises {type(error).__name__}"
    if not num_permutations:
        return "nothing found"
    if difference(model(x), before) < 1e-6:
        return f"right ({num_permutations} permutations)"
    with fresh_statistics(model):
        error = difference(model(x), without)
    verdict = "right but for batch-norm statistics" if error < 1e-6 else f"wrong by {error:.0e}"
    return f"{verdict} ({num_permutations} permutations)"


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@contextlib.contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Means of zero and variances of one, for a while."""
    statistics = {k: v for k, v in model.state_dict().items() if k.endswith(("running_mean", "running_var"))}
    kept = {key: value.clone() for key, value in statistics.items()}
    for key, value in statistics.items():
        value.fill_(float(key.endswith("running_var")))
    yield
    for key, value in statistics.items():
        value.copy_(kept[key])


def permute(model: nn.Module, other: nn.Module, x: Tensor) -> int:
    """Fill every permutation that it found with a random one and apply them, in place."""
    from rebasin import PermutationCoordinateDescent

    descent = PermutationCoordinateDescent(other, model, x)
    found = [permutation for permutation, _ in descent.pinit.model_graph.permutation_to_info]
    for permutation in found:
        permutation.perm_indices = torch.randperm(len(permutation.perm_indices))
    descent.apply_permutations()
    return len(found)


def randomise(model: nn.Module) -> nn.Module:
    """Norms with weights and statistics of their own, heads that are not zero: fresh ones would hide errors."""
    model = model.double().eval().requires_grad_(False)
    for value in model.state_dict().values():
        if value.is_floating_point() and value.dim() < 2:
            value.uniform_(0.5, 1.5)
        elif value.is_floating_point():
            bound = (3 / value[0].numel()) ** 0.5
            value.uniform_(-bound, bound)
    return model


def _alarm(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _alarm)
    verdicts = {}
    for architecture in torchvision_architectures():
        signal.alarm(_SECONDS)
        try:
            verdicts[architecture.name] = judge(architecture)
        except TimeoutError:
            verdicts[architecture.name] = f"not run: over {_SECONDS} s"
        signal.alarm(0)
        print(architecture.name, verdicts[architecture.name], flush=True)
        Path(sys.argv[1]).write_text(json.dumps(verdicts, indent=1) + "\n")


if __name__ == "__main__":
    main()
