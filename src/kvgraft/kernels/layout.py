"""Queries of an attention call, and the places of their contexts in the paged pool."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.kernels.long_runs import LongRuns, Run
from kvgraft.kernels.memoised import forget, memoised
from kvgraft.kernels.upload import upload

# least number of queries of a long run
LONG_RUN = 256
# tokens; in a decode step no other prompt is padded to a context of this length
LONG_CONTEXT = 4096
# queries that attention kernels take at a time
TILE_ROWS = 32
# maximum number of positions whose queries read their windows together
WINDOW_ROWS = 128


def in_window(tokens: Tensor, at: Tensor, sinks: int, window: int) -> Tensor:
    """Return whether a local head's query at position `at` sees these tokens: bool, of the
    broadcast shape (RedKnot, 4.2).
    """
    return (tokens <= at) & ((tokens < sinks) | (tokens > at - window))


@dataclass(frozen=True, eq=False)
class Context:
    """Queries of one prompt.

    Attributes:
        positions: int64 [n] on the CPU, ascending; query i attends to positions 0..positions[i].
            They may be on the device for Triton kernels, with `bound`.
        slots: int64 [page lists, >= positions[-1] + 1] on the pool's device: the slot of each
            position (expanded block tables). -1 where a list has released the page, because no head
            of that list sees the token.
        bound: upper bound of `seen`, if the host does not know the positions.
    """

    positions: Tensor
    slots: Tensor
    bound: int | None = None

    @property
    def seen(self) -> int:
        """Number of tokens up to the last query, or an upper bound."""
        return int(self.positions[-1]) + 1 if self.bound is None else self.bound

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Half-open query ranges of the maximal runs of consecutive positions."""
        cuts = (torch.nonzero(self.positions.diff() != 1)[:, 0] + 1).tolist()
        return list(zip([0, *cuts], [*cuts, self.positions.numel()], strict=True))

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Half-open query ranges that attend together, to all keys up to the last query's position.

        The beginning of the prompt is one chunk (a plain causal triangle). Other long runs are cut
        evenly. Scattered queries share a chunk while a larger matrix product saves more than the
        unneeded keys cost.
        """
        chunks: list[tuple[int, int]] = []
        scattered: list[int] = []
        for start, stop in self.runs:
            opening = int(self.positions[start]) == 0
            if stop - start < LONG_RUN and not opening:
                scattered += range(start, stop)
                continue
            chunks += self._gather(scattered)
            size = stop - start if opening else LONG_RUN
            chunks += [(first, min(first + size, stop)) for first in range(start, stop, size)]
            scattered = []
        return chunks + self._gather(scattered)

    def _gather(self, rows: list[int]) -> list[tuple[int, int]]:
        """Return chunks of scattered query rows."""
        positions = self.positions[rows].tolist()
        # wasted: keys that the open chunk reads but does not need
        chunks, first, wasted = [], 0, 0

        for number in range(1, len(rows)):
            size, position = number - first, positions[number]
            more = size * (position - positions[number - 1])
            if (
                more > 2 * position
                or (size % TILE_ROWS == 0 and wasted > position)
                or size == LONG_RUN
            ):
                chunks.append((rows[first], rows[number]))
                first, wasted = number, 0
            else:
                wasted += more

        return [*chunks, (rows[first], rows[-1] + 1)] if rows else []

    @cached_property
    def device_positions(self) -> Tensor:
        """`positions` on the pool's device."""
        return upload(self.slots.device, self.positions)[0]

    @memoised
    def kept(self, page_list: int) -> tuple[Tensor, Tensor]:
        """Return the tokens up to the last query that a list holds, and their slots: int64 [t]
        each, ascending.
        """
        slots = self.slots[page_list, : self.seen]
        tokens = (slots >= 0).nonzero()[:, 0]
        return tokens, slots[tokens]

    @memoised
    def stretch(self, page_list: int) -> slice | None:
        """Return the slice of the pool that holds the tokens of a list, or None if they are not
        consecutive and in order.
        """
        slots = self.kept(page_list)[1]
        first, last = int(slots[0]), int(slots[-1])
        together = last - first + 1 == slots.numel() and bool((slots.diff() == 1).all())
        return slice(first, last + 1) if together else None


