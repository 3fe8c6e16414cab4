"""Content of vLLM's KV cache by layer, as numbers of the model's dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraft.kernels.upload import upload
from kvgraft.vllm.compat import latent
from kvgraft.vllm.compat.cache_dtype import FP8, as_codes, as_written, decode, encode
from kvgraft.vllm.compat.packing import unpack
from kvgraft.vllm.compat.support import UnsupportedConfiguration


@dataclass(frozen=True)
class Places:
    """Location of tokens in the cache, computed once for all layers.

    Attributes:
        blocks: blocks of the attention kernel, int64 [b].
        rows: in a packed cache, rows int64 [n] within these blocks, or a slice if they are
            consecutive. In other caches, offsets int64 [n] within `blocks` int64 [n].
    """

    blocks: Tensor
    rows: Tensor | slice


class LayerCaches:
    """KV cache of one tensor-parallel rank. The constructor tests its layout.

    Args:
        attentions: vLLM's attention layers.
        dtype: dtype of the model.
        device: device of the cache.
        block_size: tokens per block of vLLM's KV cache manager.
        kernel_block_size: tokens per block of the attention kernel, which may be less.

    Attributes:
        num_kv_heads, head_dim: shape of a cached key.
        cache_dtype: vLLM's name of the cache dtype.
        code_dtype: dtype of the numbers in the cache.
        is_latent: True if keys are latents (MLA) and values have no channels.
        rounds: True if numbers read back differ from those stored.

    Raises:
        UnsupportedConfiguration: this module cannot read the cache layout.
    """

    def __init__(
        self,
        attentions: Sequence[Any],
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        kernel_block_size: int,
    ) -> None:
        first = attentions[0]
        self.attentions, self.dtype, self.device = attentions, dtype, device
        self.block_size, self._kernel_block_size = block_size, kernel_block_size
        self.is_latent = latent.is_latent(first)
        self.num_kv_heads: int = 1 if self.is_latent else first.num_kv_heads
        self.head_dim: int = first.head_size
        self.cache_dtype: str = first.kv_cache_dtype
        self._is_quantised = self.cache_dtype in FP8
        self.code_dtype: torch.dtype = FP8.get(self.cache_dtype, first.kv_cache.dtype)
        self.rounds = self.code_dtype != dtype
        self._check_layout()

    def read(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in these slots, each [n, Hkv, d]."""
        keys, values = self.read_codes(index, slots)
        if not self._is_quantised:
            return keys, values
        k_scale, v_scale = self._scales(index)
        return decode(keys, k_scale, self.dtype), decode(values, v_scale, self.dtype)

    def read_codes(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the cache holds them: without scales where it is quantised."""
        return self.codes_at(index, self.places_of(slots, packed=self.is_packed(index)))

    def is_packed(self, index: int) -> bool:
        """Return True if blocks are packed for an instruction set of CPUs, not rows of numbers."""
        return hasattr(self.attentions[index], "isa")

    def places_of(self, slots: Tensor, *, packed: bool) -> Places:
        """Return the places of slots int64 [n]."""
        blocks, offsets = slots // self._kernel_block_size, slots % self._kernel_block_size
        if not packed:
            return Places(blocks, offsets)
        blocks, inverse = torch.unique(blocks, return_inverse=True)
        rows = inverse * self._kernel_block_size + offsets
        if rows.numel() and bool((rows.diff() == 1).all()):
            return Places(blocks, slice(int(rows[0]), int(rows[-1]) + 1))
        return Places(blocks, rows)

    def codes_at(self, index: int, places: Places) -> tuple[Tensor, Tensor]:
        """Return keys and values at these places, as `read_codes` does."""
        if self.is_packed(index):
            attention = self.attentions[index]
            taken = attention.kv_cache.index_select(0, places.blocks)
            # [b, H, N, d]
            packed = unpack(taken, attention.head_size, attention.isa, self.dtype, self.cache_dtype)
            by_token = (part.transpose(1, 2).flatten(0, 1) for part in packed)
            keys, values = (
                part[places.rows]
                if isinstance(places.rows, slice)
                else part.index_select(0, places.rows)
                for part in by_token
            )
        else:
            # [n, H, W]
            rows = self._stored(index).transpose(1, 2)[places.blocks, places.rows]
            keys, values = rows[..., : self.head_dim], rows[..., self.head_dim :]

        return as_codes(keys, self.cache_dtype), as_codes(values, self.cache_dtype)

    def rows_of(self, index: int) -> Tensor:
        """Return a view of the codes of a layer's cache that is not packed, [blocks, Hkv, N, W].

        Rows hold keys, followed by values if there are any.
        """
        return as_codes(self._stored(index), self.cache_dtype)

    def coded(self, numbers: Tensor) -> Tensor:
        """Return the nearest codes of numbers, without a scale."""
        return (
            encode(numbers, 1.0, self.code_dtype)
            if self._is_quantised
            else numbers.to(self.code_dtype)
        )

    def write_codes(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store the result of `read_codes` bit for bit, in any slots of this layer."""
        self._update(index, *self._as_written(index, keys, values), slots)

    def read_again(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, Hkv, d] in these slots, for `store` to store bit for bit."""
        return self._as_written(index, *self.read_codes(index, slots))

    def store(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store computed keys and values [n, Hkv, d] as the model's own attention does.

        A quantised cache may round them differently from `write`.
        """
        self._update(index, keys, values, slots)

    def _as_written(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_quantised:
            return keys, values
        (k_scale, v_scale), dtype = self._scales(index), self.dtype
        return as_written(keys, k_scale, dtype), as_written(values, v_scale, dtype)

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values [n, Hkv, d] to these slots, packed as the backend needs.

        A quantised cache takes the nearest numbers that it can hold.
        """
        if self._is_quantised:
            k_scale, v_scale = self._scales(index)
            keys, values = (
                encode(keys, k_scale, self.code_dtype),
                encode(values, v_scale, self.code_dtype),
            )
        self.write_codes(index, keys, values, slots)

    def _update(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values as the attention does."""
        attention = self.attentions[index]
        if self.is_latent:
            latent.write(attention, keys, slots)
            return
        attention.impl.do_kv_cache_update(
            attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots
        )

    def note_written(self, index: int, slots: Callable[[], Tensor]) -> None:
        """Tell the flow of this layer, if any, which slots int64 [n] a kernel has written."""
        attention = self.attentions[index]
        note = getattr(attention.impl, "note_written", None)
        if note is not None:
            note(attention.kv_cache, slots())

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] in every layer.

        Kernels also multiply the unused tail of a block, where NaN would spread.
        """
        self._clear(self.attentions, blocks)

    def _clear(self, attentions: Sequence[Any], blocks: Tensor) -> None:
        if not attentions:
            return
        [blocks] = upload(self.device, self._kernel_blocks(blocks[None])[0])
        for attention in attentions:
            attention.kv_cache.index_fill_(0, blocks, 0)

    def _scales(self, index: int) -> tuple[float, float]:
        attention = self.attentions[index]
        return attention._k_scale_float, attention._v_scale_float

    def _stored(self, index: int) -> Tensor:
        cache: Tensor = self.attentions[index].kv_cache
        return cache[:, None] if self.is_latent else cache

    def _kernel_blocks(self, blocks: Tensor) -> Tensor:
        """Return the blocks of the attention kernel for blocks of the KV cache manager [r, b]."""
        ratio = self.block_size // self._kernel_block_size
        if ratio == 1:
            return blocks
        return (blocks[..., None] * ratio + torch.arange(ratio).to(blocks)).flatten(1)

    def _check_layout(self) -> None:
        """Write to the null block, which nothing reads, and read it back."""
        kinds = {type(attention.impl).__name__: at for at, attention in enumerate(self.attentions)}
        if any(attention._k_scale.numel() != 1 for attention in self.attentions):
            raise UnsupportedConfiguration(
                f"KVGraft cannot read KV of {', '.join(kinds)} with a scale for each head"
            )

        generator = torch.Generator().manual_seed(0)
        shape = (self.block_size, self.num_kv_heads, self.head_dim)
        drawn = [
            torch.randn(shape, generator=generator).to(self.device, self.code_dtype)
            for _ in range(2)
        ]
        slots = torch.arange(self.block_size, device=self.device)

        for name, at in kinds.items():
            self.write_codes(at, drawn[0], drawn[1], slots)
            again = self.read_codes(at, slots)
            pairs = [*zip(again, drawn, strict=True)][: 1 if self.is_latent else 2]
            if not all(torch.equal(found.float(), codes.float()) for found, codes in pairs):
                layout = f"the KV cache layout of {name} ({self.cache_dtype})"
                raise UnsupportedConfiguration(f"KVGraft cannot read {layout}")
