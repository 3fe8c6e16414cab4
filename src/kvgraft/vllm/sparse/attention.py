"""vLLM's CPU attention backend with a flow: decode steps read the blocks that it chooses, each KV head its own.

The kernel is vLLM's: a page of one KV head is a page of a cache with one head, so that each KV head of each request is
a sequence with a block table of its own. Prompts, short requests and skipped layers are attended to as ever.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvgraft.decode.batch import Batch
from kvgraft.decode.flow import Program
from kvgraft.decode.indexer import Indexer
from kvgraft.vllm.compat.packing import unpack
from kvgraft.vllm.sparse.program import program_of


class SparseBackend(CPUAttentionBackend):
    """The CPU backend, sparse where the server has a flow."""

    @staticmethod
    def get_impl_cls() -> type["SparseImpl"]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type["SparseBuilder"]:
        return SparseBuilder


@dataclass(frozen=True, eq=False)
class SparseMetadata:
    """Requests that a step decodes sparsely: what is added to the metadata of its attention.

    Attributes:
        queries: int64 [r], rows of their tokens among those of the step.
        pages: int64 [r, T], their block tables.
        full: int64 [r], how many of these pages are full.
        batch: one row for each of their KV heads.
        others: metadata of the same step in which they have one token of context, so that what vLLM computes for them
            costs nothing; None if there is nobody else.
    """

    queries: Tensor
    pages: Tensor
    full: Tensor
    batch: Batch
    others: Any


class SparseBuilder(CPUAttentionMetadataBuilder):
    """Metadata of a step, with the requests that it decodes sparsely."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.program = program_of(self.vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.kvgraft_sparse = None
        if self.program is None or common.is_prefilling is None or common.causal is not True or self.window_size != -1:
            return metadata
        lengths = common.seq_lens.long()
        blocks = -(-lengths // self.program.block_size)
        sparse = (common.query_start_loc.diff() == 1) & (blocks > self.program.most)
        sparse &= ~common.is_prefilling[: len(lengths)].to(sparse.device)
        rows = sparse.nonzero()[:, 0]
        if rows.numel():
            others = None
            if not bool(sparse.all()):
                short = replace(common, seq_lens=torch.where(sparse, 1, common.seq_lens))
                others = super().build(common_prefix_len, short, fast_build)
            pages = common.block_table_tensor[rows, : int(blocks[rows].max())].long()
            heads = torch.arange(self.num_kv_heads)
            by_head = (pages[:, None] * self.num_kv_heads + heads[:, None]).flatten(0, 1)
            batch = Batch(by_head, lengths[rows].repeat_interleave(self.num_kv_heads), self.program.block_size)
            full = lengths[rows] // self.program.block_size
            queries = common.query_start_loc[rows].long()
            metadata.kvgraft_sparse = SparseMetadata(queries, pages, full, batch, others)
        return metadata


class SparseImpl(CPUAttentionBackendImpl):
    """One attention layer and the caches that the flow has of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        program = program_of(get_current_vllm_config())
        self._program = program if self.attn_type == AttentionType.DECODER and self.sliding_window == -1 else None
        self._caches: LayerCaches | None = None

    def follow(self, program: Program | None) -> None:
        """Decode as this flow says from now on, densely without one; its caches are filled anew."""
        self._program, self._caches = program, None

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """As in vLLM: write key and value [n, Hkv, d] to their slots."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self._program is not None and kv_cache.numel():
            self._of(kv_cache, self._program).note(slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As in vLLM: query and output [n, Hq, d]."""
        sparse: SparseMetadata | None = getattr(attn_metadata, "kvgraft_sparse", None)
        program = self._program
        if sparse is None or program is None or extract_layer_index(layer.layer_name) in program.flow.layers_skip:
            rest = output, output_scale, output_block_scale
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest)
        if sparse.others is not None:
            super().forward(layer, query, key, value, kv_cache, sparse.others, output)
        caches = self._of(kv_cache, program)
        decoding = query[sparse.queries].view(-1, self.num_queries_per_kv, self.head_size)  # [r * Hkv, g, d]
        tables, lengths = caches.choose(decoding, sparse, layer.isa)
        attended = self._attend(layer, decoding, kv_cache, tables, lengths)
        output[sparse.queries] = attended.view(-1, *output.shape[1:])
        return output

    def _of(self, kv_cache: Tensor, program: Program) -> "LayerCaches":
        """The caches beside this cache: new ones if it is a new one."""
        if self._caches is None or self._caches.kv_cache is not kv_cache:
            self._caches = LayerCaches(program, kv_cache)
        return self._caches

    def _attend(self, layer: Any, query: Tensor, kv_cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """Queries [S, g, d] to the pages of their tables int64 [S, m], which hold so many tokens -> [S, g, d]."""
        blocks, heads, size, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks * heads, 1, 2 * size, self.head_size).chunk(2, dim=2)
        output, lengths = torch.empty_like(query), lengths.int()
        starts = torch.arange(len(query) + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(query),
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables.int(),
            softcap=self.logits_soft_cap,
            scheduler_metadata=plan,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return output


class LayerCaches:
    """What a flow keeps of the blocks of one layer. A block that was written to is taken up again when it is read, so
    that it does not matter who wrote it, in which order, or what was there before."""

    def __init__(self, program: Program, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache
        blocks, self._num_heads, self._size, double = kv_cache.shape
        self._head_dim = double // 2
        self._indexer = Indexer(program, blocks * self._num_heads, kv_cache)
        self._written = torch.ones(blocks, dtype=torch.bool)

    def note(self, slots: Tensor) -> None:
        """Slots int64 [n] are written to."""
        self._written[slots[slots >= 0] // self._size] = True

    def choose(self, query: Tensor, sparse: SparseMetadata, isa: str) -> tuple[Tensor, Tensor]:
        """As `LayerIndexer.choose`."""
        keys, values = (_Plain(self.kv_cache, self._head_dim, isa, which) for which in (0, 1))
        layer = self._indexer.at(slice(None), keys, values)
        fresh = self._written[sparse.pages] & (torch.arange(sparse.pages.shape[1]) < sparse.full[:, None])
        if bool(fresh.any()):
            pages = sparse.pages[fresh].unique()
            self._written[pages] = False
            layer.fill((pages[:, None] * self._num_heads + torch.arange(self._num_heads)).flatten())
        return layer.choose(query, sparse.batch)


@dataclass(frozen=True)
class _Plain:
    """The keys (0) or values (1) of a packed cache, by row (a block of one KV head): [rows, N, d]."""

    kv_cache: Tensor  # [blocks, Hkv, N, 2 d]
    head_dim: int
    isa: str
    which: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        blocks, heads, size, _ = self.kv_cache.shape
        return blocks * heads, size, self.head_dim

    def __getitem__(self, rows: Tensor) -> Tensor:
        blocks, heads, size, _ = self.kv_cache.shape
        taken = self.kv_cache.view(blocks * heads, 1, size, -1).index_select(0, rows)
        return unpack(taken, self.head_dim, self.isa, taken.dtype, "auto")[self.which][:, 0]
