"""torchvision's wheel on the registry is built for CUDA: on CPU torch two of its operators must be declared first."""

import torch

if not torch.cuda.is_available():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
