"""Chunks of the rows of a recovery that go through vLLM's layers together, with their attention."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.layout import AttentionLayout, Context
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.prefill.device_tokens import DeviceTokens, TokenSet, are_equal
from kvgraft.vllm.chunks import PrefillChunk, Run, cut, long_first, runs_of
from kvgraft.vllm.compat.group_attention import LONG_RUN, GroupAttention, RowsMetadata
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.pools import PoolLayout


class RowChunks:
    """Tokens to compute, in chunks of at most `host.max_rows`.

    The chunks of the last set of tokens are cached.

    Args:
        host: the loaded model and its cache.
        plan: plan of the prompts.
        tables: by group, per prompt its physical blocks, int [b].
        known_slots: int64 [groups, T], the slots of all tokens of `plan`, on the CPU.
        slots: per prompt, int64 [groups, >= its length], on the device.

    Attributes:
        counts: int64, tokens of each prompt in the last chunks.
    """

    def __init__(
        self,
        host: ModelHost,
        plan: Plan,
        tables: Sequence[Sequence[np.ndarray]],
        known_slots: Tensor,
        slots: Sequence[Tensor],
    ) -> None:
        self.counts = np.zeros(0, np.int64)
        self._host, self._plan, self._tables = host, plan, tables
        self._known_slots, self._slots = known_slots, slots
        self._tokens: TokenSet | None = None
        self._chunks: list[PrefillChunk] = []

    def has(self, tokens: TokenSet) -> bool:
        """Return True if the last chunks are of these tokens."""
        return self._tokens is not None and are_equal(self._tokens, tokens)

    def of(self, tokens: TokenSet) -> list[PrefillChunk]:
        """Return the chunks of these tokens. If only the device knows them, `of_found` has come
        before."""
        if not self.has(tokens):
            if not isinstance(tokens, Tensor):
                raise ValueError("these tokens have no chunks yet")
            self._tokens, self._chunks = tokens, self.cut(tokens, splits=True)
            self.counts = np.array(self._plan.counts_of(tokens))
        return self._chunks

    def of_found(
        self, tokens: DeviceTokens, positions: Tensor, slots: Tensor
    ) -> list[PrefillChunk]:
        """Return new chunks of tokens that only the device knows completely.

        Our kernel computes all their rows.

        Args:
            positions: int64 [n] on the device.
            slots: int64 [groups, n] on the device.
        """
        plan, known = self._plan, self._plan.counts_of(tokens.known)
        parts = np.array([known, *(part.counts for part in tokens.found)])
        # part and prompt of each row, in which positions ascend; the prompt
        owners = np.repeat(np.arange(parts.size), parts.flatten())
        prompts = owners % len(plan.lengths)
        # For the budget, as if each token were the last of its prompt.
        latest = torch.from_numpy(np.array(plan.lengths)[prompts] - 1)
        self._tokens, self._chunks, self.counts = tokens, [], parts.sum(0)
        for start in range(0, len(owners), self._host.max_rows):
            rows = slice(start, min(start + self._host.max_rows, len(owners)))
            _, first, sizes = np.unique(owners[rows], return_index=True, return_counts=True)
            pieces = list(
                zip(
                    prompts[rows][first].tolist(),
                    positions[rows].split(sizes.tolist()),
                    strict=True,
                )
            )
            layouts = [self._found_layout(pieces, group) for group in self._host.attention.groups]
            given = rows, positions[rows], slots[:, rows], latest[rows]
            self._chunks.append(PrefillChunk(*given, runs=[], num_long=0, layouts=layouts))
        return self._chunks

    def _found_layout(
        self, pieces: Sequence[tuple[int, Tensor]], group: GroupAttention
    ) -> AttentionLayout | None:
        """Return the layout of positions int64 [k] on the device, by prompt."""
        if group.pool is None:
            return None
        slots = [self._pool_slots(prompt, group.number, group.pool) for prompt, _ in pieces]
        bounds = [self._plan.lengths[prompt] for prompt, _ in pieces]
        positions = [at for _, at in pieces]
        return AttentionLayout(tuple(map(Context, positions, slots, bounds)))

    def cut(self, where: Tensor, *, splits: bool = False) -> list[PrefillChunk]:
        """Return new chunks of the tokens set in `where`.

        Args:
            splits: True to put long runs first where our kernel computes the other rows.
        """
        positions, slots = self._plan.positions[where], self._known_slots[:, where]
        host, attention = self._host, self._host.attention
        splits = splits and attention.splits_rows
        prompts = np.repeat(np.arange(len(self._plan.lengths)), self._plan.lengths)[where.numpy()]
        chunks, start = [], 0
        runs_of_all = runs_of(prompts, positions.numpy())
        for runs in cut(runs_of_all, host.max_rows, attention.max_runs):
            rows = slice(start, start + sum(stop - first for _, first, stop in runs))
            chunks.append(self._chunk(rows, positions[rows], slots[:, rows], runs, splits))
            start = rows.stop
        return chunks

    def metadata(self, chunk: PrefillChunk) -> list[RowsMetadata]:
        """Return attention metadata of a chunk's rows, one entry for each attention group."""
        if chunk.layouts is None:
            chunk.layouts = [self._layout(chunk, group) for group in self._host.attention.groups]
        if chunk.metadata is None:
            given = chunk.slots, chunk.num_long, chunk.layouts
            chunk.metadata = self._host.metadata(chunk.runs, self._tables, *given)
        return chunk.metadata

    def forget_metadata(self) -> None:
        """Discard all metadata, so that it is built again.

        The metadata of a backend may point into buffers that other steps, or chunks of latents,
        have used since.
        """
        for chunk in self._chunks:
            chunk.metadata = None

    def in_order(self, tokens: TokenSet, computed: Tensor) -> Tensor:
        """Return rows [n, ...], given in the order of the chunks, in the order of their tokens."""
        chunks = self.of(tokens)
        if all(chunk.order is None for chunk in chunks):
            return computed
        ordered = torch.empty_like(computed)
        for chunk in chunks:
            chunk.put_into(ordered, computed[chunk.rows])
        return ordered

    def _chunk(
        self,
        rows: slice,
        known: Tensor,
        slots: Tensor,
        runs: list[Run],
        splits: bool,
    ) -> PrefillChunk:
        """Return one chunk, with its positions and slots on the device."""
        order, num_long = list[Tensor](), len(runs)
        if splits:
            runs, num_long, moved = long_first(runs, LONG_RUN, self._host.attention.max_long_runs)
            if 0 < num_long < len(runs):
                known, slots, order = known[moved], slots[:, moved], [moved]
        positions, slots, *order = upload(self._host.device, known, slots, *order)
        moved_rows = order[0] if order else None
        return PrefillChunk(rows, positions, slots, known, runs, num_long, moved_rows)

    def _layout(self, chunk: PrefillChunk, group: GroupAttention) -> AttentionLayout | None:
        """Return the layout of the rows that our kernel computes in a group, or None."""
        if group.pool is None or chunk.num_long == len(chunk.runs):
            return None
        prompts, positions = chunk.scattered()
        slots = [self._pool_slots(prompt, group.number, group.pool) for prompt in prompts]
        return AttentionLayout.of(positions, slots)

    @memoised
    def _pool_slots(self, prompt: int, group: int, pool: PoolLayout) -> Tensor:
        """Return the rows of a prompt's tokens in the pools of a group's layers, int64 [1, T]."""
        return pool.rows(self._slots[prompt][group, : self._plan.lengths[prompt]])
