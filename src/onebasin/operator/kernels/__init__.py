"""Triton kernels of the Sinkhorn operator; imported on CUDA devices alone."""
