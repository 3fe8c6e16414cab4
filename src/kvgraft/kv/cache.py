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

    Args:
        latent: what is kept of a token serves as its key and as its value (MLA): both are the same tensor.
    """

    def __init__(
        self,
        layout: StreamLayout,
        num_pages: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        latent: bool = False,
    ) -> None:
        shape = (layout.width, num_pages * block_size, head_dim)
        self.layout = layout
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys if latent else torch.empty_like(self.keys)
        self.pools = (self.keys,) if latent else (self.keys, self.values)

    @staticmethod
    def bytes_per_page(
        layout: StreamLayout, block_size: int, head_dim: int, dtype: torch.dtype, latent: bool = False
    ) -> int:
        """Bytes of one page, keys and values together."""
        return (1 if latent else 2) * layout.width * block_size * head_dim * dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this cache."""
        return sum(pool.nbytes for pool in self.pools) * self.block_size // self.keys.shape[1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n], each list's own."""
        for own in self.layout.layers[layer].every:
            for pool, new in zip(self.pools, (keys, values), strict=False):
                part = new if len(own.heads) == new.shape[1] else new[:, own.heads]  # [n, h, d]
                pool[own.streams].index_copy_(1, slots[own.page_list], part.transpose(0, 1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n]."""
        shape = (slots.shape[1], len(self.layout.layers[layer].streams), self.keys.shape[-1])
        found = [pool.new_empty(shape) for pool in self.pools]
        for own in self.layout.layers[layer].every:
            for pool, part in zip(self.pools, found, strict=True):
                part[:, own.heads] = pool[own.streams, slots[own.page_list]].transpose(0, 1)
        return found[0], found[-1]

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages."""
        old, new = (slots_of(pages, self.block_size).to(self.keys.device) for pages in (source, target))
        for pool in self.pools:
            pool[:, new] = pool[:, old]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that a read of dead content shows (tests)."""
        slots = slots_of(pages, self.block_size).to(self.keys.device)
        for pool in self.pools:
            pool[:, slots] = float("nan")
