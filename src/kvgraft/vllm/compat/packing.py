"""How vLLM's CPU backend packs keys and values into a block: as its instruction set wants them."""

from functools import cache

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from kvgraft.vllm.compat.cache_dtype import as_codes

_DIGITS, _BASE = 8, 8  # numbers below 8 are exact in every dtype of a cache


def unpack(
    blocks: Tensor, head_dim: int, isa: str, dtype: torch.dtype, cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of whole blocks [b, H, N, 2 d] of a CPU cache, each [b, H, N, d].

    Args:
        dtype: the model's.
    """
    num, heads, size, _ = blocks.shape
    halves = blocks.view(num, heads, 2, size * head_dim).unbind(2)
    orders = _orders(size, head_dim, isa, dtype, cache_dtype)
    return tuple(_unpacked(*each, size, head_dim) for each in zip(halves, orders, strict=True))  # type: ignore[return-value]


def _unpacked(half: Tensor, order: Tensor, size: int, head_dim: int) -> Tensor:
    """[b, H, N * d] -> [b, H, N, d], in place where only dimensions are in another order."""
    if torch.equal(order, _plain(size, head_dim)):
        return half.unflatten(2, (size, head_dim))
    if torch.equal(order, _transposed(size, head_dim)):
        return half.unflatten(2, (head_dim, size)).transpose(2, 3)
    return half.index_select(2, order).unflatten(2, (size, head_dim))


@cache
def _orders(
    size: int, head_dim: int, isa: str, dtype: torch.dtype, cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Of keys and of values, int64 [N * d]: where this instruction set keeps element (token, dim)
    of a block.

    Found by writing numbered keys and values, digit by digit.
    """
    numbers = torch.arange(size * head_dim).view(size, 1, head_dim)
    stored = torch.uint8 if cache_dtype.startswith("fp8") else dtype
    places = torch.zeros(2, size * head_dim, dtype=torch.int64)
    for digit in range(_DIGITS):
        written = (numbers // _BASE**digit % _BASE).to(dtype).contiguous()
        scratch = torch.zeros(1, 1, 2 * size, head_dim, dtype=stored)
        packed = scratch.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            written, written, *packed, torch.arange(size), isa, kv_cache_dtype=cache_dtype
        )
        places += as_codes(scratch, cache_dtype).float().long().view(2, -1) * _BASE**digit
    keys, values = places.argsort(dim=1)
    return keys, values


@cache
def _plain(size: int, head_dim: int) -> Tensor:
    """The order of what lies as [N, d]."""
    return torch.arange(size * head_dim)


@cache
def _transposed(size: int, head_dim: int) -> Tensor:
    """The order of what lies as [d, N]."""
    return torch.arange(size * head_dim).view(head_dim, size).t().flatten()
