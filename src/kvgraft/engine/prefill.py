"""The native host's side of the prefill protocol: policies run on the paged pool and the decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.kernels.dispatch import align_copy, varlen_attention
from kvgraft.kernels.layout import VarlenLayout
from kvgraft.kv.cache import KVCache
from kvgraft.prefill.context import Hidden, Reduction
from kvgraft.prefill.paged import PagedPrefill
from kvgraft.prefill.plan import Plan


class Rows:
    """Everything that depends only on which tokens a layer computes, made once and used by all its layers."""

    def __init__(self, where: Tensor, positions: Sequence[Tensor], slots: Sequence[Tensor], decoder: Decoder) -> None:
        self.where = where
        self.counts = torch.tensor([p.numel() for p in positions])  # per prompt
        self.seen = torch.tensor([int((p + 1).sum()) for p in positions])  # keys visible to all its queries
        self.layout = VarlenLayout.of(positions, slots)
        self.cos, self.sin = decoder.config.rope.table(self.layout.query_positions)


class NativePrefill(PagedPrefill):
    """One prefill pass of the native engine.

    Args:
        token_ids: int64 [T], the prompts of `plan` end to end.
        slots: per prompt, int64 slots of its positions (at least its length).

    Attributes:
        flops: int64, per prompt the floating-point operations of all layers and scores.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, plan: Plan, token_ids: Tensor, slots: Sequence[Tensor]
    ) -> None:
        super().__init__(plan, slots, decoder.config.head_dim**-0.5)
        self.num_layers = decoder.config.num_layers
        self.num_kv_heads = decoder.config.num_kv_heads
        self._decoder = decoder
        self._cache = cache
        self._token_ids = token_ids
        self._rows: Rows | None = None
        self.flops = torch.zeros(len(plan.lengths), dtype=torch.int64)

    def embed(self, where: Tensor) -> Hidden:
        return Hidden(self._decoder.embed(self._token_ids[where].to(self._decoder.device)), where)

    def graft(self, layers: range) -> None:
        if not self.plan.graft_targets.numel():
            return
        with self._timed("align"):
            source, target, shifts = self._graft_slots()
            cos, sin = self._decoder.config.rope.table(shifts)
            align_copy(self._cache.keys, self._cache.values, layers, source, target, cos, sin)

    def layer(self, index: int, hidden: Hidden) -> Hidden:
        with self._timed(self._stage(hidden)):
            rows, query = self._project(index, hidden)
            keys, values = self._cache.keys[index], self._cache.values[index]
            attended = varlen_attention(query, keys, values, rows.layout, self._scale).flatten(1)  # [n, Hq * d]
            self.computed += rows.counts
            config = self._decoder.config
            self.flops += rows.counts * config.layer_flops + rows.seen * config.attention_flops
            return hidden.with_states(self._decoder.finish(index, hidden.states, attended))

    def project(self, index: int, hidden: Hidden) -> None:
        with self._timed("select"):
            rows, _ = self._project(index, hidden)
            self.flops += rows.counts * self._decoder.config.project_flops

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """As in the protocol; its logits are counted, too."""
        grafted = torch.tensor([bool(self.plan.grafted[prompt].any()) for prompt in self.plan.prompts])
        seen = torch.tensor([int((positions + 1).sum()) for positions in self._rows_of(queries)])
        self.flops += grafted * seen * (self._decoder.config.attention_flops // 2)
        return super().scores(index, queries, reduction)

    def _keys_at(self, index: int, slots: Tensor) -> Tensor:
        return self._cache.keys[index][slots]

    def _values_at(self, index: int, slots: Tensor) -> Tensor:
        return self._cache.values[index][slots]

    def _project(self, index: int, hidden: Hidden) -> tuple[Rows, Tensor]:
        if self._rows is None or not self._rows.where.equal(hidden.where):
            self._rows = Rows(hidden.where, self._rows_of(hidden.where), self._slots, self._decoder)
        rows = self._rows
        query, keys, values = self._decoder.project(index, hidden.states, rows.cos, rows.sin)
        self._cache.write(index, rows.layout.query_slots, keys, values)
        self._query = (index, hidden.where, query)
        return rows, query
