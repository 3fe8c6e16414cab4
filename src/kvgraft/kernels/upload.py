"""Uploads to a device that do not block the host."""

import torch
from torch import Tensor

# alignment of each tensor in an upload, in bytes
ALIGNED = 16


def upload(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy CPU tensors to `device` in one transfer from pinned memory. Tensors on the device are
    returned unchanged.

    From pageable memory, CUDA may first wait for the work on the stream.
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
