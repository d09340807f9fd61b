"""Learn the alignment of a port by what it is for: the result shall do what the fine-tune does.

The change between a base and its fine-tune is moved by scales and bases T, which are learned so that the new base with the
moved change gives the outputs of the fine-tune. Nothing but T is learned, so a low-rank change stays one. The inputs need no
labels, and a fine-tuned language model can write them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice, repeat
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

Distance = Callable[[Any, Any], Tensor]


def soft_cross_entropy(output: Any, wanted: Any) -> Tensor:
    """Between two sets of scores along their last axis, with the second as the distribution to match."""
    output, wanted = (getattr(each, "logits", each) for each in (output, wanted))
    size = output.shape[-1]
    return F.cross_entropy(output.reshape(-1, size), wanted.reshape(-1, size).softmax(-1))


@dataclass(frozen=True)
class Imitation:
    """How the scales and bases of a port are learned: by Adam, the step falling linearly to zero.

    Attributes:
        data: batches of inputs, read more than once, whose targets are not used if they have any; such as
            ``onebasin.synthetic_text([fine_tuned], ...)``.
        steps: of Adam, a batch each.
        lr: the first step.
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


def learn_to_imitate(
    start: Transform, tuned: nn.Module, base: State, new: nn.Module, options: Imitation, progress: Progress
) -> Transform:
    """The same permutation, with scales and bases that are learned.

    Args:
        start: where to begin.
        tuned: the fine-tune, in canonical form if there are bases.
        base: the same of its base.
        new: what the change is added to.
        options: how to learn.
        progress: called with how far it is.
    """
    dtype = torch.promote_types(read_state_dict(new).dtype, torch.float32)
    student, teacher = (copy_model(each).requires_grad_(False).to(dtype) for each in (new, tuned))
    state = read_state_dict(student)
    before = {key: value.to(dtype) if value.is_floating_point() else value for key, value in base.load().items()}
    net = RebasinNet(before, start.symmetry, init=start).to(state.device)
    learned = [*net.logarithms, *net.generators]
    if not learned:
        return start
    plans = {name: plan.to(state.device) for name, plan in plans_of(start.permutation, dtype).items()}
    ends = [read_state_dict(teacher), before]
    parameters = [key for key, _ in student.named_parameters()]  # the first of those that are tied
    optimizer = torch.optim.Adam(learned, lr=options.lr)
    batches = islice(chain.from_iterable(repeat(check_data(options.data))), options.steps)
    for number, batch in enumerate(batches):
        progress("imitation", number, options.steps)
        optimizer.param_groups[0]["lr"] = options.lr * (1 - number / options.steps)
        inputs, _ = split_batch(batch)
        with torch.no_grad():
            wanted = call_model(teacher, inputs)
        more, less = (net(end, plans) for end in ends)
        moved = {key: state[key] + more[key] - less[key] for key in parameters}
        optimizer.zero_grad()
        options.distance(call_model(student, inputs, moved), wanted).backward()
        optimizer.step()
    found = net.transform()
    return Transform(start.permutation, found.logarithms, found.matrices)
