"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""

from onebasin import continual
from onebasin.landscape.paths import Path, Plane, linear_path, loss_plane
from onebasin.landscape.repair import repair, reset_batch_norm
from onebasin.matching.alignment import Alignment, align
from onebasin.matching.merging import merge
from onebasin.operator import sinkhorn
from onebasin.relaxation.assignment import assign
from onebasin.relaxation.network import RebasinNet
from onebasin.relaxation.objectives import Midpoint, RandomPoint, WeightDistance
from onebasin.symmetries.permutation import Permutation
from onebasin.symmetries.structure import Group, Symmetry
from onebasin.tensors.interpolation import interpolate
from onebasin.tracing import symmetry

__all__ = [
    "Alignment",
    "Group",
    "Midpoint",
    "Path",
    "Permutation",
    "Plane",
    "RandomPoint",
    "RebasinNet",
    "Symmetry",
    "WeightDistance",
    "align",
    "assign",
    "continual",
    "interpolate",
    "linear_path",
    "loss_plane",
    "merge",
    "repair",
    "reset_batch_norm",
    "sinkhorn",
    "symmetry",
]
