"""Soft permutations: plans, the re-basin network, its objectives, and back to hard permutations."""
