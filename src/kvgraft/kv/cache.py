"""The tensors of the paged KV pool (native host)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.kv.heads import StreamLayout


def slots_of(pages: Sequence[int], block_size: int) -> Tensor:
    """Slots of the tokens that a block table holds, in order: int64 [len(pages) * block_size]."""
    table = torch.as_tensor(pages, dtype=torch.int64)  # [b]
    return (table[:, None] * block_size + torch.arange(block_size)).flatten()


class KVCache:
    """Keys and values of all streams (layer, KV head), addressed by slot (`page * block_size + offset`).

    Keys are stored rotated (after RoPE). Both tensors are [layout.width, num_pages * block_size, head_dim]: which row
    and which page list hold a head's tokens is what `layout` says.
    """

    def __init__(
        self,
        layout: StreamLayout,
        num_pages: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layout.width, num_pages * block_size, head_dim)
        self.layout = layout
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_page(layout: StreamLayout, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page, keys and values together."""
        return 2 * layout.width * block_size * head_dim * dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this cache."""
        return self.bytes_per_page(self.layout, self.block_size, self.keys.shape[-1], self.keys.dtype)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n], each list's own."""
        for own in self.layout.layers[layer].every:
            for pool, new in ((self.keys, keys), (self.values, values)):
                part = new if len(own.heads) == new.shape[1] else new[:, own.heads]  # [n, h, d]
                pool[own.streams].index_copy_(1, slots[own.page_list], part.transpose(0, 1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n]."""
        shape = (slots.shape[1], len(self.layout.layers[layer].streams), self.keys.shape[-1])
        keys, values = self.keys.new_empty(shape), self.values.new_empty(shape)
        for own in self.layout.layers[layer].every:
            for pool, found in ((self.keys, keys), (self.values, values)):
                found[:, own.heads] = pool[own.streams, slots[own.page_list]].transpose(0, 1)
        return keys, values

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages."""
        old, new = (slots_of(pages, self.block_size).to(self.keys.device) for pages in (source, target))
        for pool in (self.keys, self.values):
            pool[:, new] = pool[:, old]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that a read of dead content shows (tests)."""
        slots = slots_of(pages, self.block_size).to(self.keys.device)
        self.keys[:, slots] = float("nan")
        self.values[:, slots] = float("nan")
