"""Operators of torchvision that its Python code names when it is imported. Its build for PyTorch's
CPU build has none of them, and images are resized and normalised without.
"""

import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")

for _name in (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
    "deform_conv2d", "_deform_conv2d_backward",
):  # fmt: skip
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")
