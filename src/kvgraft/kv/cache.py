"""Tensors of the paged KV pool of the native engine."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvgraft.kernels.rows import read_rows, write_rows
from kvgraft.kv.heads import StreamLayout


def slots_of(pages: Sequence[int], block_size: int) -> Tensor:
    """Return the slots of a block table's tokens, in order: int64 [len(pages) * block_size]."""
    table = torch.as_tensor(pages, dtype=torch.int64)  # [b]
    return (table[:, None] * block_size + torch.arange(block_size)).flatten()


class KVCache:
    """Keys and values of all streams (layer, KV head), addressed by slot (`page * block_size +
    offset`).

    Keys are stored rotated (after RoPE). Both tensors are [layout.width, num_pages * block_size,
    head_dim]. `layout` gives the row and the page list of each head.

    Args:
        latent: one latent vector per token serves as key and value (MLA): both are the same tensor.
        residual_layers: layers whose incoming residual stream is stored too, `hidden_size` numbers
            a token, in the pages of the first list.
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
        residual_layers: Sequence[int] = (),
        hidden_size: int = 0,
    ) -> None:
        shape = (layout.width, num_pages * block_size, head_dim)
        self.layout = layout
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys if latent else torch.empty_like(self.keys)
        self.pools = (self.keys,) if latent else (self.keys, self.values)
        self.residuals = {
            layer: self.keys.new_empty(shape[1], hidden_size) for layer in sorted(residual_layers)
        }

    @staticmethod
    def bytes_per_page(
        layout: StreamLayout,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        latent: bool = False,
        beside: int = 0,
    ) -> int:
        """Return the bytes of one page: keys, values, and `beside` numbers per token."""
        return (
            ((1 if latent else 2) * layout.width * head_dim + beside) * block_size * dtype.itemsize
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this cache."""
        tensors = (*self.pools, *self.residuals.values())
        return sum(tensor.nbytes for tensor in tensors) * self.block_size // self.keys.shape[1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, num_kv_heads, head_dim] of one layer.

        `slots`, int64 [lists, n], has the slots of each page list.
        """
        write_rows(self.pools, (keys, values)[: len(self.pools)], self.layout.layers[layer], slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists,
        n].
        """
        parts = read_rows(self.pools, self.layout.layers[layer], slots)
        return parts[0], parts[-1]

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Return the keys as `read` does."""
        return read_rows((self.keys,), self.layout.layers[layer], slots)[0]

    def require_residuals(self, layers: Iterable[int]) -> None:
        """Raise ValueError unless the residual stream that enters these layers is stored."""
        if missing := sorted(set(layers) - self.residuals.keys()):
            kept = ", ".join(map(str, self.residuals)) or "none"
            raise ValueError(
                f"the residual stream that enters layer {missing[0]} is not kept (residual_layers: "
                f"{kept})"
            )

    def write_residual(self, layer: int, slots: Tensor, states: Tensor) -> None:
        """Store the states [n, D] that enter a layer at slots int64 [lists, n], if it is one of the
        residual_layers.
        """
        if layer in self.residuals:
            self.residuals[layer][slots[0]] = states

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages."""
        old, new = (
            slots_of(pages, self.block_size).to(self.keys.device) for pages in (source, target)
        )
        for pool in self.pools:
            pool[:, new] = pool[:, old]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that tests detect reads of dropped content."""
        slots = slots_of(pages, self.block_size).to(self.keys.device)
        for pool in self.pools:
            pool[:, slots] = float("nan")
        for residual in self.residuals.values():
            residual[slots] = float("nan")
