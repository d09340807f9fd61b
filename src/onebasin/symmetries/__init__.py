"""Symmetry and Permutation as values."""

from onebasin.symmetries.structure import NEVER_MET, NEVER_READ, Group, Pin, Site, UnreachedWarning
from onebasin.symmetries.symmetry import Permutation, Symmetry

__all__ = ["NEVER_MET", "NEVER_READ", "Group", "Permutation", "Pin", "Site", "Symmetry", "UnreachedWarning"]
