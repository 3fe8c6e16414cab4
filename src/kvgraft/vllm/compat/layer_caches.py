"""What lies in vLLM's KV cache, layer by layer, as numbers of the model's dtype: read, written,
cleared."""

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
    """Where tokens lie, worked out once for all layers: in some blocks of the attention kernel
    int64 [b], as rows of these int64 [n], or as a slice if they follow each other; in a cache that
    is not packed, blocks and offsets [n]."""

    blocks: Tensor
    rows: Tensor | slice


class LayerCaches:
    """The cache of one tensor-parallel rank, whose layout was tried.

    Args:
        attentions: vLLM's attention layers.
        dtype: of the model.
        block_size: tokens of a block of vLLM's KV cache manager.
        kernel_block_size: tokens of a block of the attention kernel, which may be less.

    Attributes:
        num_kv_heads, head_dim: of what is cached of a token.
        cache_dtype: as vLLM calls it; `code_dtype`: of what the cache holds.
        is_latent: whether keys are latents (MLA) and values have no channels.
        rounds: whether what is stored is read back as other numbers.

    Raises:
        UnsupportedConfiguration: the cache layout is none that this module can read.
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
        """Keys and values in these slots, each [n, Hkv, d]."""
        keys, values = self.read_codes(index, slots)
        if not self._is_quantised:
            return keys, values
        k_scale, v_scale = self._scales(index)
        return decode(keys, k_scale, self.dtype), decode(values, v_scale, self.dtype)

    def read_codes(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, but without their scales where the cache is quantised: as the cache holds
        them."""
        return self.codes_at(index, self.places_of(slots, packed=self.is_packed(index)))

    def is_packed(self, index: int) -> bool:
        """Whether blocks lie as an instruction set of CPUs wants them, not as rows of numbers."""
        return hasattr(self.attentions[index], "isa")

    def places_of(self, slots: Tensor, *, packed: bool) -> Places:
        """Of slots int64 [n]."""
        blocks, offsets = slots // self._kernel_block_size, slots % self._kernel_block_size
        if not packed:
            return Places(blocks, offsets)
        blocks, inverse = torch.unique(blocks, return_inverse=True)
        rows = inverse * self._kernel_block_size + offsets
        if rows.numel() and bool((rows.diff() == 1).all()):
            return Places(blocks, slice(int(rows[0]), int(rows[-1]) + 1))
        return Places(blocks, rows)

    def codes_at(self, index: int, places: Places) -> tuple[Tensor, Tensor]:
        """As `read_codes`."""
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
            rows = self._stored(index).transpose(1, 2)[places.blocks, places.rows]  # [n, H, W]
            keys, values = rows[..., : self.head_dim], rows[..., self.head_dim :]
        return as_codes(keys, self.cache_dtype), as_codes(values, self.cache_dtype)

    def rows_of(self, index: int) -> Tensor:
        """The codes of a layer's cache, [blocks, Hkv, N, W]: keys, and values beside them if there
        are any; rows of numbers if it is not packed."""
        return as_codes(self._stored(index), self.cache_dtype)

    def coded(self, numbers: Tensor) -> Tensor:
        """The nearest codes of numbers that have no scale."""
        return (
            encode(numbers, 1.0, self.code_dtype)
            if self._is_quantised
            else numbers.to(self.code_dtype)
        )

    def write_codes(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store what `read_codes` has read, from whatever slots of this layer: bit for bit."""
        self._update(index, *self._as_written(index, keys, values), slots)

    def read_again(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in these slots, each [n, Hkv, d], as `store` takes them to store them bit
        for bit."""
        return self._as_written(index, *self.read_codes(index, slots))

    def store(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [n, Hkv, d] that were computed, as the model's own attention does:
        where the cache is quantised it may round otherwise than `write`."""
        self._update(index, keys, values, slots)

    def _as_written(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_quantised:
            return keys, values
        (k_scale, v_scale), dtype = self._scales(index), self.dtype
        return as_written(keys, k_scale, dtype), as_written(values, v_scale, dtype)

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [n, Hkv, d] in these slots, packed as the backend wants them; where
        the cache is quantised, the nearest numbers that it has."""
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
        """Let a flow know of slots int64 [n] that a kernel has written to past the attention, if
        one decodes here."""
        note = getattr(self.attentions[index].impl, "note_written", None)
        if note is not None:
            note(self.attentions[index].kv_cache, slots())

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] in every layer: kernels multiply the unused tail of a block,
        NaN included."""
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
        """Blocks of the KV cache manager [r, b] -> those of the attention kernel, which may be
        smaller."""
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
