"""The native host's side of the prefill protocol: it runs policies on the paged pool and the
decoder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.engine.decoder import Decoder
from kvgraft.kernels.dispatch import align_copy, segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout, PassRows
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadMap
from kvgraft.kv.rope import rotate
from kvgraft.prefill.context import Heads, Hidden, Reduction
from kvgraft.prefill.paged import PagedPrefill
from kvgraft.prefill.spreading import Spreading
from kvgraft.prefill.spreading_rows import SpreadingRows


class Rows:
    """Data that depends only on which tokens a layer computes, made once for all layers."""

    def __init__(
        self,
        where: Tensor,
        positions: Sequence[Tensor],
        slots: Sequence[Tensor],
        decoder: Decoder,
        head_map: HeadMap | None,
        on_device: PassRows,
    ) -> None:
        self.where = where
        sinks, window = (head_map.sinks, head_map.window) if head_map else (0, 1)
        self.counts = np.array([p.numel() for p in positions])  # per prompt
        # keys that the queries of a prompt see together
        self.seen = np.array([int((p + 1).sum()) for p in positions])
        self.seen_locally = np.array(
            [int((p + 1).clamp(max=sinks + window).sum()) for p in positions]
        )
        self.layout = AttentionLayout.of(positions, slots, sinks, window, on_device)
        longest = max((context.seen for context in self.layout.contexts), default=1)
        self.cos, self.sin = decoder.config.rope.fresh_table(self.layout.query_positions, longest)


class NativePrefill(PagedPrefill):
    """One prefill pass of the native engine.

    Args:
        token_ids: int64 [T], the prompts of `plan` end to end.
        slots: per prompt, int64 [page lists, >= its length] slots of its positions.
        sources: int64 [page lists, g], where the grafted tokens lie now; -1 where a list has lost
            one.

    Attributes:
        attention_flops, ffn_flops: int64, per prompt the floating-point operations of all layers
            and scores: of the attention block with its projections, and of the FFN.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        plan: Plan,
        token_ids: Tensor,
        slots: Sequence[Tensor],
        sources: Tensor,
        head_map: HeadMap | None = None,
    ) -> None:
        super().__init__(plan, slots, decoder.config.attention_scale)
        self.num_layers = decoder.config.num_layers
        self.num_kv_heads = decoder.config.num_kv_heads
        self.head_map = head_map
        self.head_paging = cache.layout.num_local_lists > 0
        self.residual_layers = tuple(cache.residuals)
        self._decoder = decoder
        self._cache = cache
        self.token_ids = token_ids
        self._sources = sources
        self._rows: Rows | None = None
        # True once any layer has been grafted.
        self._grafted = False
        # layer, input, queries, keys and values
        self._projected: tuple[int, Hidden, tuple[Tensor, ...]] | None = None
        self.attention_flops = np.zeros(len(plan.lengths), np.int64)
        self.ffn_flops = np.zeros(len(plan.lengths), np.int64)

    def embed(self, where: Tensor) -> Hidden:
        [tokens] = upload(self._decoder.device, self.token_ids[where])
        return Hidden(self._decoder.embed(tokens), where)

    def graft(self, layers: range) -> None:
        if not self.plan.graft_targets.numel():
            return
        with self._timed("align"):
            sources, targets, cos, sin = self._moves
            # A stream holds one head of one layer.
            keys, *values = (pool[:, :, None] for pool in self._cache.pools)
            for page_list, (source, target) in enumerate(zip(sources, targets, strict=True)):
                moves: tuple[Tensor, ...] = (source, target, cos, sin)
                has = self._sources[page_list] >= 0
                if not has.all():
                    [rows] = upload(source.device, has.nonzero()[:, 0])
                    moves = tuple(part[rows] for part in moves)
                streams = self._cache.layout.streams(page_list, layers)
                align_copy(keys, values[0] if values else None, streams, *moves)
            if not self._grafted:
                for residual in self._cache.residuals.values():
                    residual[targets[0]] = residual[sources[0]]
            self._grafted = True

    def residual(self, index: int, where: Tensor) -> Hidden:
        if index not in self._cache.residuals:
            raise ValueError(
                f"no residual stream is kept at layer {index}: kept are "
                f"{list(self.residual_layers)}"
            )
        if bool((where & ~self.plan.grafted).any()):
            raise ValueError("only grafted tokens have a residual stream from before")
        return Hidden(self._cache.residuals[index][self._slots_of(where)[0]], where)

    def logits(self, hidden: Hidden) -> Tensor:
        return self._decoder.logits(hidden.states)

    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        heads = self._cache.layout.layers[index]
        with self._timed(self._stage(hidden)):
            rows, query = self._project(index, hidden)
            if spreading is not None:
                self._spreading_rows(spreading).apply(self._cache.pools, heads)
            attended = self._attend(index, rows, query, heads)
            self.ffn_flops += rows.counts * self._decoder.config.ffn_flops(index)
            return hidden.with_states(self._decoder.after_attention(index, hidden.states, attended))

    def project(self, index: int, hidden: Hidden) -> None:
        with self._timed("select"):
            self._project(index, hidden)

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        with self._timed(self._stage(hidden)):
            self._project(index, hidden, reused, kept)

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        with self._timed(self._stage(hidden)):
            computed_at, where, query = self._last_query()
            if computed_at != index or self._rows is None or not where.equal(hidden.where):
                raise ValueError(f"layer {index} has no projection of these tokens")
            heads = replace(self._cache.layout.layers[index], local=local)
            attended = self._attend(index, self._rows, query, heads)
            return hidden.with_states(self._decoder.add_attention(index, hidden.states, attended))

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        with self._timed(self._stage(hidden)):
            part = hidden.only(where)
            counts = np.array([p.numel() for p in self._rows_of(where)])
            self.ffn_flops += counts * self._decoder.config.ffn_flops(index)
            states = hidden.states.clone()
            states[where[hidden.where]] = self._decoder.feed_forward(index, part.states)
            return hidden.with_states(states)

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Compute Sparse-Q scores as the protocol defines, and count the operations of their
        logits."""
        grafted = np.array([bool(self.plan.grafted[prompt].any()) for prompt in self.plan.prompts])
        seen = np.array([int((positions + 1).sum()) for positions in self._rows_of(queries)])
        self.attention_flops += grafted * seen * (self._decoder.config.attention_flops // 2)
        return super().scores(index, queries, reduction)

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        cos, sin = self._decoder.config.rope.table(shifts.to(self._decoder.device))
        return lambda index, keys: rotate(keys, cos, sin)

    def _keys_at(self, index: int, slots: Tensor) -> Tensor:
        return self._cache.read_keys(index, slots)

    def _kv_at(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._cache.read(index, slots)

    def _add_at(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        old_keys, old_values = self._cache.read(index, slots)
        self._cache.write(index, slots, old_keys + keys, old_values + values)

    def _project(
        self, index: int, hidden: Hidden, reused: Heads = (), kept: Tensor | None = None
    ) -> tuple[Rows, Tensor]:
        if self._rows is None or not self._rows.where.equal(hidden.where):
            positions, on_device = self._rows_of(hidden.where), self._on_device(hidden.where)
            self._rows = Rows(
                hidden.where, positions, self._slots, self._decoder, self.head_map, on_device
            )

        rows = self._rows
        if (
            self._projected is None
            or self._projected[0] != index
            or self._projected[1] is not hidden
        ):
            self._projected = (
                index,
                hidden,
                self._decoder.project(index, hidden.states, rows.cos, rows.sin),
            )
            self._cache.write_residual(index, rows.layout.query_slots, hidden.states)
            self.attention_flops += rows.counts * self._decoder.config.project_flops

        query, keys, values = self._projected[2]
        if kept is not None and any(reused):
            keeps = (self._grafted_everywhere & kept)[hidden.where][:, None, None] & torch.tensor(
                reused
            )[:, None]
            old_keys, old_values = self._cache.read(index, rows.layout.query_slots)
            keeps = keeps.to(keys.device)  # [n, Hkv, 1]
            keys, values = (
                torch.where(keeps, old_keys, keys),
                torch.where(keeps, old_values, values),
            )

        self._cache.write(index, rows.layout.query_slots, keys, values)
        self._query = (index, hidden.where, query)
        return rows, query

    def _on_device(self, where: Tensor) -> PassRows:
        [positions] = upload(self._decoder.device, self.plan.positions[where])
        stacked = self._stacked_slots
        held = [number for number, prompt in enumerate(self.plan.prompts) if where[prompt].any()]
        if len(held) < len(stacked):
            stacked = stacked[upload(stacked.device, torch.tensor(held, dtype=torch.int64))[0]]
        return PassRows(positions, self._slots_of(where), stacked)

    def _attend(self, index: int, rows: Rows, query: Tensor, heads: LayerHeads) -> Tensor:
        """Attention of the rows, [n, Hq * d]."""
        keys, values, config = self._cache.keys, self._cache.values, self._decoder.config
        attended = segpaged_attention(query, keys, values, heads, rows.layout, self._scale).flatten(
            1
        )
        self.computed += rows.counts
        num_local = sum(heads.local)
        # pairs of query and key, summed over the KV heads
        seen = rows.seen * (self.num_kv_heads - num_local) + rows.seen_locally * num_local
        self.attention_flops += seen * (config.attention_flops // self.num_kv_heads)
        self.attention_flops += rows.counts * config.output_flops
        return attended

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots of the tokens to copy at their source and in the prompt, int64 [lists, g], and
        tables that rotate their keys, float32 [g, d / 2]."""
        targets = self._slots_of(self.plan.grafted & ~self.plan.in_place)
        segments = self.plan.segments[self.plan.graft_targets]
        table = self._decoder.config.rope.table(self.plan.segment_shifts)
        sources, segments, cos, sin = upload(targets.device, self._sources, segments, *table)
        return sources, targets, cos[segments], sin[segments]

    @memoised
    def _spreading_rows(self, spreading: Spreading) -> SpreadingRows:
        slots = (self._slots_of(where) for where in (spreading.anchors, spreading.copied))
        return SpreadingRows.of(
            self.plan, spreading, self._sources, self._decoder.config.rope, *slots
        )

    @cached_property
    def _grafted_everywhere(self) -> Tensor:
        """Grafted tokens whose KV every list had: bool [T]."""
        found = self.plan.grafted.clone()
        found[self.plan.graft_targets] = (self._sources >= 0).all(0)
        return found
