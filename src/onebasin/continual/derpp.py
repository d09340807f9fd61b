"""DER++: replay that also keeps what the network once answered."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Feed, Samples, as_input
from onebasin.continual.strategy import Loss, Strategy, Training


class DERPlusPlus(Strategy):
    """Dark experience replay (Buzzega et al. 2020, arXiv 2004.07211), its eq. 6.

    C(theta; B_i) + alpha mean |z' - h(x')|^2 + beta C(theta; x'', y''), where z' is what the network answered when its
    task was done, and x' and x'' are two batches of the memory. The authors fill a reservoir while they train; here the
    memory is that of all strategies, filled after each task.

    Args:
        model: where to start.
        loss: ``loss(output, target)``.
        alpha: weight of the kept answers.
        beta: weight of the labels.
        training: see `Training`.
    """

    replays = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        alpha: float = 0.5,
        beta: float = 0.5,
        **training: Unpack[Training],
    ):
        super().__init__(model, loss, **training)
        self.alpha, self.beta = alpha, beta
        self._answers: Tensor | None = None  # in the order of the memory
        self._second: Feed | None = None

    def open_feeds(self, samples: Samples, num_steps: int) -> None:
        """One feed of the memory with kept answers for targets, one with labels."""
        super().open_feeds(samples, num_steps)
        self._second = None
        if self.replay is not None and self._answers is not None:
            memory = self.memory.samples
            self._second = self.open_memory(Samples(memory.inputs, self._answers, memory.heads), num_steps)

    def cost(self) -> Tensor:
        """The three terms, from one pass of the network."""
        batch = self.feed.draw()
        if self.replay is None or self._second is None:
            return self.loss(self.answer(batch), batch.targets)
        old, kept = self.replay.draw(), self._second.draw()
        output = self.model(as_input(torch.cat([batch.inputs, old.inputs, kept.inputs])))
        now, replayed, recalled = output.split([len(batch), len(old), len(kept)])
        return (
            self.loss(self.restrict(now, batch.heads), batch.targets)
            + self.beta * self.loss(self.restrict(replayed, old.heads), old.targets)
            + self.alpha * self.members * functional.mse_loss(recalled, kept.targets)
        )

    def keep(self, samples: Samples) -> None:
        """Add the task to the memory, with what the network answers now."""
        kept = self.memory.add(samples, self.generator)
        if kept is not None:
            with torch.no_grad():
                answers = self.model(as_input(kept.inputs))
            self._answers = answers if self._answers is None else torch.cat([self._answers, answers])

    def state_dict(self) -> dict[str, Any]:
        """With the kept answers."""
        return {**super().state_dict(), "answers": self._answers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        super().load_state_dict(state)
        self._answers = None if state["answers"] is None else state["answers"].to(self.device)
