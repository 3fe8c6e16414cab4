"""Uploads that a host does not wait for."""

import torch
from torch import Tensor

ALIGNED = 16  # bytes, at which each tensor of an upload begins


def upload(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy CPU tensors to `device` in one transfer from pinned memory; what is there already is
    returned as it is.

    From pageable memory, CUDA may first wait for what runs on the stream.
    """
    if device.type != "cuda" or not any(tensor.is_cpu for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    parts = packed.pin_memory().to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
