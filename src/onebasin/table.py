"""A symmetry as a table that a person can read."""
def describe(s): return "\n".join(f"{k}: {s.layouts[k]}" for k in s.layouts)
