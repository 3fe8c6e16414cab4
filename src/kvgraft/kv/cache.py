"""The tensors of the paged KV pool (native host)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvgraft.kernels.rows import read_rows, write_rows
from kvgraft.kv.heads import StreamLayout


def slots_of(pages: Sequence[int], block_size: int) -> Tensor:
    """Slots of the tokens that a block table holds, in order: int64 [len(pages) * block_size]."""
    table = torch.as_tensor(pages, dtype=torch.int64)  # [b]
    return (table[:, None] * block_size + torch.arange(block_size)).flatten()


class KVCache:
    """Keys and values of all streams (layer, KV head), addressed by slot (`page * block_size +
    offset`).

    Keys are stored rotated (after RoPE). Both tensors are [layout.width, num_pages * block_size,
    head_dim]: which row and which page list hold a head's tokens is what `layout` says.

    Args:
        latent: what is kept of a token serves as its key and as its value (MLA): both are the same
            tensor.
        residual_layers: layers of which the residual stream that enters them is kept, too,
            `hidden_size` numbers a token; it lies in the pages of the first list.
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
        """Bytes of one page: keys and values together, and `beside` numbers a token."""
        return (
            ((1 if latent else 2) * layout.width * head_dim + beside) * block_size * dtype.itemsize
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this cache."""
        tensors = (*self.pools, *self.residuals.values())
        return sum(tensor.nbytes for tensor in tensors) * self.block_size // self.keys.shape[1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n],
        each list's own."""
        write_rows(self.pools, (keys, values)[: len(self.pools)], self.layout.layers[layer], slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, num_kv_heads, head_dim] of one layer at slots int64 [lists, n]."""
        parts = read_rows(self.pools, self.layout.layers[layer], slots)
        return parts[0], parts[-1]

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Only the keys."""
        return read_rows((self.keys,), self.layout.layers[layer], slots)[0]

    def require_residuals(self, layers: Iterable[int]) -> None:
        """Raise ValueError unless the residual stream that enters these layers is kept."""
        if missing := sorted(set(layers) - self.residuals.keys()):
            kept = ", ".join(map(str, self.residuals)) or "none"
            raise ValueError(
                f"the residual stream that enters layer {missing[0]} is not kept (residual_layers: "
                f"{kept})"
            )

    def write_residual(self, layer: int, slots: Tensor, states: Tensor) -> None:
        """Keep the states [n, D] that enter a layer, if it is one of the residual_layers, at slots
        int64 [lists, n]."""
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
        """Fill pages with NaN, so that a read of dead content shows (tests)."""
        slots = slots_of(pages, self.block_size).to(self.keys.device)
        for pool in self.pools:
            pool[:, slots] = float("nan")
        for residual in self.residuals.values():
            residual[slots] = float("nan")
