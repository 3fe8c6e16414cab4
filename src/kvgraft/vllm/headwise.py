"""Recoveries that work head by head: vLLM's layers in three steps, with our attention in the place of its own."""

from collections.abc import Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout, LayerHeads
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.prefill.context import Heads, Hidden
from kvgraft.vllm.layers import entering
from kvgraft.vllm.prefill import PROJECT, PrefillChunk, VllmPrefill

ATTEND, FEED = 4, 2  # these steps of a layer do a quarter and half of its work


class HeadwisePrefill(VllmPrefill):
    """One recovery of one prompt, head by head (RedKnot 4.2).

    The attention reads a copy of a layer's keys and values, since no stock kernel lets some heads see sinks and window
    only. Beside what `VllmPrefill` holds a token takes 4 Hkv d numbers: keys and values as computed, and as copied.

    Args:
        head_map: of the KV heads of this rank.
        given: as `VllmPrefill` takes them.
    """

    head_map: HeadMap

    def __init__(self, head_map: HeadMap, *given: Any) -> None:
        super().__init__(*given)
        if len(self.plan.lengths) != 1:
            raise ValueError(f"{len(self.plan.lengths)} prompts: heads choose for one")
        self.head_map = head_map
        self._projected: tuple[int, Hidden, Sequence[Tensor]] | None = None  # layer, input, queries, keys and values
        self._written: tuple[int, Tensor, list[tuple[Tensor, Tensor]]] = (-1, self.plan.fresh, [])  # layer, tokens, KV
        self._layouts: list[AttentionLayout] = []  # of the chunks

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        if self._projected is None or self._projected[0] != index or self._projected[1] is not hidden:
            self._projected = (index, hidden, self._heads_of(index, hidden))
        query, keys, values = self._projected[2]
        keeps = (self.grafted_everywhere & kept)[hidden.where][:, None, None] & torch.tensor(reused)[:, None]
        written = []
        for chunk in self._chunks_of(hidden.where):
            with self._timed(self._stage(hidden)):
                slots, new_keys, new_values = chunk.slots, keys[chunk.rows], values[chunk.rows]
                old = self._host.read_layer(index, slots) if any(reused) else None
                if self._host.is_quantised:  # rounded as vLLM does
                    self._host.store_layer(index, new_keys, new_values, slots)
                    new_keys, new_values = self._host.read_layer(index, slots)
                if old is not None:
                    mine = keeps[chunk.rows].to(slots.device)
                    new_keys, new_values = torch.where(mine, old[0], new_keys), torch.where(mine, old[1], new_values)
                if old is not None or not self._host.is_quantised:
                    self._host.write_layer(index, new_keys, new_values, slots)
                written.append((new_keys, new_values))
        self._written = (index, hidden.where, written)
        self._query = (index, hidden.where, query)

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        computed_at, where, query = self._last_query()
        if computed_at != index or not where.equal(hidden.where):
            raise ValueError(f"layer {index} has no projection of these tokens")
        if self.leaves_out:  # of local heads, so they see their windows whatever the policy says
            local = tuple(map(or_, local, self.head_map.heads(index, HeadClass.LOCAL)))
        stage, states, count = self._stage(hidden), torch.empty_like(hidden.states), len(local)
        heads = LayerHeads(tuple(range(count)), (0,) * count, local)
        with self._timed(stage):
            keys, values = (rows.transpose(0, 1).contiguous() for rows in self._cached(index))  # [Hkv, T, d]
        for chunk, layout in zip(self._chunks_of(hidden.where), self._layouts, strict=True):
            self._spend(chunk.positions.numel() // ATTEND)
            with self._timed(stage):
                attended = segpaged_attention(query[chunk.rows], keys, values, heads, layout, self._scale)
                after = self._host.add_attention(index, attended, *hidden.states[chunk.rows].unbind(1))
                states[chunk.rows] = torch.stack(after, dim=1)
        self.computed += self._counts
        return hidden.with_states(states)

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        stage, part = self._stage(hidden), hidden.only(where).states
        positions = self.plan.positions[where].to(part.device)
        states, fed = hidden.states.clone(), torch.empty_like(part)
        for first in range(0, len(part), self._host.max_rows):
            rows = slice(first, first + self._host.max_rows)
            self._spend(len(part[rows]) // FEED)
            with self._timed(stage):
                before = (half.contiguous() for half in part[rows].unbind(1))
                fed[rows] = torch.stack(self._host.feed_forward(index, positions[rows], *before), dim=1)
        states[where[hidden.where]] = fed
        after_layer = hidden.with_states(states)
        if index == self.num_layers - 1:
            self._enter(self.num_layers, after_layer)
        return after_layer

    def sum_counts(self) -> None:
        """Make counts of this rank's heads those of all; heads that several ranks have count on each."""
        for counts in self.counts:
            names = sorted(counts)  # the same on every rank
            summed = self._host.agree(torch.tensor([float(counts[name]) for name in names]), "sum")
            for name, total in zip(names, summed.tolist(), strict=True):
                counts[name] = int(total)

    def _cached(self, index: int) -> Sequence[Tensor]:
        """Keys and values [T, Hkv, d] as they lie in the cache, which is not read if all of them were just written."""
        at, where, written = self._written
        if at == index and bool(where.all()) and not self._host.is_quantised:
            return [torch.cat(parts) for parts in zip(*written, strict=True)]
        [slots] = self._slots
        return self._kv_at(index, slots[:, : self.plan.num_tokens])

    def _heads_of(self, index: int, hidden: Hidden) -> Sequence[Tensor]:
        """Queries [n, Hq, d], keys and values [n, Hkv, d] of these tokens."""
        self._enter(index, hidden)
        parts = []
        for chunk in self._chunks_of(hidden.where):
            self._spend(chunk.positions.numel() // PROJECT)
            with self._timed(self._stage(hidden)):
                before = entering(index, hidden.states[chunk.rows])
                parts.append(self._host.heads_of(index, chunk.slots, chunk.positions, *before))
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]

    def _cut(self, positions: Sequence[Tensor]) -> list[PrefillChunk]:
        chunks, sees = super()._cut(positions), (self.head_map.sinks, self.head_map.window)
        places = torch.arange(self.plan.num_tokens, device=self._host.device)[None]  # in what `attend` copies
        self._layouts = [AttentionLayout.of([positions[0][chunk.rows]], [places], *sees) for chunk in chunks]
        return chunks
