"""Packed blocks of vLLM's CPU backend, whose layout depends on the instruction set."""

from functools import cache

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from kvgraft.vllm.compat.cache_dtype import as_codes

# Numbers below 8 are exact in every dtype of a cache.
_DIGITS, _BASE = 8, 8


def unpack(
    blocks: Tensor, head_dim: int, isa: str, dtype: torch.dtype, cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Return keys and values of whole blocks [b, H, N, 2 d] of a CPU cache, each [b, H, N, d].

    Args:
        isa: instruction set that the backend uses.
        dtype: dtype of the model.
        cache_dtype: vLLM's name of the cache dtype.
    """
    num, heads, size, _ = blocks.shape
    halves = blocks.view(num, heads, 2, size * head_dim).unbind(2)
    orders = _orders(size, head_dim, isa, dtype, cache_dtype)
    return tuple(_unpacked(*each, size, head_dim) for each in zip(halves, orders, strict=True))  # type: ignore[return-value]


def _unpacked(half: Tensor, order: Tensor, size: int, head_dim: int) -> Tensor:
    """Return [b, H, N * d] as [b, H, N, d], without a copy where only dimensions are permuted."""
    if torch.equal(order, _plain(size, head_dim)):
        return half.unflatten(2, (size, head_dim))
    if torch.equal(order, _transposed(size, head_dim)):
        return half.unflatten(2, (head_dim, size)).transpose(2, 3)
    return half.index_select(2, order).unflatten(2, (size, head_dim))


@cache
def _orders(
    size: int, head_dim: int, isa: str, dtype: torch.dtype, cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Return the places of elements (token, dim) in a packed block, int64 [N * d] twice.

    They are found by writing numbered keys and values, digit by digit.
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
    """Return the order of elements stored as [N, d]."""
    return torch.arange(size * head_dim)


@cache
def _transposed(size: int, head_dim: int) -> Tensor:
    """Return the order of elements stored as [d, N]."""
    return torch.arange(size * head_dim).view(head_dim, size).t().flatten()
