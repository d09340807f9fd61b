"""Symmetry and Permutation as values."""

from onebasin.symmetries.structure import Group, Pin, Site
from onebasin.symmetries.symmetry import Permutation, Symmetry

__all__ = ["Group", "Permutation", "Pin", "Site", "Symmetry"]
