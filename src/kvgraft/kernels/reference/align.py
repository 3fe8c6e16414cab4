"""Reference of copy with delta-RoPE ("align") in plain torch, against which other implementations
are tested.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.kv.rope import rotate, rotate_part


def align_copy(
    keys: Tensor,
    values: Tensor | None,
    layers: range,
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`."""
    for layer in layers:
        keys[layer, target] = rotate(keys[layer, source], cos, sin)
        if values is not None:
            values[layer, target] = values[layer, source]


def align_paged(
    caches: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: int,
    interleaved: bool,
) -> None:
    """See `kvgraft.kernels.dispatch.align_paged`."""
    for cache in caches:
        is_code = cache.element_size() == 1  # torch indexes 8-bit floats only as bytes
        rows = (cache.view(torch.uint8) if is_code else cache).transpose(1, 2)  # [pages, b, Hkv, W]
        old, new = ((slots // cache.shape[2], slots % cache.shape[2]) for slots in (source, target))
        moved = rows[old].view(cache.dtype)
        turned = rotate_part(moved.float(), cos, sin, first, interleaved)
        if is_code:
            limit = torch.finfo(cache.dtype).max
            turned = turned.clamp(-limit, limit)
        rows[new] = turned.to(cache.dtype).view(rows.dtype)
