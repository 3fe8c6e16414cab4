"""A layer's cache of vLLM as a pool of rows, for kernels that use keys and values in place.

In a block, the key and the value of a token lie next to each other. So a cache is rows of d
numbers: a key, its value, the next key. The stream of a KV head begins at its first key. A token
has the same row in all streams, which overlap.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads


@dataclass(frozen=True)
class PoolLayout:
    """Memory layout of a cache [blocks, Hkv, N, 2 d].

    Attributes:
        strides: rows of d numbers from one block, KV head and token to the next; 0 where there is
            only one.
        num_heads: Hkv.
        block_size: N.
    """

    strides: tuple[int, int, int]
    num_heads: int
    block_size: int

    @classmethod
    def of(cls, cache: Tensor) -> "PoolLayout | None":
        """Return the layout of a cache.

        Returns:
            None if keys and values are not rows, or blocks do not follow each other.
        """
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
        """One stream for each KV head, and one list of rows."""
        return LayerHeads(
            tuple(range(self.num_heads)), (0,) * self.num_heads, (False,) * self.num_heads
        )

    def rows(self, slots: Tensor) -> Tensor:
        """Return the row of each slot int64 [n] in every stream, int64 [1, n].

        Slots below 0 mean none.
        """
        block, _, token = self.strides
        # rows between the last token of a block and the next block
        between = block - self.block_size * token
        return torch.add(slots * token, slots // self.block_size, alpha=between)[None]

    def pools(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the cache as rows of keys and rows of values, [Hkv, rows, d] each."""
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
