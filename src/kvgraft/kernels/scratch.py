"""Scratch memory that calls overwrite in turn, because allocating it costs more than filling it."""

import math
from threading import local

import torch
from torch import Tensor

# bytes that a call should process at a time: small enough for the CPU cache, large enough for a
# call
PIECE = 4 << 20
_known = local()


def room(use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for one use in this thread, valid until the next call for the same use.

    The memory of the largest request is kept.
    """
    rooms: dict[tuple[str, torch.dtype, torch.device], Tensor] = vars(_known).setdefault(
        "rooms", {}
    )
    size, key = math.prod(shape), (use, dtype, device)
    if key not in rooms or rooms[key].numel() < size:
        # tensors made in inference mode cannot be written outside of it
        with torch.inference_mode(False):
            rooms[key] = torch.empty(size, dtype=dtype, device=device)
    return rooms[key][:size].view(shape)


def take(use: str, source: Tensor, rows: Tensor) -> Tensor:
    """Return source[rows] for rows int64 [n], in the scratch memory of this use."""
    place = room(use, (rows.numel(), *source.shape[1:]), source.dtype, source.device)
    return torch.index_select(source, 0, rows, out=place)
