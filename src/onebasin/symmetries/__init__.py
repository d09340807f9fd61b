"""Symmetry and Permutation as values."""
