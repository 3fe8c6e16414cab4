"""Copy with delta-RoPE ("align") fused in one Triton kernel for keys and values (SparseX, sections
3.1 and 4.5)."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


def align_copy(
    keys: Tensor,
    values: Tensor | None,
    layers: range,
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`. The last dimension of every tensor must be
    contiguous.
    """
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


@triton.jit(do_not_specialize=["first_layer", "layer_step"])
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
    """One program: moves one token of one layer with all heads, in tiles of [heads, half]. `key_*`
    and `value_*` are strides.
    """
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
        tl.store(
            value + new * value_slot, tl.load(value + old * value_slot, mask=inside), mask=inside
        )
        tl.store(
            value + new * value_slot + half,
            tl.load(value + old * value_slot + half, mask=inside),
            mask=inside,
        )


def align_paged(
    caches: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: int,
    interleaved: bool,
) -> None:
    """See `kvgraft.kernels.dispatch.align_paged`. One launch."""
    cache = caches[0]
    _, num_heads, size, width = cache.shape
    is_code = cache.element_size() == 1
    _align_paged[source.numel(), len(caches)](
        cache,
        _distances(tuple(other.data_ptr() for other in caches), cache.element_size(), cache.device),
        source,
        target,
        cos,
        sin,
        *cache.stride()[:3],
        num_heads,
        width,
        first,
        cos.shape[-1],
        torch.finfo(cache.dtype).max,
        SIZE=size,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_WIDTH=triton.next_power_of_2(width),
        INTERLEAVED=interleaved,
        CLAMPS=is_code,
    )


@lru_cache(maxsize=64)
def _distances(addresses: tuple[int, ...], element_size: int, device: torch.device) -> Tensor:
    """Return the distance of each layer from the first one in elements, int64 [L] on the device."""
    return torch.tensor(
        [(address - addresses[0]) // element_size for address in addresses], device=device
    )


@triton.jit
def _align_paged(  # type: ignore[no-untyped-def]
    cache,
    distances,
    source,
    target,
    cos,
    sin,
    page_stride,
    head_stride,
    token_stride,
    num_heads,
    width,
    first,
    half,
    limit,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPS: tl.constexpr,
):
    """One program: moves one token of one layer with all heads, in a tile of [heads, width]."""
    token = tl.program_id(0).to(tl.int64)
    layer = cache + tl.load(distances + tl.program_id(1))
    old = tl.load(source + token)
    new = tl.load(target + token)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (head < num_heads) & (channel < width)
    turning = (channel >= first) & (channel < first + 2 * half)
    at = channel - first
    if INTERLEAVED:
        pair = at // 2
        is_second = at % 2 == 1
        partner = tl.where(is_second, channel - 1, channel + 1)
    else:
        is_second = at >= half
        pair = tl.where(is_second, at - half, at)
        partner = tl.where(is_second, channel - half, channel + half)
    c = tl.load(cos + token * half + pair, mask=turning, other=1.0)
    s = tl.load(sin + token * half + pair, mask=turning, other=0.0)

    row = layer + (old // SIZE) * page_stride + (old % SIZE) * token_stride + head * head_stride
    moved = tl.load(row + channel, mask=inside, other=0.0)
    other = tl.load(row + partner, mask=inside & turning, other=0.0).to(tl.float32)
    turned = moved.to(tl.float32) * c + tl.where(is_second, other, -other) * s
    if CLAMPS:
        turned = tl.clamp(turned, -limit, limit)
    row = layer + (new // SIZE) * page_stride + (new % SIZE) * token_stride + head * head_stride
    tl.store(row + channel, tl.where(turning, turned.to(moved.dtype), moved), mask=inside)
