"""The package `rebasin` 0.0.47 on the classification models of torchvision, judged by the same oracle as ours.

    python -m benchmarks.peer_rebasin FILE

Runs in a venv of its own (torch, torchvision, rebasin; its import name is taken there) and writes {name: verdict}: `right`
or `wrong` is whether the permutations it finds, filled at random, leave the output alone in float64 on random weights;
`nothing found` if there are none to fill. `benchmarks.coverage --peer FILE` puts the verdicts beside ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import warnings
from pathlib import Path

import torch
from benchmarks.architectures import Architecture, torchvision_architectures
from torch import Tensor, nn

_SECONDS = 60
_PARAMETERS = 10**8


def judge(architecture: Architecture) -> str:
    torch.manual_seed(0)
    (model, x), (other, _) = architecture.make(), architecture.make()
    if sum(p.numel() for p in model.parameters()) > _PARAMETERS:
        return "not run: too large"
    model, other, x = randomise(model), randomise(other), x.double()
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
    error = float((model(x) - before).abs().max() / before.abs().max())
    return f"{'right' if error < 1e-6 else 'wrong'} ({num_permutations} permutations, error {error:.0e})"


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
    """Norms with weights and statistics of their own; fresh ones would hide errors."""
    model = model.double().eval().requires_grad_(False)
    for value in model.state_dict().values():
        if value.is_floating_point() and value.dim() < 2:
            value.uniform_(0.5, 1.5)
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
