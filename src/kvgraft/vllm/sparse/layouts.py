"""Layouts of keys and values in vLLM's attention backends, and attention to pages of one KV head.

Logically a cache is [blocks, Hkv, N, 2 d].
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs

from kvgraft.decode.executor import HeadPages, Paged
from kvgraft.kernels.dispatch import block_sparse_attention
from kvgraft.kernels.workload import Lengths
from kvgraft.vllm.compat.cache_dtype import FP8, as_codes, decode
from kvgraft.vllm.compat.packing import unpack


def holds_codes(layer: Any) -> bool:
    """Return True if the layer's KV cache is quantised."""
    return layer.kv_cache_dtype in FP8


def dtype_of(layer: Any, kv_cache: Tensor) -> torch.dtype:
    """Return the dtype of the layer's keys and values when they are read from its KV cache."""
    dtype: torch.dtype = layer.dtype if holds_codes(layer) else kv_cache.dtype
    return dtype


def sinks_of(impl: Any, group: int) -> Tensor | None:
    """Return the sinks of an attention layer by KV head, float32 [Hkv, group]; None without."""
    sinks: Tensor | None = getattr(impl, "sinks", None)
    return None if sinks is None else sinks.detach().float().view(-1, group)


class CacheLayout(Protocol):
    """Interface of what depends on the backend."""

    def by_head(self, kv_cache: Tensor) -> Tensor:
        """Return a view [blocks, Hkv, N, channels] of a cache."""

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[Paged, Paged]:
        """Return keys and values by row, block * Hkv + head: [rows, N, d] each."""

    def attend(
        self,
        impl: Any,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        tables: Tensor,
        lengths: Tensor,
        bound: Lengths,
    ) -> Tensor:
        """Return the attention [S, g, dv] of queries to the rows of their tables.

        Args:
            query: [S, g, d].
            tables: int64 [S, m].
            lengths: tokens in each table.
            bound: upper bound of `lengths`.
        """


class Strided:
    """Layout of backends for GPUs, whose order of heads, tokens and layers is a matter of strides.

    Our own kernel attends.
    """

    def by_head(self, kv_cache: Tensor) -> Tensor:
        """Return the cache itself."""
        return kv_cache

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[HeadPages, HeadPages]:
        """Return views of the cache."""
        keys, values = self.attended(layer, kv_cache)
        return HeadPages(keys), HeadPages(values)

    def attended(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values that attention reads, [blocks, Hkv, N, d or dv]."""
        keys, values = kv_cache.chunk(2, dim=-1)
        return keys, values

    def attend(
        self,
        impl: Any,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        tables: Tensor,
        lengths: Tensor,
        bound: Lengths,
    ) -> Tensor:
        """Attend as in `CacheLayout`, with our own kernel."""
        keys, values = self.attended(layer, kv_cache)
        sinks = sinks_of(impl, query.shape[1])
        return block_sparse_attention(
            query, keys, values, tables, lengths, impl.scale, bound, sinks
        )


class Latents(Strided):
    """Layout of backends for latent attention (MLA): [blocks, N, L + R], a row a token.

    A flow takes the row for both key and value.
    """

    def by_head(self, kv_cache: Tensor) -> Tensor:
        """Return the cache as one of a single KV head."""
        return kv_cache[:, None]

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[HeadPages, HeadPages]:
        """Return views of the cache."""
        rows = HeadPages(self.by_head(kv_cache))
        return rows, rows

    def attended(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows, and the latents in them as values."""
        rows = self.by_head(kv_cache)
        return rows, rows[..., : layer.kv_lora_rank]


class Packed:
    """Layout of the CPU backend, which packs a block for its instruction set.

    vLLM's own kernel attends, to a view of the cache with one head and one page per KV head. With
    sinks there is a call for each KV head.
    """

    def by_head(self, kv_cache: Tensor) -> Tensor:
        """Return the cache itself."""
        return kv_cache

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple["PackedPages", "PackedPages"]:
        """Return pages that are unpacked when they are read."""
        head_dim = kv_cache.shape[-1] // 2
        packed = PackedFormat(layer.isa, dtype_of(layer, kv_cache), layer.kv_cache_dtype)
        k_scale, v_scale = (
            (layer._k_scale_float, layer._v_scale_float) if holds_codes(layer) else (None, None)
        )
        return (
            PackedPages(kv_cache, head_dim, packed, 0, k_scale),
            PackedPages(kv_cache, head_dim, packed, 1, v_scale),
        )

    def attend(
        self,
        impl: Any,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        tables: Tensor,
        lengths: Tensor,
        bound: Lengths,
    ) -> Tensor:
        """Attend as in `CacheLayout`, with vLLM's CPU kernel."""
        heads, group = kv_cache.shape[1], query.shape[1]
        sinks = sinks_of(impl, group)
        if sinks is None:
            return _attend_packed(impl, layer, query, kv_cache, tables, lengths, None)
        # the kernel takes one set of sinks for all sequences
        output = torch.empty_like(query)
        for head in range(heads):
            own = slice(head, None, heads)
            output[own] = _attend_packed(
                impl, layer, query[own].contiguous(), kv_cache, tables[own], lengths[own],
                sinks[head],
            )  # fmt: skip
        return output


def _attend_packed(
    impl: Any,
    layer: Any,
    query: Tensor,
    kv_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Call vLLM's CPU kernel as `Packed.attend` does; sinks are float32 [g] or None."""
    blocks, heads, size, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks * heads, 1, 2 * size, query.shape[2]).chunk(2, dim=2)
    output, lengths = torch.empty_like(query), lengths.int()
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(query),
        num_heads=query.shape[1],
        num_kv_heads=1,
        head_dim=query.shape[2],
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=impl.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=tables.int(),
        softcap=impl.logits_soft_cap,
        scheduler_metadata=plan,
        s_aux=sinks,
        k_scale=layer._k_scale_float,
        v_scale=layer._v_scale_float,
        kv_cache_dtype=impl.kv_cache_dtype,
    )

    return output


@dataclass(frozen=True)
class PackedFormat:
    """Format of a packed cache.

    Attributes:
        isa: instruction set of the backend.
        dtype: dtype of keys and values.
        cache_dtype: vLLM's name of the cache dtype.
    """

    isa: str
    dtype: torch.dtype
    cache_dtype: str


class PackedPages:
    """Keys or values of a packed cache [blocks, Hkv, N, 2 d] by row: [rows, N, d].

    Args:
        which: 0 for keys, 1 for values.
        scale: scale of the codes of a quantised cache; None for a cache of numbers.
    """

    def __init__(
        self,
        kv_cache: Tensor,
        head_dim: int,
        packed: PackedFormat,
        which: int,
        scale: float | None,
    ) -> None:
        blocks, heads, size, _ = kv_cache.shape
        self.shape = (blocks * heads, size, head_dim)
        self._rows, self._format = kv_cache.view(blocks * heads, 1, size, -1), packed
        self._which, self._scale = which, scale

    def __getitem__(self, rows: Tensor) -> Tensor:
        taken, packed = self._rows.index_select(0, rows), self._format
        both = unpack(taken, self.shape[2], packed.isa, packed.dtype, packed.cache_dtype)
        found = both[self._which][:, 0]
        if self._scale is None:
            return found
        return decode(as_codes(found, packed.cache_dtype), self._scale, packed.dtype)