@dataclass(frozen=True, eq=False)
class WindowTiles:
    """Queries that read their windows together: w tiles for h heads, padded to r queries and k
    tokens.

    Attributes:
        rows: int64 [w, r], the query rows; where `real` is set, all rows in order.
        real: bool [w, r], False for padding.
        slots: int64 [h, w, k]; padding repeats a slot in use, so that pages without content are
            never read.
        visible: bool [w, h, r, k], or [w, 1, r, k] if all heads see the same tokens.
    """

    rows: Tensor
    real: Tensor
    slots: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class PassRows:
    """Queries of a prefill pass, as tensors that a host has uploaded to the pool's device.

    Attributes:
        positions, query_slots: see `AttentionLayout`.
        stacked_slots: slots of all prompts, int32 [prompts, page lists, T].
        prompts: row of each context in `stacked_slots`.
    """

    positions: Tensor
    query_slots: Tensor
    stacked_slots: Tensor
    prompts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepRows:
    """One query of each prompt, as tensors that a host has uploaded to the pool's device. The host
    knows all positions.

    Attributes:
        positions: int64 [n].
        query_slots: int64 [page lists, n], slots for the queries' own keys and values.
        pages: int64 [n, page lists, blocks], any page after the last block, -1 where a list has
            released one.
        block_size: tokens of a page.
    """

    positions: Tensor
    query_slots: Tensor
    pages: Tensor
    block_size: int

    def part(self, rows: Tensor) -> "StepRows":
        """Return some of the queries, rows int64 [m]."""
        return StepRows(
            self.positions[rows], self.query_slots[:, rows], self.pages[rows], self.block_size
        )

    @cached_property
    def stacked_slots(self) -> Tensor:
        """Slots as of `AttentionLayout`; negative also for a released page."""
        offsets = torch.arange(self.block_size, device=self.pages.device)
        return (self.pages[..., None] * self.block_size + offsets).flatten(2).int()


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Queries of several prompts, rows end to end; serves all layers of a step.

    Any set of positions is a sequence of *runs* (consecutive positions). Each run is one
    pseudo-sequence of varlen paged causal attention: `query_len = len(run)`, `seq_len = last
    position + 1`, the prompt's block table.

    Attributes:
        contexts: queries of each prompt; empty in a decode step whose positions only the device
            knows.
        sinks, window: number of tokens that local heads see at the beginning of a prompt, and up to
            the query's own.
        on_device: the same as tensors on the pool's device, if a host has uploaded them together.
        complete_lists: number of page lists, the first ones, that hold every token.
    """

    contexts: tuple[Context, ...]
    sinks: int = 0
    window: int = 1
    on_device: StepRows | PassRows | None = None
    complete_lists: int = 1

    @classmethod
    def of(
        cls,
        positions: Sequence[Tensor],
        slots: Sequence[Tensor],
        sinks: int = 0,
        window: int = 1,
        on_device: PassRows | None = None,
        complete_lists: int = 1,
    ) -> "AttentionLayout":
        """Pair positions [n_i] with the slots of their prompts. Prompts without queries are left
        out.
        """
        pairs = zip(positions, slots, strict=True)
        contexts = tuple(Context(p, s) for p, s in pairs if p.numel())
        return cls(contexts, sinks, window, on_device, complete_lists)

    @memoised
    def part(self, contexts: tuple[int, ...]) -> "AttentionLayout":
        """Return the layout of some prompts' queries."""
        if len(contexts) == len(self.contexts):
            return self
        steps = None
        if isinstance(self.on_device, StepRows):
            steps = self.on_device.part(
                upload(self.on_device.pages.device, torch.tensor(contexts))[0]
            )
        return replace(
            self, contexts=tuple(self.contexts[number] for number in contexts), on_device=steps
        )

    @property
    def decodes(self) -> bool:
        """True if every prompt has one query."""
        return all(context.positions.numel() == 1 for context in self.contexts)

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """Query rows of each context."""
        if isinstance(self.on_device, StepRows):
            return tuple(slice(row, row + 1) for row in range(len(self.on_device.positions)))
        stops = np.cumsum([c.positions.numel() for c in self.contexts]).tolist()
        return tuple(slice(a, b) for a, b in pairwise([0, *stops]))

    @cached_property
    def query_slots(self) -> Tensor:
        """Slot of each query's own token, for its key and value: int64 [page lists, n]."""
        if self.on_device is not None:
            return self.on_device.query_slots
        return joined([c.slots[:, c.device_positions] for c in self.contexts], 1)

    @cached_property
    def query_positions(self) -> Tensor:
        """Position of each query, int64 [n] on the pool's device."""
        if self.on_device is not None:
            return self.on_device.positions
        return joined([c.device_positions for c in self.contexts])

    @cached_property
    def stacked_slots(self) -> Tensor:
        """Slots of all contexts, int32 [contexts, page lists, T]; any values after a context's last
        token. `PassRows` has those of all prompts instead.
        """
        if self.on_device is not None:
            return self.on_device.stacked_slots
        longest = max(context.seen for context in self.contexts)
        seen = [context.slots[:, : context.seen] for context in self.contexts]
        if len(seen) == 1:
            return seen[0].int()[None]
        return torch.stack(
            [F.pad(slots, (0, longest - slots.shape[1]), value=-1) for slots in seen]
        ).int()

    @memoised
    def long_runs(self, least: int) -> LongRuns | None:
        """Return the runs of at least `least` queries, or None if there are none."""
        if self.decodes:
            return None

        runs, first_keys, slots = [], 0, []

        for context, rows in zip(self.contexts, self.rows, strict=True):
            if context.positions.numel() < least or context.bound is not None:
                continue
            found = [(start, stop) for start, stop in context.runs if stop - start >= least]
            stops = [int(context.positions[stop - 1]) + 1 for _, stop in found]
            for (start, stop), keys in zip(found, stops, strict=True):
                runs.append(Run(rows.start + start, rows.start + stop, first_keys, keys))
            if found:
                slots.append(context.slots[:, : stops[-1]])
                first_keys += stops[-1]

        return LongRuns(tuple(runs), self.rows[-1].stop, joined(slots, 1)) if runs else None

    @memoised
    def query_tiles(
        self, size: int, runs: LongRuns | None = None, with_runs: bool = True
    ) -> Tensor:
        """Return int32 [tiles, 5]: tiles of at most `size` queries of one context each.

        The columns are the context's row in `stacked_slots`, the first row, the number of rows,
        whether the rows are in `runs`, and the first row among those of all tiles. Without
        `with_runs` the queries of runs are left out.
        """
        if self.decodes and not isinstance(self.on_device, PassRows):
            return _step_tiles(len(self.rows), self.query_positions.device)

        places = tuple(range(len(self.rows)))
        if isinstance(self.on_device, PassRows):
            places = self.on_device.prompts
        inside = {run.start: run.stop for run in runs.runs} if runs else {}
        tiles, place = [], 0

        for number, rows in zip(places, self.rows, strict=True):
            edges = {rows.start, rows.stop}
            edges.update(
                edge for run in inside.items() for edge in run if rows.start < edge < rows.stop
            )
            for start, stop in pairwise(sorted(edges)):
                is_run = start in inside
                if is_run and not with_runs:
                    continue
                for first in range(start, stop, size):
                    tiles.append(
                        (number, first, min(size, stop - first), is_run, place + first - start)
                    )
                place += stop - start

        return upload(self.query_positions.device, torch.tensor(tiles, dtype=torch.int32))[0]

    @memoised
    def room(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer that all layers of a step overwrite in turn. A new buffer would cost more
        than filling it.
        """
        return torch.empty(shape, dtype=dtype, device=self.query_positions.device)

    def give_room_back(self) -> None:
        """Release the buffers of `room`. Layers that compute several layouts in turn call it, so
        that not all layouts keep theirs.
        """
        forget(self, "room")

    @cached_property
    def decode_buckets(self) -> list[tuple[int, ...]]:
        """Contexts of similar length that are padded together in a decode step. Long ones stay
        alone.
        """
        buckets: dict[tuple[int, int], list[int]] = {}
        for row, context in enumerate(self.contexts):
            alone = row if context.seen >= LONG_CONTEXT else -1
            buckets.setdefault((context.seen.bit_length(), alone), []).append(row)
        return [tuple(rows) for rows in buckets.values()]

    @memoised
    def padded(self, rows: tuple[int, ...], page_list: int) -> tuple[Tensor, Tensor | None]:
        """Return the slots of the tokens that a list holds for these contexts, padded.

        Returns:
            Slots int64 [b, T], where padding repeats a slot of the same prompt; and bool [b, T],
            False for padding, or None for a single context.
        """
        kept = [self.contexts[row].kept(page_list)[1] for row in rows]
        counts = torch.tensor([slots.numel() for slots in kept], device=kept[0].device)
        longest = int(counts.max())
        slots = torch.stack([torch.cat((s, s[:1].expand(longest - s.numel()))) for s in kept])
        real = torch.arange(longest, device=slots.device) < counts[:, None]
        return slots, None if len(rows) == 1 else real

    @memoised
    def windows(self, page_lists: tuple[int, ...]) -> WindowTiles:
        """Return the sinks and windows of all queries in several heads; `page_lists` has the list
        of each head.
        """
        tiles = [self._window_slots(page_list) for page_list in page_lists]
        same = all(visible is tiles[0][1] or visible.equal(tiles[0][1]) for _, visible in tiles)
        visible = torch.stack([visible for _, visible in tiles[: 1 if same else None]], dim=1)
        rows, real, *_ = self._windows
        return WindowTiles(rows, real, torch.stack([slots for slots, _ in tiles]), visible)

    @memoised
    def _window_slots(self, page_list: int) -> tuple[Tensor, Tensor]:
        """Return the slots of the tiles in a list, int64 [w, k], and the tokens visible there, bool
        [w, r, k].
        """
        rows, _, owners, tokens, visible = self._windows
        slots = torch.stack(
            [self.contexts[c].slots[page_list, t] for c, t in zip(owners, tokens, strict=True)]
        )
        own = self.query_slots[page_list, rows[:, :1]]  # [w, 1]
        visible = visible & (slots >= 0)[:, None]
        return torch.where(visible.any(1), slots, own), visible

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """Parts of the tiles that all lists share: rows, real, owning contexts, tokens int64 [w,
        k], visible.
        """
        cuts = [
            (number, first, last)
            for number, context in enumerate(self.contexts)
            for first, last in _cuts(
                context.positions, min(max(self.window, TILE_ROWS), WINDOW_ROWS)
            )
        ]
        device = self.query_positions.device
        owners = [number for number, _, _ in cuts]
        starts = torch.tensor(
            [self.rows[number].start + first for number, first, _ in cuts], device=device
        )
        counts = torch.tensor([last - first for _, first, last in cuts], device=device)
        place = torch.arange(int(counts.max()), device=device)
        real = place < counts[:, None]  # [w, r]
        rows = starts[:, None] + place.clamp(max=counts[:, None] - 1)
        at = self.query_positions[rows]  # [w, r]
        # [w, 1]: the first token behind the sinks
        begin = (at[:, :1] - self.window + 1).clamp(min=self.sinks)
        reach = int((at[:, -1:] - begin).max()) + 1
        sinks = torch.arange(self.sinks, device=device).expand(len(cuts), -1)
        # [w, k]
        tokens = torch.cat((sinks, begin + torch.arange(max(reach, 0), device=device)), dim=1)
        visible = in_window(tokens[:, None], at[..., None], self.sinks, self.window)
        return rows, real, owners, tokens.clamp(max=at[:, -1:]), visible


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the parts end to end, without a copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)


@cache
def _step_tiles(count: int, device: torch.device) -> Tensor:
    """Return the `query_tiles` of a decode step."""
    return upload(
        device, torch.tensor([(row, row, 1, False, row) for row in range(count)], dtype=torch.int32)
    )[0]


def _cuts(positions: Tensor, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of queries whose positions lie in one aligned stretch of `size`."""
    cuts = ((positions // size).diff().nonzero()[:, 0] + 1).tolist()
    return list(pairwise([0, *cuts, positions.numel()]))
