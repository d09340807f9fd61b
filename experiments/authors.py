"""The authors' own package (PyPI ``sinkhorn-rebasin`` 0.0.2, imported as ``rebasin``), driven as its examples drive it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.cli.torchvision_operators import declare_missing_operators

State = dict[str, Tensor]


def require_authors() -> Any:
    """The package, or a message that says how to get it."""
    declare_missing_operators()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import rebasin
            import rebasin.loss
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "the authors' rows need their package: pip install --no-deps sinkhorn-rebasin==0.0.2 torchviz graphviz "
            f"(and a torchvision that fits torch): {error}"
        ) from error
    if not hasattr(rebasin, "RebasinNet"):
        raise ImportError("'rebasin' here is another package of that name: install sinkhorn-rebasin==0.0.2 --no-deps")
    return rebasin


def align_authors(
    model: nn.Module,
    to: nn.Module,
    num_inputs: int,
    kind: str,
    judge: Callable[[State], float],
    batches: Sequence[tuple[Tensor, Tensor]] = (),
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    lr: float = 0.1,
    max_epochs: int = 100,
    patience: int = 10,
    identity: bool = False,
    device: str = "cpu",
) -> tuple[State, int]:
    """Permute a model by their network and one of their costs; the best hard permutation seen is kept.

    Theirs keeps the last one; keeping the best is in their favour. An epoch is a pass over the batches, or one step without
    data; `judge` gives the cost of a hard model after each.

    Args:
        model: to permute.
        to: to align it to.
        num_inputs: of the network, for their tracing.
        kind: "L2", "Mid" or "Rnd".
        judge: from a state to its cost.
        batches: the data for "Mid" and "Rnd".
        loss: of the network.
        lr: of Adam (AdamW with data), as in their scripts.
        max_epochs: the most to take.
        patience: epochs without a better hard model before it stops.
        identity: start from the identity, as their alignment scripts do; else with noise of 0.1, as their LMC scripts do.
        device: where to compute.

    Returns:
        The permuted state, and how many epochs were taken.
    """
    rebasin = require_authors()
    with contextlib.redirect_stdout(io.StringIO()):
        net = rebasin.RebasinNet(copy.deepcopy(model).cpu(), input_shape=(1, num_inputs))
    if identity:
        net.identity_init()
    net.to(device)
    net.reparamnet.to(device)
    target = copy.deepcopy(to).to(device)
    if kind == "L2":
        criterion = rebasin.loss.DistL2Loss(target)
    else:
        criterion = {"Mid": rebasin.loss.MidLoss, "Rnd": rebasin.loss.RndLoss}[kind](target, criterion=loss)
    optimizer = (torch.optim.Adam if kind == "L2" else torch.optim.AdamW)(net.p.parameters(), lr=lr)
    best, best_cost, last_gain, epoch = _hard_state(net), float("inf"), 0, 0
    for epoch in range(1, max_epochs + 1):
        net.train()
        for batch in [()] if kind == "L2" else batches:
            value = criterion(net(), *batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        state = _hard_state(net)
        cost = judge(state)
        if cost < best_cost:
            best, best_cost, last_gain = state, cost, epoch
        if best_cost == 0 or epoch - last_gain >= patience:
            break
    return best, epoch


def _hard_state(net: Any) -> State:
    net.eval()
    with torch.no_grad():
        return {key: value.detach().clone() for key, value in net().state_dict().items()}
