"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""

from onebasin import continual
from onebasin.alignment import Alignment, align
from onebasin.assignment import assign
from onebasin.calibration import repair, reset_batch_norm
from onebasin.connectivity import Path, Plane, linear_path, loss_plane
from onebasin.interpolation import interpolate
from onebasin.merging import merge
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
