"""The tensors of the paged KV pool (native host)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def slots_of(pages: Sequence[int], block_size: int) -> Tensor:
    """Slots of the tokens that a block table holds, in order: int64 [len(pages) * block_size]."""
    table = torch.as_tensor(pages, dtype=torch.int64)  # [b]
    return (table[:, None] * block_size + torch.arange(block_size)).flatten()


class KVCache:
    """Keys and values of all layers, addressed by slot (`page * block_size + offset`).

    Keys are stored rotated (after RoPE). Both tensors are [num_layers, num_pages * block_size, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages * block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_page(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [n]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that a read of dead content shows (tests)."""
        slots = slots_of(pages, self.block_size).to(self.keys.device)
        self.keys[:, slots] = float("nan")
        self.values[:, slots] = float("nan")
