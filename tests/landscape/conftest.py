"""Kernels that every machine has."""

import pytest
import torch


@pytest.fixture
def plain_kernels():
    """oneDNN's narrow kernels need instructions that not every machine has."""
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        yield
