"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""

from onebasin import startup  # noqa: F401 - the first import, as it prepares the process of the command for all others

# isort: split
from importlib import metadata

from onebasin import continual
from onebasin.landscape.batch_norm import reset_batch_norm
from onebasin.landscape.calibration import repair
from onebasin.landscape.evaluation import mean_loss
from onebasin.landscape.paths import LinearPath, Plane, linear_path, loss_plane
from onebasin.lineage import Provenance, provenance
from onebasin.matching.alignment import Alignment, align
from onebasin.matching.canonical_form import CanonicalForm, canonical
from onebasin.matching.imitation import Imitation
from onebasin.matching.merging import merge
from onebasin.matching.methods import ActivationMatching, Exchange, Sinkhorn, StraightThrough, WeightMatching
from onebasin.matching.porting import Ported, port
from onebasin.matching.scaling import Scaling
from onebasin.matching.scored_data import mean_scores
from onebasin.matching.synthetic_data import synthetic_data
from onebasin.matching.synthetic_images import synthetic_images
from onebasin.matching.synthetic_text import synthetic_text
from onebasin.matching.widening import widen
from onebasin.operator import sinkhorn
from onebasin.relaxation.assignment import AssignmentInfo, assign
from onebasin.relaxation.objectives import Midpoint, Objective, RandomPoint, WeightDistance
from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Basis, Group, Permutation, Scale, Symmetry, Transform, UnreachedWarning
from onebasin.tensors.interpolation import interpolate
from onebasin.tracing import symmetry

try:
    __version__ = metadata.version("onebasin")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "unknown"


__all__ = [
    "ActivationMatching",
    "Alignment",
    "AssignmentInfo",
    "Basis",
    "CanonicalForm",
    "Exchange",
    "Group",
    "Imitation",
    "LinearPath",
    "Midpoint",
    "Objective",
    "Permutation",
    "Plane",
    "Ported",
    "Provenance",
    "RandomPoint",
    "RebasinNet",
    "Scale",
    "Scaling",
    "Sinkhorn",
    "StraightThrough",
    "Symmetry",
    "Transform",
    "UnreachedWarning",
    "WeightDistance",
    "WeightMatching",
    "align",
    "assign",
    "canonical",
    "continual",
    "interpolate",
    "linear_path",
    "loss_plane",
    "mean_loss",
    "mean_scores",
    "merge",
    "port",
    "provenance",
    "repair",
    "reset_batch_norm",
    "sinkhorn",
    "symmetry",
    "synthetic_data",
    "synthetic_images",
    "synthetic_text",
    "widen",
]
