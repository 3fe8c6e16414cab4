"""Long runs of queries: consecutive positions that flash attention computes together."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload


@dataclass(frozen=True)
class Run:
    """Queries of consecutive positions: rows `start` to `stop` of a layout.

    The last query sees `num_keys` tokens of its prompt. They begin at `first_key` among the tokens
    of all prompts.
    """

    start: int
    stop: int
    first_key: int
    num_keys: int

    @property
    def opens(self) -> bool:
        """True if the run is the beginning of its prompt."""
        return self.stop - self.start == self.num_keys


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows of a layout as the sequences of a causal varlen attention, aligned at the last query and
    the last key.

    Attributes:
        query_starts: int32 [s + 1], first row of each sequence, and the end of the last.
        key_starts: int32 [s + 1], first key of each sequence; sequences of one prompt share it.
        num_keys: int32 [s], keys of each sequence; 0 for rows that are computed elsewhere.
        longest_query, longest_keys: maximum over all sequences.
    """

    query_starts: Tensor
    key_starts: Tensor
    num_keys: Tensor
    longest_query: int
    longest_keys: int


@dataclass(frozen=True, eq=False)
class LongRuns:
    """Long runs among the rows of a layout, in order.

    Attributes:
        runs: the runs.
        num_rows: rows of the layout.
        slots: int64 [page lists, k], slots of the tokens that the runs see, prompt after prompt.
    """

    runs: tuple[Run, ...]
    num_rows: int
    slots: Tensor

    @memoised
    def tiles(self, size: int) -> int:
        """Return the number of tiles of `size` queries in the runs."""
        return sum(-(-(run.stop - run.start) // size) for run in self.runs)

    @memoised
    def sequences(self, triangle: int) -> Sequences | None:
        """Return all runs and the rows between them as sequences, or None without runs.

        Openings of at least `triangle` queries are left out.
        """
        chosen = [run for run in self.runs if not (run.opens and run.num_keys >= triangle)]
        if not chosen:
            return None

        # found: first row, first key, number of keys
        found, row = [], 0
        for run in chosen:
            if run.start > row:
                found.append((row, 0, 0))
            found.append((run.start, run.first_key, run.num_keys))
            row = run.stop

        if row < self.num_rows:
            found.append((row, 0, 0))

        bounds = torch.tensor([*found, (self.num_rows, 0, 0)], dtype=torch.int32).T.contiguous()
        longest = int(bounds[0].diff().max()), int(bounds[2].max())
        query_starts, key_starts, num_keys = upload(self.slots.device, bounds)[0]
        return Sequences(query_starts, key_starts, num_keys[:-1], *longest)

    @cached_property
    def other_rows(self) -> Tensor:
        """Rows that are in none of the runs, int32."""
        edges = [0, *(edge for run in self.runs for edge in (run.start, run.stop)), self.num_rows]
        parts = [
            torch.arange(a, b, dtype=torch.int32)
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
        return upload(self.slots.device, torch.cat(parts))[0]
