"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""

from onebasin.alignment import Alignment, align
from onebasin.assignment import assign
from onebasin.network import RebasinNet
from onebasin.objectives import Midpoint, RandomPoint, WeightDistance
from onebasin.operator import sinkhorn
from onebasin.permutation import Permutation
from onebasin.structure import Group, Symmetry
from onebasin.tracing import symmetry

__all__ = [
    "Alignment",
    "Group",
    "Midpoint",
    "Permutation",
    "RandomPoint",
    "RebasinNet",
    "Symmetry",
    "WeightDistance",
    "align",
    "assign",
    "sinkhorn",
    "symmetry",
]
