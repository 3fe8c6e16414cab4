"""Copy with delta-RoPE ("align") near the speed of a bare copy.

Tokens go in chunks, so that what is gathered is still in cache when it is rotated and scattered.
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # of keys: 1 MiB in float32


def align_copy(
    keys: Tensor, values: Tensor | None, layers: range, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`."""
    num_heads, head_dim = keys.shape[2:]
    size = max(1, CHUNK_ELEMENTS // (num_heads * head_dim))
    for old, new, c, s in zip(*(tensor.split(size) for tensor in (source, target, cos, sin)), strict=True):
        still = bool((c == 1).all()) and not bool(s.any())
        c = c[:, None, None].expand(-1, num_heads, 2, -1).contiguous()  # [m, Hkv, 2, D/2]
        s = s[:, None].expand(-1, num_heads, -1).contiguous()  # [m, Hkv, D/2]
        for layer in layers:
            gathered = keys[layer].index_select(0, old)
            keys[layer].index_copy_(0, new, gathered if still else _rotate(gathered, c, s))
            if values is not None:
                values[layer].index_copy_(0, new, values[layer].index_select(0, old))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kv.rope.rotate` with tables laid out as x, so that the longest pass is one over contiguous memory."""
    halves = x.float().unflatten(-1, (2, -1))  # [m, Hkv, 2, D/2]
    turned = torch.mul(halves, cos)
    turned[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return turned.flatten(-2).to(x.dtype)
