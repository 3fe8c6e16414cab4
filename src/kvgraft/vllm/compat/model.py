"""The loaded model and its cache, on whatever platform vLLM runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvgraft.vllm.compat.drafts import Drafter, has_draft_model
from kvgraft.vllm.compat.packing import unpack
from kvgraft.vllm.compat.residuals import ResidualStreams
from kvgraft.vllm.compat.support import UnsupportedConfiguration, model_rope

NO_SLOT = -1  # vLLM's slot of padding


class _Stop(Exception):
    """Ends a decoder layer right after its queries, keys and values are known."""


class ModelHost:
    """The loaded model and its cache, as the recovery loop needs them (on one tensor-parallel rank).

    Args:
        runner: vLLM's model runner, V1 or V2, after its KV cache was set up.
        residual_layers: layers of which the residual stream that enters them is kept.

    Attributes:
        attentions: of the model's layers, and behind them those of the draft model, if there is one.

    Raises:
        UnsupportedConfiguration: the cache layout is none that this module can read.
    """

    def __init__(self, runner: Any, residual_layers: Iterable[int] = ()) -> None:
        self.config: VllmConfig = runner.vllm_config
        self.device: torch.device = runner.device
        model = runner.get_model()
        self._embed = model.embed_input_ids
        self.layers = list(model.model.layers)
        self.attentions = [layer.self_attn.attn for layer in self.layers]
        self.num_layers = len(self.layers)
        self.num_kv_heads = self.attentions[0].num_kv_heads
        self.head_dim = self.attentions[0].head_size
        self.dtype: torch.dtype = self.config.model_config.dtype
        self.scale = float(self.attentions[0].impl.scale)
        self.rope = model_rope(self.config)
        self.block_size = int(self.config.cache_config.block_size)
        self.max_rows = int(self.config.scheduler_config.max_num_batched_tokens)  # vLLM has profiled this many
        self._builder = runner.attn_groups[0][0].get_metadata_builder()
        self._kernel_block_size = int(self._builder.kv_cache_spec.block_size)
        self._check_layout()
        self._model = model
        names = [attention.layer_name for attention in self.attentions]
        self.drafter = Drafter(runner) if has_draft_model(self.config) else None
        self.attentions += self.drafter.attentions if self.drafter else []
        self.num_blocks = int(self.config.cache_config.num_gpu_blocks or 0)
        shape = (self.num_blocks * self.block_size, self.config.model_config.get_hidden_size(), self.dtype, self.device)
        self.residuals = ResidualStreams(self.layers, names, residual_layers, *shape)

    def normed(self, states: Tensor) -> Tensor:
        """Hidden states and residuals [n, 2, D] that left the last layer -> what the model gives [n, D]."""
        hidden, _ = self._model.model.norm(states[:, 0].contiguous(), states[:, 1].contiguous())
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """Hidden states and residuals [n, 2, D] that left the last layer -> float32 [n, V]."""
        return self._model.compute_logits(self.normed(states)).float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [n] -> [n, D]."""
        return self._embed(token_ids)

    def metadata(self, queries: Sequence[tuple[int, int, int]], tables: Sequence[np.ndarray], slots: Tensor) -> Any:
        """As `common_metadata`, from the backend's own (dense) builder."""
        return self._builder.build(0, self.common_metadata(queries, tables, slots), fast_build=True)

    def common_metadata(
        self, queries: Sequence[tuple[int, int, int]], tables: Sequence[np.ndarray], slots: Tensor
    ) -> CommonAttentionMetadata:
        """Attention metadata of runs as pseudo-sequences.

        Args:
            queries: per run (prompt, first position, stop position).
            tables: per prompt its physical blocks, int [b].
            slots: int64 [n], the slot of every query.
        """
        sizes = np.array([stop - first for _, first, stop in queries], np.int32)
        seen = torch.tensor([stop for _, _, stop in queries], dtype=torch.int32)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        width = max(map(len, tables))
        padded = torch.from_numpy(
            np.stack([np.pad(table, (0, width - len(table))) for table in tables]).astype(np.int32)
        )
        rows = self._kernel_blocks(padded[torch.tensor([prompt for prompt, _, _ in queries])])
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seen.to(self.device),
            num_reqs=len(queries),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(sizes.max()),
            max_seq_len=int(seen.max()),
            block_table_tensor=rows.to(self.device),
            slot_mapping=slots,
            causal=True,
            seq_lens_cpu_upper_bound=seen,
            is_prefilling=torch.ones(len(queries), dtype=torch.bool),
        )

    def run_layer(
        self,
        index: int,
        metadata: Any,
        slots: Tensor,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        before_attention: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One stock decoder layer: writes KV to slots; returns hidden, residual [n, D] and queries [n, Hq, d]."""
        seen: list[Tensor] = []

        def watch(query: Tensor, key: Tensor, value: Tensor) -> None:
            seen.append(query)
            if before_attention is not None:
                self.write(index, self._by_head(key), self._by_head(value), slots)  # as the attention is about to
                before_attention()

        with self._context(metadata, slots), self._watch(index, watch):
            hidden, residual = self.layers[index](positions, hidden, residual)
        return hidden, residual, self._by_head(seen[0])

    def project(self, index: int, slots: Tensor, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The first step of a layer: writes KV to slots; returns the queries [n, Hq, d]."""
        seen: list[Tensor] = []

        def stop(query: Tensor, key: Tensor, value: Tensor) -> None:
            self.write(index, self._by_head(key), self._by_head(value), slots)
            seen.append(query)
            raise _Stop

        with self._context(None, slots), self._watch(index, stop), suppress(_Stop):
            self.layers[index](positions, hidden, residual)
        return self._by_head(seen[0])

    def run_around(
        self,
        index: int,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    ) -> tuple[Tensor, Tensor] | None:
        """One stock decoder layer with another attention in place of its own: `attend` is given queries [n, Hq, d],
        keys and values [n, Hkv, d] and returns [n, Hq, d]; or None, and there the layer ends. The cache stays as it is,
        and so do the residual streams: these tokens have no slots.
        """
        attention = self.attentions[index]

        def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            attended = attend(*map(self._by_head, (query, key, value)))
            if attended is None:
                raise _Stop
            return attended.flatten(1)

        attention.forward = forward  # of this module object alone, until the layer is done
        try:
            with self._context(None, torch.full_like(positions, NO_SLOT)):
                after: tuple[Tensor, Tensor] = self.layers[index](positions, hidden, residual)
                return after
        except _Stop:
            return None
        finally:
            del attention.forward

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
        keys, values = self._content(self.attentions[index], blocks)  # [b', H, N, d]
        return tuple(x.transpose(1, 2).flatten(0, 1).index_select(0, local) for x in (keys, values))  # type: ignore[return-value]

    def write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [n, Hkv, d] in these slots, packed as the backend wants them."""
        attention = self.attentions[index]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] in every layer: kernels multiply the unused tail of a block, NaN included."""
        self._clear(self.attentions, blocks)

    def clear_drafts(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [b] of the draft model, which must not see what others have left there."""
        self._clear(self.attentions[self.num_layers :], blocks)

    def _clear(self, attentions: Iterable[Any], blocks: Tensor) -> None:
        blocks = self._kernel_blocks(blocks.to(self.device)[None])[0]
        for attention in attentions:
            attention.kv_cache.index_fill_(0, blocks, 0)

    def agree(self, scores: Tensor, reduction: str) -> Tensor:
        """Scores float32 [n] of this rank's heads -> sum or max over all heads, the same on every rank."""
        if get_tensor_model_parallel_world_size() == 1:
            return scores
        group = get_tp_group()
        gathered = group.all_gather(scores.to(self.device)[None], dim=0)  # [ranks, n]
        return gathered.sum(0) if reduction == "sum" else gathered.amax(0)

    def _content(self, attention: Any, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks, [b', H, N, d]; the logical shape of every cache is [B, H, N, 2 d]."""
        taken = attention.kv_cache.index_select(0, self._kernel_blocks(blocks[None])[0])
        if not current_platform.is_cpu():
            return taken[..., : attention.head_size], taken[..., attention.head_size :]
        return unpack(taken, attention.head_size, attention.isa)

    def _kernel_blocks(self, blocks: Tensor) -> Tensor:
        """Blocks of the KV cache manager [r, b] -> those of the attention kernel, which may be smaller."""
        ratio = self.block_size // self._kernel_block_size
        if ratio == 1:
            return blocks
        return (blocks[..., None] * ratio + torch.arange(ratio).to(blocks)).flatten(1)

    def _check_layout(self) -> None:
        """Write to the null block, which nothing reads, and read it back."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.block_size, self.num_kv_heads, self.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(self.attentions[0].kv_cache) for _ in range(2))
        slots = torch.arange(self.block_size, device=self.device)
        self.write(0, keys, values, slots)
        again = self.read(0, slots)
        if not (torch.equal(again[0], keys) and torch.equal(again[1], values)):
            name = type(self.attentions[0].impl).__name__
            raise UnsupportedConfiguration(f"KVGraft cannot read the KV cache layout of {name}")

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], -1, self.head_dim)

    @contextmanager
    def _context(self, metadata: Any, slots: Tensor) -> Iterator[None]:
        names = [attention.layer_name for attention in self.attentions]
        by_layer = dict.fromkeys(names, metadata) if metadata is not None else None
        with set_forward_context(
            by_layer,
            self.config,
            num_tokens=slots.numel(),
            slot_mapping=dict.fromkeys(names, slots),
            skip_compiled=True,
        ):
            yield

    @contextmanager
    def _watch(self, index: int, seen: Callable[..., None]) -> Iterator[None]:
        """Show a layer's queries, keys and values to `seen`. The hook is gone afterwards: no compiled graph has it."""
        hook = self.attentions[index].register_forward_pre_hook(lambda _, given: seen(*given))
        try:
            yield
        finally:
            hook.remove()
