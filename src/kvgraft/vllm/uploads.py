"""Copies to vLLM's device that neither the host nor the device waits for."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


def upload(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Copy CPU tensors of any shapes and dtypes to the device: to a GPU in one upload, from pinned memory."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        _as(part, tensor).copy_(tensor)
    moved = packed.to(device, non_blocking=True)
    return [_as(part, tensor) for part, tensor in zip(moved.split(sizes), tensors, strict=True)]


def _as(part: Tensor, tensor: Tensor) -> Tensor:
    """The first of some bytes, as a tensor of this shape and dtype."""
    return part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
