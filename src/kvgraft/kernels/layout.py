"""Which queries an attention call serves, and where their context lies in the paged pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

LONG_RUN = 256  # queries
TILE_ROWS = 32  # queries that attention kernels take at a time


@dataclass(frozen=True, eq=False)
class Context:
    """The queries of one prompt.

    Attributes:
        positions: int64 [n] on the CPU, ascending; query i attends to positions 0..positions[i].
        slots: int64 [>= positions[-1] + 1] on the pool's device, slot of each position (the expanded block table).
    """

    positions: Tensor
    slots: Tensor

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Half-open query ranges of the maximal runs of consecutive positions."""
        cuts = (torch.nonzero(self.positions.diff() != 1)[:, 0] + 1).tolist()
        return list(zip([0, *cuts], [*cuts, self.positions.numel()], strict=True))

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Half-open query ranges that attend together, to all keys up to the last query's position.

        The beginning of the prompt is one chunk (a plain causal triangle), other long runs are cut evenly. Scattered
        queries share a chunk until the keys read in vain outweigh what a larger matrix product saves.
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
        positions = self.positions[rows].tolist()
        chunks, first, wasted = [], 0, 0  # wasted: keys that the open chunk reads in vain
        for number in range(1, len(rows)):
            size, position = number - first, positions[number]
            more = size * (position - positions[number - 1])
            if more > 2 * position or (size % TILE_ROWS == 0 and wasted > position) or size == LONG_RUN:
                chunks.append((rows[first], rows[number]))
                first, wasted = number, 0
            else:
                wasted += more
        return [*chunks, (rows[first], rows[-1] + 1)] if rows else []

    @cached_property
    def device_positions(self) -> Tensor:
        """`positions` beside the pool."""
        return self.positions.to(self.slots.device)


@dataclass(frozen=True, eq=False)
class VarlenLayout:
    """Queries of several prompts, their rows end to end.

    Any set of positions is a sequence of *runs* (consecutive positions), and each run is one pseudo-sequence of a stock
    varlen paged causal attention: `query_len = len(run)`, `seq_len = last position + 1`, the prompt's block table.
    """

    contexts: tuple[Context, ...]

    @classmethod
    def of(cls, positions: Sequence[Tensor], slots: Sequence[Tensor]) -> "VarlenLayout":
        """Pair positions [n_i] with the slots of their prompts; prompts without queries drop out."""
        pairs = zip(positions, slots, strict=True)
        return cls(tuple(Context(p, s) for p, s in pairs if p.numel()))

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The query rows of each context."""
        stops = np.cumsum([c.positions.numel() for c in self.contexts]).tolist()
        return tuple(slice(a, b) for a, b in pairwise([0, *stops]))

    @cached_property
    def query_slots(self) -> Tensor:
        """int64 [n]: the slot of every query's own token, where its key and value belong."""
        return torch.cat([c.slots[c.device_positions] for c in self.contexts])

    @cached_property
    def query_positions(self) -> Tensor:
        """int64 [n] on the pool's device: the position of every query."""
        return torch.cat([c.device_positions for c in self.contexts])

    @cached_property
    def decode_buckets(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """One query a prompt: prompts of similar length, padded, as rows [b], slots [b, T] and visible bool [b, T].

        Padding repeats a slot of the same prompt, so that no page without content is ever read.
        """
        buckets: dict[int, list[int]] = {}
        for row, context in enumerate(self.contexts):
            buckets.setdefault(int(context.positions[0]).bit_length(), []).append(row)
        return [self._pad(rows) for rows in buckets.values()]

    def _pad(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        contexts = [self.contexts[row] for row in rows]
        lengths = torch.cat([context.device_positions for context in contexts]) + 1  # [b]
        slots = torch.stack([context.slots[:1].expand(int(lengths.max())) for context in contexts])
        for row, (context, length) in enumerate(zip(contexts, lengths.tolist(), strict=True)):
            slots[row, :length] = context.slots[:length]
        visible = torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
        return torch.tensor(rows, device=slots.device), slots, visible
