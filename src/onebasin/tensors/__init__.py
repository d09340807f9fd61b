"""States of models: dictionaries of tensors, in memory or lazy, compared, mixed and saved."""

from onebasin.tensors.states import LazyState, State, StateDict

__all__ = ["LazyState", "State", "StateDict"]
