"""Copy with delta-RoPE ("align") fused in one Triton kernel for keys and values (SparseX, sections 3.1 and 4.5)."""

import triton
import triton.language as tl
from torch import Tensor


def align_copy(
    keys: Tensor, values: Tensor | None, layers: range, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`; the last dimension of every tensor must be contiguous."""
    num_heads, head_dim = keys.shape[2:]
    _align_copy[source.numel(), len(layers)](
        keys,
        values,
        source,
        target,
        cos,
        sin,
        layers.start,
        layers.step,
        *keys.stride()[:3],
        *(keys if values is None else values).stride()[:3],
        num_heads,
        head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HAS_VALUES=values is not None,
    )


@triton.jit
def _align_copy(  # type: ignore[no-untyped-def]
    keys,
    values,
    source,
    target,
    cos,
    sin,
    first_layer,
    layer_step,
    key_layer,
    key_slot,
    key_head,
    value_layer,
    value_slot,
    value_head,
    num_heads,
    half,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    """One program moves one token of one layer, all heads: tiles of [heads, half]. `key_*`, `value_*` are strides."""
    token = tl.program_id(0).to(tl.int64)
    layer = first_layer + tl.program_id(1).to(tl.int64) * layer_step
    old = tl.load(source + token)
    new = tl.load(target + token)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < num_heads) & (dim < half)
    c = tl.load(cos + token * half + dim, mask=dim < half)
    s = tl.load(sin + token * half + dim, mask=dim < half)

    key = keys + layer * key_layer + head * key_head + dim
    first = tl.load(key + old * key_slot, mask=inside).to(tl.float32)
    second = tl.load(key + old * key_slot + half, mask=inside).to(tl.float32)
    tl.store(key + new * key_slot, first * c - second * s, mask=inside)
    tl.store(key + new * key_slot + half, second * c + first * s, mask=inside)

    if HAS_VALUES:
        value = values + layer * value_layer + head * value_head + dim
        tl.store(value + new * value_slot, tl.load(value + old * value_slot, mask=inside), mask=inside)
        tl.store(value + new * value_slot + half, tl.load(value + old * value_slot + half, mask=inside), mask=inside)
