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
from kvgraft.engine.flops import FlopCounts, SeenKeys
from kvgraft.kernels.dispatch import align_copy, has_triton, segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout, Context, PassRows
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadMap
from kvgraft.kv.rope import rotate
from kvgraft.prefill.context import DeviceHidden, Heads, Hidden, Reduction
from kvgraft.prefill.device_tokens import DeviceTokens, TokenSet, are_equal
from kvgraft.prefill.paged import PagedPrefill
from kvgraft.prefill.spreading import DeviceSpreading, Spreading
from kvgraft.prefill.spreading_rows import SpreadingRows


class Rows:
    """Data that depends only on which tokens a layer computes, made once for all layers."""

    def __init__(
        self,
        tokens: TokenSet,
        contexts: Sequence[tuple[int, Context]],
        num_prompts: int,
        decoder: Decoder,
        windows: tuple[int, int],
        on_device: PassRows,
    ) -> None:
        self.tokens = tokens
        self.counts, whole, local = np.zeros((3, num_prompts), np.int64)
        unread = []
        for prompt, context in contexts:
            self.counts[prompt] += context.positions.numel()
            if context.bound is None:
                whole[prompt] = int((context.positions + 1).sum())
                local[prompt] = int((context.positions + 1).clamp(max=sum(windows)).sum())
            else:
                unread += [prompt] * context.positions.numel()
        found = (on_device.positions[-len(unread) :], np.array(unread)) if unread else None
        self.seen = SeenKeys(whole, local, found)
        own = tuple(context for _, context in contexts)
        self.layout = AttentionLayout(own, *windows, on_device)
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
        flops: floating-point operations of each prompt.
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
        self.flops = FlopCounts(len(plan.lengths), sum(self._windows))

    @property
    def chooses_on(self) -> torch.device | None:
        device = self._decoder.device
        # Kernels of the CPU must know the positions of all queries.
        return device if has_triton(device.type) else None

    def embed(self, where: TokenSet) -> Hidden:
        if isinstance(where, DeviceTokens):
            return DeviceHidden(self._decoder.embed(self._about(where)[-1]), where)
        [tokens] = upload(self._decoder.device, self.token_ids[where])
        return Hidden(self._decoder.embed(tokens), where)

    def settled(self, tokens: TokenSet) -> TokenSet:
        return tokens

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
                self._spreading_rows(spreading, hidden.tokens).apply(self._cache.pools, heads)
            attended = self._attend(index, rows, query, heads)
            self.flops.ffn += rows.counts * self._decoder.config.ffn_flops(index)
            return hidden.with_states(self._decoder.after_attention(index, hidden.states, attended))

    def project(self, index: int, hidden: Hidden) -> None:
        with self._timed("select"):
            self._project(index, hidden)

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        with self._timed(self._stage(hidden)):
            self._project(index, hidden, reused, kept)

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        with self._timed(self._stage(hidden)):
            computed_at, tokens, query = self._last_query()
            is_same = are_equal(tokens, hidden.tokens)
            if computed_at != index or self._rows is None or not is_same:
                raise ValueError(f"layer {index} has no projection of these tokens")
            heads = replace(self._cache.layout.layers[index], local=local)
            attended = self._attend(index, self._rows, query, heads)
            return hidden.with_states(self._decoder.add_attention(index, hidden.states, attended))

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        with self._timed(self._stage(hidden)):
            part = hidden.only(where)
            counts = np.array(self.plan.counts_of(where))
            self.flops.ffn += counts * self._decoder.config.ffn_flops(index)
            states = hidden.states.clone()
            states[where[hidden.where]] = self._decoder.feed_forward(index, part.states)
            return hidden.with_states(states)

    def _scores(self, index: int, queries: TokenSet, reduction: Reduction) -> Tensor:
        """Compute Sparse-Q scores as the protocol defines, and count the operations of their
        logits."""
        scores = super()._scores(index, queries, reduction)
        if isinstance(queries, Tensor):
            asking = self._rows_of(queries & self._has_grafts)
            seen = np.array([int((positions + 1).sum()) for positions in asking])
            self.flops.attend(SeenKeys(seen, seen), self._score_flops)
        return scores

    def _count_scores(self, positions: Tensor, counts: np.ndarray) -> None:
        none = np.zeros_like(counts)
        asking = positions, np.repeat(np.arange(len(counts)), counts)
        self.flops.attend(SeenKeys(none, none, asking), self._score_flops)

    @property
    def _windows(self) -> tuple[int, int]:
        """Sinks and window of local heads."""
        return (self.head_map.sinks, self.head_map.window) if self.head_map else (0, 1)

    @property
    def _score_flops(self) -> int:
        return self._decoder.config.attention_flops // 2

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
        rows = self._rows
        if rows is None or not are_equal(rows.tokens, hidden.tokens):
            self._rows = rows = self._made_rows(hidden.tokens)

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
            self.flops.attention += rows.counts * self._decoder.config.project_flops

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
        self._query = (index, hidden.tokens, query)
        return rows, query

    def _made_rows(self, tokens: TokenSet) -> Rows:
        plan, device = self.plan, self._decoder.device
        known, found = (tokens, ()) if isinstance(tokens, Tensor) else (tokens.known, tokens.found)
        if isinstance(tokens, Tensor):
            given = plan.positions[tokens], tokens.nonzero()[:, 0]
            positions, places = upload(device, *given)
            slots = self._flat_slots[:, places]
        else:
            *_, positions, _ = about = self._about(tokens)
            slots = about[:-2]
        self._found.append((tokens, slots))

        contexts = [
            (number, Context(own, slots))
            for number, (own, slots) in enumerate(
                zip(self._rows_of(known), self._slots, strict=True)
            )
            if own.numel()
        ]
        first = len(positions) - sum(len(part.tokens) for part in found)
        for part in found:
            for number, count in enumerate(part.counts):
                if count:
                    own, bound = positions[first : first + count], plan.lengths[number]
                    contexts.append((number, Context(own, self._slots[number], bound)))
                    first += count

        prompts = tuple(number for number, _ in contexts)
        on_device = PassRows(positions, slots, self._stacked_slots, prompts)
        return Rows(tokens, contexts, len(plan.lengths), self._decoder, self._windows, on_device)

    def _attend(self, index: int, rows: Rows, query: Tensor, heads: LayerHeads) -> Tensor:
        """Attention of the rows, [n, Hq * d]."""
        keys, values, config = self._cache.keys, self._cache.values, self._decoder.config
        attended = segpaged_attention(query, keys, values, heads, rows.layout, self._scale).flatten(
            1
        )
        self.computed += rows.counts
        num_local = sum(heads.local)
        # operations of a query and key in one KV head
        pair = config.attention_flops // self.num_kv_heads
        self.flops.attend(rows.seen, pair * (self.num_kv_heads - num_local), pair * num_local)
        self.flops.attention += rows.counts * config.output_flops
        return attended

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots of the tokens to copy at their source and in the prompt, int64 [lists, g], and
        tables that rotate their keys, float32 [g, d / 2]."""
        targets = self._slots_of(self.plan.grafted & ~self.plan.in_place)
        segments = self.plan.segments[self.plan.graft_targets]
        table = torch.stack(self._decoder.config.rope.table(self.plan.segment_shifts))
        sources, segments, table = upload(targets.device, self._sources, segments, table)
        return sources, targets, *table[:, segments]

    @memoised
    def _about(self, tokens: DeviceTokens) -> Tensor:
        """Slots, positions and ids of these tokens: int64 [lists + 2, n]."""
        return self._about_all[:, self._indices(tokens)]

    @cached_property
    def _about_all(self) -> Tensor:
        own = torch.stack([self.plan.positions, self.token_ids])
        return torch.cat([self._flat_slots, *upload(self._decoder.device, own)])

    @memoised
    def _spreading_rows(self, spreading: Spreading, computed: TokenSet) -> SpreadingRows:
        if isinstance(spreading, DeviceSpreading) and isinstance(computed, DeviceTokens):
            num_found = int(spreading.chosen.found_counts.sum())
            found = self._indices(computed)
            found = found[len(found) - num_found :]
            given = self._sources, self._decoder.config.rope, self._flat_slots
            return SpreadingRows.of_found(spreading, found, *given)
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
