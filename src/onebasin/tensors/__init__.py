"""States of models: dictionaries of tensors, in memory or lazy, compared, mixed and saved."""

from onebasin.tensors.distances import LayerDistance, find_layer_distances
from onebasin.tensors.states import LazyState, State, StateDict

__all__ = ["LayerDistance", "LazyState", "State", "StateDict", "find_layer_distances"]
