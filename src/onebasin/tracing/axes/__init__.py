"""Axes whose structure is not known yet: terms, unification, scopes."""
