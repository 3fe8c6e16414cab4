"""vLLM's side of the prefill protocol: policies run through the stock decoder layers."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.costs import Costs
from kvgraft.core.plan import Plan
from kvgraft.kernels.layout import joined
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kv.rope import Rope
from kvgraft.prefill.context import DeviceHidden, Hidden, Reduction
from kvgraft.prefill.cost_calibration import calibrate
from kvgraft.prefill.device_tokens import DeviceTokens, TokenSet
from kvgraft.prefill.paged import PagedPrefill
from kvgraft.prefill.spreading import Spreading
from kvgraft.prefill.spreading_rows import SpreadingRows
from kvgraft.vllm.chunks import LayerOutput, PrefillChunk, halves
from kvgraft.vllm.compat.alignment import Alignment
from kvgraft.vllm.compat.model import TOKEN_ID_DTYPE, ModelHost
from kvgraft.vllm.compat.pools import PoolLayout
from kvgraft.vllm.compat.ranks import over_ranks
from kvgraft.vllm.groups import NULL_PAGE
from kvgraft.vllm.layers import embed, entering
from kvgraft.vllm.recovery_budget import RecoveryBudget
from kvgraft.vllm.row_chunks import RowChunks

# (layer, keys) -> rotated keys
Turning = Callable[[int, Tensor], Tensor]
# tokens to copy at a time, to limit memory
COPIED_TOKENS = 4096
# Projecting queries, keys and values is about a quarter of a layer's work.
PROJECT = 4


class VllmPrefill(PagedPrefill):
    """One recovery inside vLLM. Hidden states are [n, 2, D]: vLLM's hidden state and residual.

    Rows go through a layer in chunks of at most `host.max_rows`, for which vLLM has profiled its
    own memory. In addition, a recovery of T tokens holds at most 4 D + 2 Hq d numbers per token.

    Args:
        host: the loaded model and its cache.
        plan: plan of the prompts.
        token_ids: int64 [T], the prompts of `plan` end to end.
        tables: per prompt its physical blocks by group, int [b] each.
        source_pages: int64 [n, groups]: pages to graft from, with their counterparts in the other
            groups; `NULL_PAGE` where local heads have lost theirs.
        budget: work that may be done before other work of vLLM must run; unlimited by default.
    """

    def __init__(
        self,
        host: ModelHost,
        plan: Plan,
        token_ids: Tensor,
        tables: Sequence[Sequence[np.ndarray]],
        source_pages: np.ndarray,
        budget: RecoveryBudget | None = None,
    ) -> None:

        offsets = np.arange(plan.block_size)

        # by group, then by prompt
        self._tables = list(zip(*tables, strict=True))
        by_prompt = [
            (np.stack(own)[..., None] * plan.block_size + offsets).reshape(len(own), -1)
            for own in tables
        ]
        known = [torch.from_numpy(slots) for slots in by_prompt]
        super().__init__(plan, upload(host.device, *known), host.scale)

        own = (slots[:, :length] for slots, length in zip(known, plan.lengths, strict=True))

        # slots of all tokens, int64 [groups, T] on the CPU
        self._known_slots = torch.cat(list(own), dim=1)
        self._source_pages = torch.from_numpy(np.unique(source_pages, axis=0))
        self.num_layers = host.num_layers
        self.num_kv_heads = host.num_kv_heads
        self.head_paging = host.head_paging
        self.residual_layers = host.residuals.residual_layers

        longest = max(plan.lengths)
        windows = enumerate(host.windows)
        self.local_layers = frozenset(
            index for index, window in windows if window is not None and window < longest
        )

        self._host = host
        self.token_ids = token_ids
        self._budget = budget or RecoveryBudget(host.num_layers)
        self._rows = RowChunks(host, plan, self._tables, self._known_slots, self._slots)

        # what enters each layer that the drafter reads
        self._entered: dict[int, Hidden] = {}

        # layers whose grafts are copied
        self._grafted: set[int] = set()

    @property
    def chooses_on(self) -> torch.device | None:
        """The device, if our kernel computes scattered rows in all layers, and no other part of
        vLLM needs to know them."""
        host = self._host
        is_known = (
            host.device.type == "cpu"
            or host.drafter is not None
            or host.residuals.residual_layers
            or any(group.pool is None for group in host.attention.groups)
        )
        return None if is_known else host.device

    def embed(self, where: TokenSet) -> Hidden:
        if isinstance(where, DeviceTokens):
            [tokens] = upload(self._host.device, self.token_ids)
            return DeviceHidden(embed(self._host, tokens[self._indices(where)]), where)
        return Hidden(embed(self._host, self.token_ids[where]), where)

    def _chunks(self, tokens: TokenSet) -> list[PrefillChunk]:
        if isinstance(tokens, Tensor) or self._rows.has(tokens):
            return self._rows.of(tokens)
        positions = self._indices(tokens)
        if len(self.plan.lengths) > 1:
            positions = upload(positions.device, self.plan.positions)[0][positions]
        return self._rows.of_found(tokens, positions, self._slots_of(tokens))

    def graft(self, layers: range) -> None:
        self._align([at for index in layers for at in self._host.attentions_of(index)])
        if self.residual_layers and self.plan.graft_targets.numel() and not self._grafted:
            source, target, _ = self._graft_slots
            for old, new in zip(
                source.split(COPIED_TOKENS), target[0].split(COPIED_TOKENS), strict=True
            ):
                self._host.residuals.copy(old, new)
        self._grafted.update(layers)

    def _align(self, attentions: Sequence[int]) -> None:
        """Copy grafted KV of these attention layers, and rotate the keys to their positions."""
        if not self.plan.graft_targets.numel():
            return

        source, targets, shifts = self._graft_slots
        size = Alignment.most_tokens(self._host)
        for group, target in enumerate(targets):
            own = [at for at in attentions if self._host.group_of[at] == group]
            slots = self._with_source(group, self._counterparts(group, source), target, shifts)
            for tokens in zip(*(x.split(size) for x in slots), strict=True) if own else ():
                alignment = Alignment(self._host, *tokens)
                for part in alignment.parts(own):
                    self._budget.spend(self._budget.copy(tokens[0].numel(), len(part)))
                    with self._timed("align"):
                        alignment(part)

    def draft(self, hidden: Hidden) -> None:
        """Fill the cache of the draft model, if there is one.

        Its keys and values of grafted tokens are aligned. Those of tokens that left the last layer
        are computed. vLLM computes the last token of each prompt.
        """
        drafter = self._host.drafter
        if drafter is None:
            return

        self._align(self._host.draft_attentions)

        where = hidden.where.clone()
        where[[prompt.stop - 1 for prompt in self.plan.prompts]] = False
        entered = [self._entered[index] for index in drafter.entering]

        for before in entered:
            where &= before.where

        taken = entered or [hidden] * drafter.takes_hidden
        tokens, states = (
            drafter.inputs_of(self.token_ids, where),
            [before.only(where).states for before in taken],
        )
        for chunk in self._rows.cut(where):
            self._budget.spend(self._budget.layer(chunk.known_positions))
            given = None
            if entered:
                given = torch.cat([layer[chunk.rows].sum(1) for layer in states], dim=-1)
            elif states:
                given = self._host.normed(states[0][chunk.rows])
            common = self._host.common_metadata(chunk.runs, self._tables[0], chunk.slots[0])
            drafter.run(
                tokens[chunk.rows].to(chunk.positions.device),
                chunk.positions,
                chunk.slots[0],
                common,
                given,
            )

    def _enter(self, index: int, hidden: Hidden) -> None:
        """Keep what enters a layer for the drafter. A policy may compute a layer in parts."""
        if self._host.drafter is None or index not in self._host.drafter.entering:
            return
        known = self._entered.get(index)
        if known is not None and (others := known.where & ~hidden.where).any():
            hidden = hidden.joined(known.only(others))
        self._entered[index] = hidden

    def _counterparts(self, group: int, slots: Tensor) -> Tensor:
        """Return the slots int64 [n] of another group for source slots of the main group."""
        if group == 0:
            return slots
        pages = self._source_pages.to(slots.device)
        found = torch.searchsorted(pages[:, 0].contiguous(), slots // self.block_size)
        return pages[found, group] * self.block_size + slots % self.block_size

    def _with_source(self, group: int, source: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the grafted tokens [n] that a group still has at their source."""
        if not bool((self._source_pages[:, group] == NULL_PAGE).any()):
            return source, *others
        has = source // self.block_size != NULL_PAGE
        return tuple(part[has] for part in (source, *others))

    @cached_property
    def grafted_everywhere(self) -> Tensor:
        """Grafted tokens whose KV every group had at their source, bool [T]."""
        found, lost = self.plan.grafted.clone(), (self._source_pages == NULL_PAGE).any(1)
        if bool(lost.any()):
            pages, sources = (
                self._source_pages[:, 0].contiguous(),
                self.plan.graft_sources // self.block_size,
            )
            found[self.plan.graft_targets] = ~lost[torch.searchsorted(pages, sources)]
        return found

    def residual(self, index: int, where: Tensor) -> Hidden:
        return Hidden(self._host.residuals.read(index, self._slots_of(where)[0]), where)

    def logits(self, hidden: Hidden) -> Tensor:
        # After `run` in one forward pass, the states have passed the final norm already.
        states = hidden.states
        return self._host.logits(states if states.ndim == 2 else self._host.normed(states))

    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        before_attention: Callable[[], None] | None = None
        if spreading is not None:
            self._graft_for_spreading(index)
            before_attention = partial(self._spread, index, spreading)

        self._enter(index, hidden)
        tokens = hidden.tokens
        stage, chunks = self._stage(hidden), self._chunks(tokens)

        # With several chunks, the KV of all of them must be written before any changes are spread.
        if before_attention is not None and len(chunks) > 1:
            self.project(index, hidden)
            before_attention()
            before_attention = None

        rebuilds = len(chunks) > 1 and (
            self._host.is_latent or self._host.attention.max_long_runs is not None
        )
        parts, queries = [], []
        for number, chunk in enumerate(chunks):
            if self._budget.spend(self._budget.layer(chunk.known_positions)) or rebuilds:
                self._rows.forget_metadata()
            with self._timed(stage):
                metadata, before = (
                    self._rows.metadata(chunk),
                    entering(index, halves(hidden, number, chunk)),
                )
                after = self._host.run_layer(
                    index,
                    metadata,
                    chunk.slots,
                    chunk.positions,
                    *before,
                    before_attention=before_attention,
                )
                parts.append(after[:2])
                queries.append(after[2])

        self.computed += self._rows.counts
        self._query = (index, tokens, joined(queries))

        if isinstance(tokens, DeviceTokens):
            return DeviceHidden(LayerOutput(parts, tokens.known, chunks).states, tokens)
        after_layer = LayerOutput(parts, tokens, chunks)
        if index == self.num_layers - 1:
            self._enter(self.num_layers, after_layer)

        return after_layer

    def run(
        self, layers: Iterable[int], hidden: Hidden, spreading: Spreading | None = None
    ) -> Hidden:
        """Run layers as in the protocol, in one forward pass of the model if possible.

        That pass covers all layers, or all but the first. It computes layer 0 again in the latter
        case. This changes nothing, because only the tokens enter layer 0.
        """
        layers = list(layers)
        if not layers:
            return hidden
        chunks = self._rows.of(hidden.where)
        if not self._is_one_forward(layers, chunks, spreading):
            return super().run(layers, hidden, spreading)

        before_attention = {}
        if spreading is not None:
            for index in layers:
                self._graft_for_spreading(index)
            before_attention = {index: partial(self._spread, index, spreading) for index in layers}

        [tokens] = upload(self._host.device, self.token_ids[hidden.where].to(TOKEN_ID_DTYPE))
        stage, states = self._stage(hidden), []
        for chunk in chunks:
            if self._budget.spend(self._budget.whole_pass(chunk.known_positions)):
                self._rows.forget_metadata()
            with self._timed(stage):
                rows = (
                    chunk.taken_from(tokens),
                    chunk.positions,
                    chunk.slots,
                    self._rows.metadata(chunk),
                )
                states.append(self._host.run_model(*rows, before_attention))

        self.computed += self._rows.counts * len(layers)
        self._query = None
        return Hidden(self._rows.in_order(hidden.where, joined(states)), hidden.where)

    def _is_one_forward(
        self, layers: list[int], chunks: Sequence[PrefillChunk], spreading: Spreading | None
    ) -> bool:
        """Return True if one forward pass of the model can compute these layers.

        The step's budget must cover the pass. With spreading there must be a single chunk, because
        a layer needs the KV of all chunks before it spreads changes.
        """
        every = list(range(self.num_layers))
        if not (self._host.runs_as_one and layers in (every, every[1:])):
            return False
        seconds = sum(self._budget.whole_pass(chunk.known_positions) for chunk in chunks)
        return (spreading is None or len(chunks) == 1) and self._budget.affords(seconds)

    def _graft_for_spreading(self, index: int) -> None:
        """Copy the grafts that `_spread` does not copy itself."""
        if index not in self._grafted and self._host.pool_layout(index) is None:
            self.graft(range(index, self.num_layers))

    def project(self, index: int, hidden: Hidden) -> None:
        queries = []
        for number, chunk in enumerate(self._chunks(hidden.tokens)):
            if self._budget.spend(self._budget.layer(chunk.known_positions) / PROJECT):
                self._rows.forget_metadata()
            with self._timed("select"):
                before = entering(index, halves(hidden, number, chunk))
                queries.append(self._host.project(index, chunk.slots, chunk.positions, *before))
        self._query = (index, hidden.tokens, joined(queries))

    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        return over_ranks(values, reduction, self._host.device)

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        return self._host.rotate_keys(*upload(self._host.device, shifts))

    def _spread(self, index: int, spreading: Spreading) -> None:
        """Add the KV changes of recomputed tokens to the KV of other tokens."""
        pool = self._host.pool_layout(index)
        if pool is not None:
            [at], (layout, rope) = self._host.attentions_of(index), pool
            group, cache = self._host.group_of[at], self._host.attentions[at].kv_cache
            self._pool_rows(spreading, group, layout, rope).apply(layout.pools(cache), layout.heads)
            self._host.note_written(at, lambda: self._slots_of(spreading.copied)[group])
            return

        source, to_origin, from_source, to_position = self._spreading_rows(spreading)
        keys, values = self.kv(index, spreading.anchors)
        old_keys, old_values = self._host.read_layer(index, source)
        changes = torch.cat(
            [to_origin(index, keys) - from_source(index, old_keys), values - old_values], -1
        )

        changes = changes.masked_fill(self._out(index, source, keys.shape[1]), 0)
        keys, values = spreading.interpolate(changes).split([keys.shape[-1], values.shape[-1]], -1)
        self.add(index, spreading.where, to_position(index, keys), values)

    @cached_property
    def _graft_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source slots [g], target slots [groups, g] and shifts [g], int64 on the device."""
        target = self._slots_of(self.plan.grafted & ~self.plan.in_place)
        source, shifts = upload(target.device, self.plan.graft_sources, self.plan.graft_shifts)
        return source, target, shifts

    @memoised
    def _pool_rows(
        self, spreading: Spreading, group: int, layout: PoolLayout, rope: Rope
    ) -> SpreadingRows:
        """Return a spreading's rows on the device, for layers of one group with equal layouts.

        Tokens that the group has lost at their source, and tokens that its tables leave out, count
        as unchanged and are not copied.
        """
        slots = self._known_slots[group]
        source, target = (
            self._counterparts(group, self.plan.graft_sources),
            slots[self.plan.graft_targets],
        )

        lost = (source // self.block_size == NULL_PAGE) | (target // self.block_size == NULL_PAGE)
        given = layout.rows(slots[spreading.anchors]), layout.rows(slots[spreading.copied])
        sources = layout.rows(source.masked_fill(lost, -1))
        return SpreadingRows.of(
            self.plan, spreading, sources, rope, *upload(self._host.device, *given)
        )

    @memoised
    def _spreading_rows(self, spreading: Spreading) -> tuple[Tensor, Turning, Turning, Turning]:
        """Return source slots and rotations of a spreading.

        Returns:
            Source slots int64 [groups, c] of the anchors; rotations of their recomputed and of
            their cached keys to position 0; and the rotation of keys to the positions where changes
            are added.
        """
        is_anchor = spreading.anchors[self.plan.graft_targets]

        main = self.plan.graft_sources[is_anchor].to(self._host.device)
        source = torch.stack(
            [self._counterparts(group, main) for group in range(len(self._slots[0]))]
        )
        here, there = (self.plan.positions[where] for where in (spreading.anchors, spreading.where))
        was = here - self.plan.graft_shifts[is_anchor]
        return source, self.rotate_keys(-here), self.rotate_keys(-was), self.rotate_keys(there)

    @cached_property
    def leaves_out(self) -> bool:
        """True if block tables leave out blocks of a prefix that windows do not reach back to."""
        return bool((self._known_slots < self.block_size).any())

    def _keys_at(self, index: int, slots: Tensor) -> Tensor:
        return self._kv_at(index, slots)[0]

    def _kv_at(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return KV as in the protocol, with zeros where block tables leave a block out."""
        keys, values = self._host.read_layer(index, slots)
        if not self.leaves_out:
            return keys, values
        out = self._out(index, slots, keys.shape[1])
        return keys.masked_fill(out, 0), values.masked_fill(out, 0)

    def _out(self, index: int, slots: Tensor, num_heads: int) -> Tensor:
        """Return a mask of slots [groups, n] without a block, by KV head: bool [n, Hkv, 1]."""
        groups = [self._host.group_of[at] for at in self._host.attentions_of(index)]
        own = torch.stack([slots[group] for group in groups])
        out = (own // self.block_size == NULL_PAGE).T.repeat_interleave(
            num_heads // len(groups), dim=1
        )
        return out[..., None]

    def _add_at(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for part in torch.arange(slots.shape[1], device=slots.device).split(COPIED_TOKENS):
            old_keys, old_values = self._host.read_layer(index, slots[:, part])
            self._host.write_layer(
                index, old_keys + keys[part], old_values + values[part], slots[:, part]
            )

    def _last_query(self) -> tuple[int, TokenSet, Tensor]:
        """Return the queries in the order of their tokens."""
        index, tokens, query = super()._last_query()
        return index, tokens, self._rows.in_order(tokens, query)


@torch.inference_mode()
def measure_costs(host: ModelHost, max_length: int) -> Costs:
    """Measure the costs of prefill on prompts of at most `max_length` tokens.

    The measurement writes to the first blocks of vLLM's cache, which must be empty.
    """
    # vLLM never gives out block 0.
    blocks = np.arange(1, host.num_blocks)

    def context(plan: Plan) -> VllmPrefill:
        tokens = torch.zeros(plan.num_tokens, dtype=torch.int64)
        table = blocks[: -(-plan.num_tokens // plan.block_size)]
        every = [table] * (1 + max(host.group_of))
        return VllmPrefill(host, plan, tokens, [every], np.stack([table] * len(every), 1))

    length, on_gpu = min(max_length, len(blocks) * host.block_size), host.device.type == "cuda"
    return calibrate(context, host.num_layers, host.block_size, length, on_gpu=on_gpu)
