"""Triton kernels of the Sinkhorn operator. Importing them needs Triton, so `operator.launch` does it inside functions."""
