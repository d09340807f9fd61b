"""Pictures of paths, planes, permutations and descents, from plain numbers. Needs matplotlib: ``onebasin[plots]``."""

from onebasin.plots.curves import history_series, plot_accuracies, plot_history, plot_path, plot_paths
from onebasin.plots.matrices import plot_permutation, plot_plane

__all__ = [
    "history_series",
    "plot_accuracies",
    "plot_history",
    "plot_path",
    "plot_paths",
    "plot_permutation",
    "plot_plane",
]
