"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""

from onebasin.permutation import Permutation
from onebasin.structure import Group, Symmetry
from onebasin.tracing import symmetry

__all__ = ["Group", "Permutation", "Symmetry", "symmetry"]
