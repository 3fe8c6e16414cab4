"""Recoveries head by head: vLLM's layers in three steps, with our attention kernel in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch
from torch import Tensor

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout, joined
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.prefill.context import Heads, Hidden
from kvgraft.prefill.device_tokens import are_equal
from kvgraft.vllm.chunks import PrefillChunk
from kvgraft.vllm.layers import entering
from kvgraft.vllm.prefill import PROJECT, VllmPrefill
from kvgraft.vllm.row_chunks import RowChunks

# Attention is about a quarter of a layer's work, the feed-forward part half.
ATTEND, FEED = 4, 2


@dataclass
class Projected:
    """Projections of some tokens at one layer, as computed.

    Attributes:
        query: [n, Hq, d].
        keys, values: [n, Hkv, d].
        slots: int64 [groups, n].
    """

    index: int
    hidden: Hidden
    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor


class HeadwisePrefill(VllmPrefill):
    """One recovery of one prompt, head by head (RedKnot 4.2).

    No stock kernel can limit some heads to sinks and a window, so our kernel computes these heads.
    The other heads attend through vLLM's kernel where it accepts a subset of a cache's heads. In
    addition to `VllmPrefill`, a recovery holds 6 Hkv d numbers per token: keys and values as
    computed, with reused ones, and as copied for our kernel.

    Args:
        head_map: classes of this rank's KV heads.
        given: arguments of `VllmPrefill`.
    """

    head_map: HeadMap
    _rows: "HeadwiseRows"

    def __init__(self, head_map: HeadMap, *given: Any) -> None:
        super().__init__(*given)
        if len(self.plan.lengths) != 1:
            raise ValueError(f"{len(self.plan.lengths)} prompts: heads choose for one")
        self.head_map = head_map
        self._projected: Projected | None = None
        # layer, keys and values [T, Hkv, d] as the cache has them
        self._now: tuple[int, Tensor, Tensor] | None = None
        self._rows = HeadwiseRows(
            head_map, self._host, self.plan, self._tables, self._known_slots, self._slots
        )

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        found = self._projected
        if found is None or found.index != index or found.hidden is not hidden:
            found = self._projected = self._project(index, hidden)
        with self._timed(self._stage(hidden)):
            # Free the KV of the previous layer before new KV is computed.
            self._now = None
            keys, values = self._with_grafts(found, reused, kept)
            for chunk in self._rows.of(hidden.where):
                rows = chunk.rows
                self._host.store_layer(index, keys[rows], values[rows], chunk.slots)
            self._now = self._whole(found, keys, values)
        self._query = (index, hidden.where, found.query)

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        computed_at, where, query = self._last_query()
        if computed_at != index or not are_equal(where, hidden.tokens):
            raise ValueError(f"layer {index} has no projection of these tokens")

        # Tables leave out blocks of local heads only, so these see their windows under every
        # policy.
        if self.leaves_out:
            local = tuple(map(or_, local, self.head_map.heads(index, HeadClass.LOCAL)))

        stage, states, count = self._stage(hidden), torch.empty_like(hidden.states), len(local)
        self._projected, heads = None, LayerHeads(tuple(range(count)), (0,) * count, local)
        copied = [head for head in range(count) if local[head] or not self._host.attends_by_head]

        with self._timed(stage):
            pools = (
                [rows.transpose(0, 1)[copied].contiguous() for rows in self._kv_now(index)]
                if copied
                else []
            )

        for chunk, layout in zip(self._rows.of(hidden.where), self._rows.layouts, strict=True):
            if self._budget.spend(self._budget.layer(chunk.known_positions) / ATTEND):
                self._rows.forget_metadata()
            with self._timed(stage):
                attended = self._attended(index, chunk, layout, query[chunk.rows], heads, pools)
                before = hidden.states[chunk.rows].unbind(1)
                states[chunk.rows, 0], states[chunk.rows, 1] = self._host.add_attention(
                    index, attended, *before
                )
            if len(self._rows.layouts) > 1:
                layout.give_room_back()

        self.computed += self._rows.counts
        return hidden.with_states(states)

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        stage, before = self._stage(hidden), hidden.states
        known, rows = self.plan.positions[where], where[hidden.where].nonzero()[:, 0]
        positions = known.to(before.device)
        after = torch.empty_like(before) if len(rows) == len(before) else before.clone()

        for first in range(0, len(rows), self._host.max_rows):
            part = slice(first, first + self._host.max_rows)
            taken = part if len(rows) == len(before) else rows[part].to(before.device)
            self._budget.spend(self._budget.layer(known[part]) / FEED)
            with self._timed(stage):
                halves = (half[taken].contiguous() for half in before.unbind(1))
                after[taken, 0], after[taken, 1] = self._host.feed_forward(
                    index, positions[part], *halves
                )

        after_layer = hidden.with_states(after)
        if index == self.num_layers - 1:
            self._enter(self.num_layers, after_layer)

        return after_layer

    def keys(self, index: int, where: Tensor) -> Tensor:
        if self._now is None or self._now[0] != index:
            return super().keys(index, where)
        return self._now[1][where.to(self._host.device)]

    def _keys_at(self, index: int, slots: Tensor) -> Tensor:
        # These are the slots of the whole prompt.
        if slots.shape[1] == self.plan.num_tokens:
            return self._kv_now(index)[0]
        return super()._keys_at(index, slots)

    def sum_counts(self) -> None:
        """Sum the counts of all ranks. KV heads that several ranks have are counted on each."""
        for counts in self.counts:
            # A sorted order is the same on every rank.
            names = sorted(counts)
            summed = self.over_heads(torch.tensor([float(counts[name]) for name in names]))
            for name, total in zip(names, summed.tolist(), strict=True):
                counts[name] = int(total)

    def _project(self, index: int, hidden: Hidden) -> Projected:
        """Return the projections of some tokens at a layer, chunk by chunk."""
        self._enter(index, hidden)
        parts = []
        for chunk in self._rows.of(hidden.where):
            self._budget.spend(self._budget.layer(chunk.known_positions) / PROJECT)
            with self._timed(self._stage(hidden)):
                before = entering(index, hidden.states[chunk.rows].unbind(1))
                parts.append(self._host.heads_of(index, chunk.slots, chunk.positions, *before))
        query, keys, values = (joined(rows) for rows in zip(*parts, strict=True))
        return Projected(index, hidden, query, keys, values, self._slots_of(hidden.where))

    def _with_grafts(self, found: Projected, reused: Heads, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, Hkv, d] to store, computed or reused.

        Reused heads take the cached KV of the tokens in `kept`.
        """
        rows = (
            (self.grafted_everywhere & kept)[found.hidden.where]
            .nonzero()[:, 0]
            .to(found.slots.device)
        )
        if not any(reused) or not rows.numel():
            return found.keys, found.values

        where = rows[:, None], torch.tensor(reused, device=rows.device).nonzero()[:, 0]
        grafts = self._host.read_layer_again(found.index, found.slots[:, rows])
        keys, values = (
            computed.index_put(where, old[:, where[1]].to(computed.dtype))
            for computed, old in zip((found.keys, found.values), grafts, strict=True)
        )
        return keys, values

    def _whole(
        self, found: Projected, keys: Tensor, values: Tensor
    ) -> tuple[int, Tensor, Tensor] | None:
        """Return the layer and the keys and values [T, Hkv, d] of the whole prompt.

        Args:
            keys, values: [n, Hkv, d], those that were just stored.

        Returns:
            None if the cache rounds its numbers, so that they must be read from it.
        """
        where = found.hidden.where
        if self._host.rounds:
            return None
        if bool(where.all()):
            return found.index, keys, values

        others = self._kv_at(found.index, self._slots_of(~where))
        here, there = (mask.nonzero()[:, 0].to(keys.device) for mask in (where, ~where))
        whole_keys, whole_values = (
            old.new_empty(len(where), *old.shape[1:])
            .index_copy_(0, there, old)
            .index_copy_(0, here, new)
            for old, new in zip(others, (keys, values), strict=True)
        )
        return found.index, whole_keys, whole_values

    def _kv_now(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the prompt's keys and values [T, Hkv, d] at a layer."""
        if self._now is not None and self._now[0] == index:
            return self._now[1:]
        [slots] = self._slots
        return self._kv_at(index, slots[:, : self.plan.num_tokens])

    def _attended(
        self,
        index: int,
        chunk: PrefillChunk,
        layout: AttentionLayout,
        query: Tensor,
        heads: LayerHeads,
        pools: Sequence[Tensor],
    ) -> Tensor:
        """Return the attention [n, Hq, d] of a chunk's queries.

        Args:
            pools: keys and values [h, T, d] of the heads that our kernel computes: all heads, or
                those with windows.
        """
        if not self._host.attends_by_head:
            return segpaged_attention(query, pools[0], pools[1], heads, layout, self._scale)

        # [n, Hkv, G, d]
        queries = query.unflatten(1, (len(heads.local), -1))
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for head_set in heads.whole:
            metadata, part = self._metadata_of(index, chunk, len(head_set.heads)), head_set.streams
            found = self._host.attend_heads(index, part, queries[:, part].flatten(1, 2), metadata)
            output[:, part] = found.unflatten(1, (len(head_set.heads), -1))

        if heads.windowed:
            count = len(heads.windowed)
            every = LayerHeads(tuple(range(count)), (0,) * count, (True,) * count)
            asking = queries[:, heads.windowed].flatten(1, 2)
            found = segpaged_attention(asking, pools[0], pools[1], every, layout, self._scale)
            output[:, heads.windowed] = found.unflatten(1, (count, -1))

        return output.flatten(1, 2)

    def _metadata_of(self, index: int, chunk: PrefillChunk, num_heads: int) -> Any:
        """Return vLLM's metadata of a chunk for `num_heads` KV heads, built once per chunk."""
        # The layer has one attention layer, so its index is the same.
        group = self._host.group_of[index]
        key = group, chunk.rows.start, num_heads
        if key not in self._rows.head_metadata:
            common = self._host.common_metadata(chunk.runs, self._tables[group], chunk.slots[group])
            self._rows.head_metadata[key] = self._host.head_metadata(index, common, num_heads)
        return self._rows.head_metadata[key]


class HeadwiseRows(RowChunks):
    """`RowChunks` whose KV heads attend separately.

    Args:
        head_map: classes of this rank's KV heads.
        given: arguments of `RowChunks`.

    Attributes:
        layouts: by chunk, the rows that windowed heads attend to.
        head_metadata: by (group, first row of a chunk, number of KV heads).
    """

    def __init__(self, head_map: HeadMap, *given: Any) -> None:
        super().__init__(*given)
        self._sees = head_map.sinks, head_map.window
        self.layouts: list[AttentionLayout] = []
        self.head_metadata: dict[tuple[int, int, int], Any] = {}

    def forget_metadata(self) -> None:
        super().forget_metadata()
        self.head_metadata.clear()

    def cut(self, where: Tensor, *, splits: bool = False) -> list[PrefillChunk]:
        """Return new chunks of one prompt as `RowChunks` does, never split by run length."""
        chunks = super().cut(where)
        # rows of the tokens in the pools that `attend` copies
        places = torch.arange(self._plan.num_tokens, device=self._host.device)[None]
        positions = [[chunk.known_positions] for chunk in chunks]
        self.layouts = [AttentionLayout.of(own, [places], *self._sees) for own in positions]
        self.head_metadata.clear()
        return chunks
