"""A layer's cache of vLLM as a pool of rows, for kernels that copy and change keys and values where they lie.

Where a block holds the key and the value of a token side by side, a cache is rows of d numbers: a key, the value behind
it, the next key. Each KV head then has a list of rows of its own.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads


@dataclass(frozen=True)
class PoolLayout:
    """How a cache [blocks, Hkv, N, 2 d] lies in memory.

    Attributes:
        strides: rows of d numbers from one block, KV head and token to the next.
        num_heads: Hkv; block_size: N.
    """

    strides: tuple[int, int, int]
    num_heads: int
    block_size: int

    @classmethod
    def of(cls, cache: Tensor) -> "PoolLayout | None":
        """None if keys and values are no rows."""
        _, heads, size, width = cache.shape
        if cache.stride(-1) != 1 or width % 2 or any(stride % (width // 2) for stride in cache.stride()[:3]):
            return None
        block, head, token = (stride // (width // 2) for stride in cache.stride()[:3])
        return cls((block, head, token), heads, size)

    @cached_property
    def heads(self) -> LayerHeads:
        """One stream of rows, and a list for each KV head."""
        return LayerHeads((0,) * self.num_heads, tuple(range(self.num_heads)), (False,) * self.num_heads)

    def rows(self, slots: Tensor) -> Tensor:
        """Of slots int64 [n], below 0 for none: where each KV head has its key, int64 [Hkv, n], -1 for none."""
        block, head, token = self.strides
        first = slots // self.block_size * block + slots % self.block_size * token
        rows = first + head * torch.arange(self.num_heads)[:, None]
        return rows.masked_fill(slots < 0, -1)

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and rows of values, [1, rows, d] each: views of the cache."""
        dim = cache.shape[-1] // 2
        extent = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
        shape, first = (1, extent // dim - 1, dim), cache.storage_offset()
        keys, values = (cache.as_strided(shape, (extent, dim, 1), first + at) for at in (0, dim))
        return keys, values
