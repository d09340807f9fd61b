"""Triton kernels of the Sinkhorn operator and of assignments.

Importing them needs Triton, so `operator.launch` does it inside functions.
"""
