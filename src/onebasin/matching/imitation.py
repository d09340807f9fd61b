"""Learn the alignment of a port by what it is for: the result shall do what the fine-tune does.

The change between a base and its fine-tune is moved by scales and bases T, which are learned so that the new base with the
moved change gives the outputs of the fine-tune. Nothing but T is learned, so a low-rank change stays one. The inputs need no
labels, and a fine-tuned language model can write them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onebasin.landscape.batches import call_model, check_data, copy_model, split_batch
from onebasin.matching.methods.base import check_count, check_number
from onebasin.relaxation.plans import plans_of
from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Transform
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import State, read_state_dict
from onebasin.torch_internals import tree_map

Distance = Callable[[Any, Any], Tensor]


def soft_cross_entropy(output: Any, wanted: Any) -> Tensor:
    """Between two sets of scores along their last axis, with the second as the distribution to match."""
    output, wanted = (getattr(each, "logits", each) for each in (output, wanted))
    size = output.shape[-1] if isinstance(output, Tensor) and output.dim() else 0
    if size < 2:
        raise ValueError("the outputs are no scores of several classes: give distance=, a function of two outputs")
    return F.cross_entropy(output.reshape(-1, size), wanted.reshape(-1, size).softmax(-1))


@dataclass(frozen=True)
class Imitation:
    """How the scales and bases of a port are learned: by Adam, its rate falling linearly to zero.

    Attributes:
        data: batches of inputs, read more than once, whose targets are not used if they have any; such as
            ``onebasin.synthetic_text([fine_tuned], ...)``.
        steps: of Adam, with one batch each.
        lr: the first learning rate.
        distance: of the outputs on a batch, ``(output, output of the fine-tune) -> scalar``; by default the cross-entropy of
            scores.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> old, new, tuned = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3))
    >>> imitation = ob.Imitation([torch.randn(32, 4) for _ in range(4)], steps=5)
    >>> found = ob.port(tuned, base=old, to=new, example_inputs=torch.zeros(1, 4), kinds="positive", imitation=imitation)
    >>> list(found.alignment.scales)
    ['0.weight']
    """

    data: Iterable[Any]
    steps: int = 200
    lr: float = 0.003
    distance: Distance = soft_cross_entropy

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_number("lr", self.lr, above=0)
        check_data(self.data)
        if not callable(self.distance):
            raise TypeError(f"distance must be a function of two outputs, got {self.distance!r}")

    def check(self, tuned: nn.Module, new: nn.Module) -> None:
        """Refuse data that the networks do not take, and distances that are no finite scalars.

        Raises:
            ValueError: with the reason.
        """
        student, teacher, dtype = _prepare(new, tuned)
        inputs = _read_inputs(next(iter(check_data(self.data))), dtype)
        try:
            with torch.no_grad():
                distance = self.distance(call_model(student, inputs), call_model(teacher, inputs))
        except (RuntimeError, TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"the networks cannot be compared on the data of the imitation: {error}") from error
        if not isinstance(distance, Tensor) or distance.numel() != 1 or not bool(distance.isfinite()):
            raise ValueError(f"the distance of two outputs must be a finite scalar tensor, got {distance!r}")


def learn_to_imitate(
    start: Transform,
    tuned: nn.Module,
    base: State,
    new: nn.Module,
    options: Imitation,
    progress: Progress,
    scale: float = 1.0,
) -> Transform:
    """The same permutation, with scales and bases that are learned.

    Args:
        start: where to begin.
        tuned: the fine-tune, in canonical form if there are bases.
        base: the same of its base.
        new: what the change is added to.
        options: how to learn.
        progress: called with how far it is.
        scale: what the change is multiplied by.
    """
    student, teacher, dtype = _prepare(new, tuned)
    state = read_state_dict(student)
    device = state.device
    before = {key: value.to(dtype) if value.is_floating_point() else value for key, value in base.load().items()}
    net = RebasinNet(before, start.symmetry, init=start).to(device)
    learned = [*net.logarithms, *net.generators]
    if not learned:
        return start
    plans = {name: plan.to(device) for name, plan in plans_of(start.permutation, dtype).items()}
    ends = [read_state_dict(teacher), before]
    parameters = [key for key, _ in student.named_parameters()]  # the first of those that are tied
    optimizer = torch.optim.Adam(learned, lr=options.lr)
    for number, batch in enumerate(islice(_repeat(options.data), options.steps)):
        progress("imitation", number, options.steps)
        optimizer.param_groups[0]["lr"] = options.lr * (1 - number / options.steps)
        inputs = _read_inputs(batch, dtype)
        with torch.no_grad():
            wanted = call_model(teacher, inputs)
        with torch.enable_grad():
            more, less = (net(end, plans) for end in ends)
            moved = {key: state[key] + scale * (more[key] - less[key]) for key in parameters}
            distance = options.distance(call_model(student, inputs, moved), wanted)
            optimizer.zero_grad()
            distance.backward()
        if not bool(distance.isfinite()):
            raise ValueError(f"the distance was {float(distance)} in step {number} of the imitation: take a smaller lr")
        optimizer.step()
    progress("imitation", options.steps, options.steps)
    found = net.transform()
    return Transform(start.permutation, found.logarithms, found.matrices)


def _prepare(new: nn.Module, tuned: nn.Module) -> tuple[nn.Module, nn.Module, torch.dtype]:
    """Copies of both on the device of the first, in eval mode and at least in single precision, and that type."""
    state = read_state_dict(new)
    dtype = torch.promote_types(state.dtype, torch.float32)
    student, teacher = (copy_model(each).requires_grad_(False).to(state.device, dtype) for each in (new, tuned))
    return student, teacher, dtype


def _read_inputs(batch: Any, dtype: torch.dtype) -> Any:
    """The inputs of a batch, floating ones in the type to compute in."""
    inputs, _ = split_batch(batch)
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def _repeat(data: Iterable[Any]) -> Iterator[Any]:
    batches = check_data(data)
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError("the data of the imitation could be read once only: give a list, or a loader that begins again")
