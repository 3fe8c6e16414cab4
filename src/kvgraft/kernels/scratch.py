"""Scratch memory that calls overwrite in turn: to have it anew would cost more than to fill it."""

import math
from threading import local

import torch
from torch import Tensor

PIECE = 4 << 20  # bytes that a call should take at a time: what fits a cache, and is worth a call
_known = local()


def room(use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor for one use in this thread, until the next call for the same use; keeps the largest
    that it was."""
    rooms: dict[tuple[str, torch.dtype, torch.device], Tensor] = vars(_known).setdefault(
        "rooms", {}
    )
    size, key = math.prod(shape), (use, dtype, device)
    if key not in rooms or rooms[key].numel() < size:
        with torch.inference_mode(False):  # or nobody could write to it outside
            rooms[key] = torch.empty(size, dtype=dtype, device=device)
    return rooms[key][:size].view(shape)


def take(use: str, source: Tensor, rows: Tensor) -> Tensor:
    """source[rows] for rows int64 [n], in the room of this use."""
    place = room(use, (rows.numel(), *source.shape[1:]), source.dtype, source.device)
    return torch.index_select(source, 0, rows, out=place)
