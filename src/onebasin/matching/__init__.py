"""Finding the permutation that brings one network to another, and merging networks."""

from onebasin.matching.methods import METHODS, ActivationMatching, Method, Sinkhorn, StraightThrough, WeightMatching

__all__ = ["METHODS", "ActivationMatching", "Method", "Sinkhorn", "StraightThrough", "WeightMatching"]
