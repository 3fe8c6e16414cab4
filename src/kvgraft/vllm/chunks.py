"""Chunks of rows that a layer of vLLM computes, and the output of such a layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgraft.kernels.layout import AttentionLayout
from kvgraft.prefill.context import Hidden

# (prompt, first position, stop position)
Run = tuple[int, int, int]


@dataclass
class PrefillChunk:
    """Rows [start, stop) of a layer's input, in the order in which the layer computes them.

    Attributes:
        positions: int64 [n].
        slots: int64 [groups, n].
        known_positions: the positions, on the CPU.
        runs: runs of consecutive tokens, in the order of the rows.
        num_long: number of leading runs that vLLM's backend always computes.
        order: int64 [n] on the device of the positions: index of each row in [start, stop). None if
            the rows are in order.
        layouts: by metadata builder the rows that our kernel computes; made when first needed.
        metadata: by metadata builder; made when first needed and after every pause.
    """

    rows: slice
    positions: Tensor
    slots: Tensor
    known_positions: Tensor
    runs: list[Run]
    num_long: int
    order: Tensor | None = None
    layouts: list[AttentionLayout | None] | None = None
    metadata: list[Any] | None = None

    def scattered(self) -> tuple[list[int], list[Tensor]]:
        """Return prompts with rows behind the long runs, and these rows' positions on the CPU."""
        runs = self.runs[self.num_long :]
        sizes = np.array([stop - first for _, first, stop in runs])
        prompts, counts = np.unique(
            np.repeat([prompt for prompt, _, _ in runs], sizes), return_counts=True
        )
        return prompts.tolist(), list(
            self.known_positions[-int(sizes.sum()) :].split(counts.tolist())
        )

    def taken_from(self, rows: Tensor) -> Tensor:
        """Return the chunk's rows out of rows [m, ...] in token order."""
        own = rows[self.rows]
        return own if self.order is None else own[self.order]

    def put_into(self, rows: Tensor, computed: Tensor) -> None:
        """Write the chunk's computed rows [n, ...] into rows [m, ...] in token order."""
        own = rows[self.rows]
        if self.order is None:
            own.copy_(computed)
        else:
            own.index_copy_(0, self.order, computed)


class LayerOutput(Hidden):
    """Output of a layer: hidden states and residuals [m, D], by chunk, in the order of computation.

    They are copied to one tensor [n, 2, D] only when `states` is read.
    """

    def __init__(
        self, parts: Sequence[tuple[Tensor, Tensor]], where: Tensor, chunks: Sequence[PrefillChunk]
    ) -> None:
        vars(self).update(parts=parts, where=where, chunks=chunks)

    parts: Sequence[tuple[Tensor, Tensor]]
    chunks: Sequence[PrefillChunk]

    @property
    def states(self) -> Tensor:
        """Hidden states and residuals in token order, [n, 2, D], as in the protocol."""
        first = self.parts[0][0]
        states = first.new_empty(sum(len(hidden) for hidden, _ in self.parts), 2, first.shape[1])
        for part, chunk in zip(self.parts, self.chunks, strict=True):
            if chunk.order is None:
                torch.stack(part, dim=1, out=states[chunk.rows])
            else:
                for half, into in zip(part, states.unbind(1), strict=True):
                    chunk.put_into(into, half)
        return states

    def with_states(self, states: Tensor) -> Hidden:
        return Hidden(states, self.where)


def halves(hidden: Hidden, number: int, chunk: PrefillChunk) -> Sequence[Tensor]:
    """Return hidden states and residuals [n, D] of a chunk's rows.

    Args:
        number: number of the chunk.
    """
    if isinstance(hidden, LayerOutput):
        # Every layer cuts its rows into the same chunks.
        return hidden.parts[number]
    return chunk.taken_from(hidden.states).unbind(1)


def runs_of(prompts: np.ndarray, positions: np.ndarray) -> list[Run]:
    """Return the maximal runs of consecutive positions within one prompt."""
    cuts = np.flatnonzero((np.diff(positions) != 1) | (np.diff(prompts) != 0)) + 1
    edges = [0, *cuts.tolist(), len(positions)]
    return [
        (int(prompts[a]), int(positions[a]), int(positions[b - 1]) + 1)
        for a, b in pairwise(edges)
        if a < b
    ]


def cut(runs: Sequence[Run], max_rows: int, max_runs: int | None) -> list[list[Run]]:
    """Cut runs into chunks of at most `max_rows` rows and `max_runs` runs."""
    chunks: list[list[Run]] = [[]]
    room = max_rows
    for prompt, first, stop in runs:
        while first < stop:
            if not room or len(chunks[-1]) == max_runs:
                chunks.append([])
                room = max_rows
            end = min(stop, first + room)
            chunks[-1].append((prompt, first, end))
            room, first = room - (end - first), end
    return chunks


def long_first(runs: Sequence[Run], least: int, most: int | None) -> tuple[list[Run], int, Tensor]:
    """Put runs of at least `least` rows first: the longest ones, at most `most` of them.

    Returns:
        The runs, the number of long ones, and the rows in this order, int64 [n].
    """
    sizes = np.array([stop - first for _, first, stop in runs], dtype=np.int64)
    longest = np.argsort(-sizes, kind="stable")[:most]
    is_short = np.ones(len(runs), dtype=bool)
    is_short[longest] = sizes[longest] < least
    order = np.argsort(is_short, kind="stable").tolist()
    rows = torch.from_numpy(np.argsort(np.repeat(is_short, sizes), kind="stable"))
    return [runs[number] for number in order], int((~is_short).sum()), rows
