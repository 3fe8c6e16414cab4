"""What lies in vLLM's KV cache, layer by layer, as numbers of the model's dtype: read, written, cleared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kvgraft.vllm.compat import latent
from kvgraft.vllm.compat.cache_dtype import FP8, as_codes, as_written, decode, encode
from kvgraft.vllm.compat.packing import unpack
from kvgraft.vllm.compat.support import UnsupportedConfiguration


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
        self._check_layout()

    def read(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in these slots, each [n, Hkv, d]."""
        blocks, local = self.blocks_of(slots)
        return self.read_blocks(index, blocks, local)

    def blocks_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct blocks of these slots, and each slot's place among their tokens: int64 [b], [n]."""
        blocks, inverse = torch.unique(slots // self.block_size, return_inverse=True)
        return blocks, inverse * self.block_size + slots % self.block_size

    def read_blocks(self, index: int, blocks: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, for slots that `blocks_of` has taken apart."""
        keys, values = self._codes(index, blocks, local)
        if not self._is_quantised:
            return keys, values
        k_scale, v_scale = self._scales(index)
        return decode(keys, k_scale, self.dtype), decode(values, v_scale, self.dtype)

    def read_codes(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, but without their scales where the cache is quantised: as the cache holds them."""
        return self._codes(index, *self.blocks_of(slots))

    def write_codes(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store what `read_codes` has read, from whatever slots of this layer: bit for bit."""
        if self._is_quantised:
            (k_scale, v_scale), dtype = self._scales(index), self.dtype
            keys, values = as_written(keys, k_scale, dtype), as_written(values, v_scale, dtype)
        self._update(index, keys, values, slots)

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [n, Hkv, d] in these slots, packed as the backend wants them; where the cache is
        quantised, the nearest numbers that it has."""
        if self._is_quantised:
            k_scale, v_scale = self._scales(index)
            keys, values = encode(keys, k_scale, self.code_dtype), encode(values, v_scale, self.code_dtype)
        self.write_codes(index, keys, values, slots)

    def _update(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values as the attention does."""
        attention = self.attentions[index]
        if self.is_latent:
            latent.write(attention, keys, slots)
            return
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] in every layer: kernels multiply the unused tail of a block, NaN included."""
        self._clear(self.attentions, blocks)

    def _clear(self, attentions: Sequence[Any], blocks: Tensor) -> None:
        blocks = self._kernel_blocks(blocks.to(self.device)[None])[0]
        for attention in attentions:
            attention.kv_cache.index_fill_(0, blocks, 0)

    def _codes(self, index: int, blocks: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._content(self.attentions[index], blocks)  # [b', H, N, d]
        rows = [x.transpose(1, 2).flatten(0, 1).index_select(0, local) for x in (keys, values)]
        return as_codes(rows[0], self.cache_dtype), as_codes(rows[1], self.cache_dtype)

    def _scales(self, index: int) -> tuple[float, float]:
        attention = self.attentions[index]
        return attention._k_scale_float, attention._v_scale_float

    def _content(self, attention: Any, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks, [b', H, N, d]; the logical shape of every cache is [B, H, N, 2 d]."""
        taken = attention.kv_cache.index_select(0, self._kernel_blocks(blocks[None])[0])
        if self.is_latent:
            return latent.content(taken)
        if not current_platform.is_cpu():
            return taken[..., : attention.head_size], taken[..., attention.head_size :]
        return unpack(taken, attention.head_size, attention.isa, self.dtype, self.cache_dtype)

    def _kernel_blocks(self, blocks: Tensor) -> Tensor:
        """Blocks of the KV cache manager [r, b] -> those of the attention kernel, which may be smaller."""
        ratio = self.block_size // self._kernel_block_size
        if ratio == 1:
            return blocks
        return (blocks[..., None] * ratio + torch.arange(ratio).to(blocks)).flatten(1)

    def _check_layout(self) -> None:
        """Write to the null block, which nothing reads, and read it back."""
        name = type(self.attentions[0].impl).__name__
        if any(attention._k_scale.numel() != 1 for attention in self.attentions):
            raise UnsupportedConfiguration(f"KVGraft cannot read KV of {name} with a scale for each head")
        generator = torch.Generator().manual_seed(0)
        shape = (self.block_size, self.num_kv_heads, self.head_dim)
        drawn = [torch.randn(shape, generator=generator).to(self.device, self.code_dtype) for _ in range(2)]
        slots = torch.arange(self.block_size, device=self.device)
        self.write_codes(0, drawn[0], drawn[1], slots)
        again = self.read_codes(0, slots)
        pairs = [*zip(again, drawn, strict=True)][: 1 if self.is_latent else 2]
        if not all(torch.equal(found.float(), codes.float()) for found, codes in pairs):
            raise UnsupportedConfiguration(f"KVGraft cannot read the KV cache layout of {name} ({self.cache_dtype})")
