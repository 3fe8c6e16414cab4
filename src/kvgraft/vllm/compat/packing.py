"""How vLLM's CPU backend packs keys and values into a block: values plainly, keys as its instruction set wants them."""

from functools import cache

import torch
from torch import Tensor
from vllm import _custom_ops as ops


def unpack(blocks: Tensor, head_dim: int, isa: str) -> tuple[Tensor, Tensor]:
    """Keys and values of whole blocks [b, H, N, 2 d] of a CPU cache, each [b, H, N, d]."""
    num, heads, size, _ = blocks.shape
    keys, values = blocks.view(num, heads, 2 * size, head_dim).chunk(2, dim=2)
    order = _key_order(size, head_dim, isa, blocks.dtype)
    if torch.equal(order, _transposed(size, head_dim)):
        return keys.reshape(num, heads, head_dim, size).transpose(2, 3), values
    return keys.reshape(num, heads, -1).index_select(2, order).view(keys.shape), values


@cache
def _key_order(size: int, head_dim: int, isa: str, dtype: torch.dtype) -> Tensor:
    """int64 [N * d]: where this instruction set keeps element (token, dim) of a block's keys.

    Found by writing numbered keys, in digits that even bfloat16 holds exactly.
    """
    numbers = torch.arange(size * head_dim).view(size, 1, head_dim)
    places = torch.zeros(size * head_dim, dtype=torch.int64)
    for digit in range(3):
        keys = (numbers // 128**digit % 128).to(dtype).contiguous()
        scratch = torch.zeros(1, 1, 2 * size, head_dim, dtype=dtype)
        packed, values = scratch.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, keys, packed, values, torch.arange(size), isa)
        places += packed.reshape(-1).long() * 128**digit
    return places.argsort()


@cache
def _transposed(size: int, head_dim: int) -> Tensor:
    """The order of keys that lie as [d, N]."""
    return torch.arange(size * head_dim).view(head_dim, size).t().flatten()
