"""Second readings of programs that were walked: what else than permutations leaves the function alone.

A *slot* is a free atom in an axis of a value, with what a reading knows of the value along it: the degree of a scale, or the
change of basis that it takes part in. A reading follows slots through operations that multiply, add and rearrange, whose
rules are here, and forbids everything else.
"""
