"""From a loss and batches of data to what `linear_path` evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import call_model, check_data, move_to, split_batch

LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}


def mean_loss(loss: Callable[[Any, Any], Tensor], data: Iterable[Any]) -> Callable[[nn.Module], dict[str, float]]:
    """Make an ``evaluate`` for `linear_path` and `loss_plane`: a function from a model to its mean loss on the data.

    If outputs are scores of classes and targets their numbers, the function returns the accuracy as well.

    Args:
        loss: of outputs and target, a mean over the batch, such as ``nn.functional.cross_entropy``.
        data: batches (inputs, target) that can be read more than once; each counts by its size.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> evaluate = ob.mean_loss(nn.functional.cross_entropy, [(torch.eye(2), torch.tensor([0, 1]))])
    >>> sorted(evaluate(nn.Identity()).items())
    [('accuracy', 1.0), ('loss', 0.313...)]
    """
    data = check_data(data)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        total, correct, count = 0.0, 0.0, 0
        classes = True
        for batch in data:
            inputs, target = split_batch(batch)
            output, target = call_model(model, inputs), move_to(model, target)
            size = len(target)
            total += float(loss(output, target)) * size
            count += size
            classes = classes and _is_classification(output, target)
            if classes:
                correct += float((output.argmax(1) == target).sum())
        if not count:
            raise ValueError("the data has no batches")
        return {"loss": total / count, **({"accuracy": correct / count} if classes else {})}

    return evaluate


def _is_classification(output: Any, target: Any) -> bool:
    shapes = isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() == 2 and target.dim() == 1
    return shapes and target.dtype == torch.int64
