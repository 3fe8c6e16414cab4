"""A layer's cache of vLLM as a pool of rows, for kernels that use keys and values where they lie.

Where a block holds the key and the value of a token side by side, a cache is rows of d numbers: a
key, the value behind it, the next key. The stream of a KV head begins at its first key, so a token
has the same row in all streams, which overlap."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads


@dataclass(frozen=True)
class PoolLayout:
    """How a cache [blocks, Hkv, N, 2 d] lies in memory.

    Attributes:
        strides: rows of d numbers from one block, KV head and token to the next; 0 where there is
            but one.
        num_heads: Hkv; block_size: N.
    """

    strides: tuple[int, int, int]
    num_heads: int
    block_size: int

    @classmethod
    def of(cls, cache: Tensor) -> "PoolLayout | None":
        """None if keys and values are no rows, or blocks do not lie one behind the other."""
        _, heads, size, width = cache.shape
        strides = [
            stride * (count > 1) for stride, count in zip(cache.stride(), cache.shape, strict=True)
        ]
        if (
            cache.stride(-1) != 1
            or width % 2
            or any(stride % (width // 2) for stride in strides[:3])
        ):
            return None
        block, head, token = (stride // (width // 2) for stride in strides[:3])
        return cls((block, head, token), heads, size) if block >= size * token else None

    @cached_property
    def heads(self) -> LayerHeads:
        """A stream for each KV head, and one list."""
        return LayerHeads(
            tuple(range(self.num_heads)), (0,) * self.num_heads, (False,) * self.num_heads
        )

    def rows(self, slots: Tensor) -> Tensor:
        """Of slots int64 [n], below 0 for none: the row of each in every stream, int64 [1, n],
        below 0 for none."""
        block, _, token = self.strides
        # rows between the last token of a block and the next block
        between = block - self.block_size * token
        return torch.add(slots * token, slots // self.block_size, alpha=between)[None]

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and rows of values, [Hkv, rows, d] each: views of the cache."""
        dim, first, (block, head, token) = (
            cache.shape[-1] // 2,
            cache.storage_offset(),
            self.strides,
        )
        shape = self.num_heads, 1 + (len(cache) - 1) * block + (self.block_size - 1) * token, dim
        keys, values = (
            cache.as_strided(shape, (head * dim, dim, 1), first + at) for at in (0, dim)
        )
        return keys, values
