"""For all tests: one thread, and torchvision on CPU torch."""

import torch

from onebasin.cli.torchvision_operators import declare_missing_operators

torch.set_num_threads(1)  # networks this small gain nothing from threads, and lose much where the cores are shared
declare_missing_operators()
