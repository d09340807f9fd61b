"""For all tests: one thread, and torchvision on CPU torch."""

import torch

torch.set_num_threads(1)  # networks this small gain nothing from threads, and lose much where the cores are shared

# torchvision's wheel on the registry is built for CUDA: on CPU torch two of its operators must be declared first.

if not torch.cuda.is_available():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
