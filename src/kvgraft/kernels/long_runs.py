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

    The last of them sees `num_keys` tokens of its prompt, which begin at `first_key` among the
    tokens of all prompts."""

    start: int
    stop: int
    first_key: int
    num_keys: int

    @property
    def opens(self) -> bool:
        """Whether the run is the beginning of its prompt."""
        return self.stop - self.start == self.num_keys


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows of a layout as the sequences of a causal varlen attention, aligned at the last query and
    the last key.

    Attributes:
        query_starts: int32 [s + 1], the first row of each, and the end of the last.
        key_starts: int32 [s + 1], the first key of each; sequences of one prompt share it.
        num_keys: int32 [s], the keys that each has; 0 where it stands for rows that are computed
            elsewhere.
        longest_query, longest_keys: of all sequences.
    """

    query_starts: Tensor
    key_starts: Tensor
    num_keys: Tensor
    longest_query: int
    longest_keys: int


@dataclass(frozen=True, eq=False)
class LongRuns:
    """The long runs among the rows of a layout, in order.

    Attributes:
        num_rows: of the layout.
        slots: int64 [page lists, k], of the tokens that the runs see, prompt after prompt.
    """

    runs: tuple[Run, ...]
    num_rows: int
    slots: Tensor

    @memoised
    def tiles(self, size: int) -> int:
        """How many tiles of so many queries the runs have."""
        return sum(-(-(run.stop - run.start) // size) for run in self.runs)

    @memoised
    def sequences(self, triangle: int) -> Sequences | None:
        """All runs but the openings of at least `triangle` queries, and what lies between them;
        None without runs."""
        chosen = [run for run in self.runs if not (run.opens and run.num_keys >= triangle)]
        if not chosen:
            return None
        found, row = [], 0  # first row, first key, keys
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
        """int32, the rows that are in none of the runs."""
        edges = [0, *(edge for run in self.runs for edge in (run.start, run.stop)), self.num_rows]
        parts = [
            torch.arange(a, b, dtype=torch.int32)
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
        return upload(self.slots.device, torch.cat(parts))[0]
