"""Finetuning: each task alone, from where the last one ended. The lower bound."""

from onebasin.continual.strategies.base import Strategy


class Finetune(Strategy):
    """Minimise the loss on the task at hand, C(theta; T_i). Nothing is done about forgetting."""
