"""Symmetry and Permutation as values."""

from onebasin.symmetries.structure import (
    NEVER_MET,
    NEVER_READ,
    Basis,
    Group,
    Pin,
    Place,
    Power,
    Scale,
    Site,
    UnreachedWarning,
)
from onebasin.symmetries.symmetry import Permutation, Symmetry
from onebasin.symmetries.transform import GroupElement, Transform

__all__ = [
    "NEVER_MET",
    "NEVER_READ",
    "Basis",
    "Group",
    "GroupElement",
    "Permutation",
    "Pin",
    "Place",
    "Power",
    "Scale",
    "Site",
    "Symmetry",
    "Transform",
    "UnreachedWarning",
]
