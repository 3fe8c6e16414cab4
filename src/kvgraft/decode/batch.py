"""Sequences of a decode step, the places of their blocks, and block tables for paged attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvgraft.decode.flow import Flow
from kvgraft.decode.vtensor import NumBlocks
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kernels.workload import Lengths, parts_of


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive sequences of similar length.

    Attributes:
        rows: the sequences of the batch.
        num_blocks: full blocks of the longest sequence.
        spacing: first row, and distance from one sequence's rows to the next's. None unless the
            rows of each sequence are consecutive and all distances are equal. With a spacing,
            blocks are read in place.
    """

    rows: slice
    num_blocks: int
    spacing: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a step, one for each KV head of each request.

    All layers share what is computed here, so each result is computed once.

    Attributes:
        rows: int64 [S, T], row of each block in the caches [rows, ...]; any row after the last
            block.
        tokens: int64 [S], tokens of each sequence. They are on the CPU, or on the device of `rows`
            if the host does not know them. In the second case, results are computed on the device,
            and their shapes depend only on the shape of `rows`.
    """

    rows: Tensor
    tokens: Tensor
    block_size: int

    @cached_property
    def lengths(self) -> Tensor:
        """`tokens` on the device of `rows`."""
        return upload(self.rows.device, self.tokens)[0]

    @cached_property
    def totals(self) -> Tensor:
        """Number of blocks that hold tokens, int64 [S] on the device of `rows`."""
        return upload(self.rows.device, -(-self.tokens // self.block_size))[0]

    @cached_property
    def filled(self) -> Tensor:
        """Number of full blocks B, int64 [S] on the device of `rows`. Only full blocks have entries
        in the caches of a flow.
        """
        return upload(self.rows.device, self.tokens // self.block_size)[0]

    @cached_property
    def unwritten(self) -> Tensor:
        """Number of free token slots in the last block, int64 [S] on the device of `rows`."""
        return upload(self.rows.device, -self.tokens % self.block_size)[0]

    @cached_property
    def num_blocks(self) -> int:
        """B of the longest sequence, or an upper bound if the host does not know it."""
        return (
            int(self.tokens.max()) // self.block_size if self.tokens.is_cpu else self.rows.shape[1]
        )

    @cached_property
    def work(self) -> Lengths:
        """Full blocks of each sequence, for a plan that divides them among the programs of a
        kernel.
        """
        return Lengths(self.filled, self._if_known(self.tokens // self.block_size))

    @memoised
    def attended(self, width: int) -> Lengths:
        """Return an upper bound of the tokens that each sequence attends to, for tables of `width`
        blocks.
        """
        known = (-(-self.tokens // self.block_size)).clamp(max=width) * self.block_size
        return Lengths(upload(self.rows.device, known)[0], self._if_known(known))

    def _if_known(self, numbers: Tensor) -> Tensor | None:
        return numbers if numbers.is_cpu else None

    @memoised
    def fixed(self, selection: tuple[int | NumBlocks, ...], flow: Flow) -> tuple[Tensor, Tensor]:
        """Return the `tables` of blocks that are the same for every query."""
        return tables(static_selection(selection, self), self, flow)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Sequences with full blocks, in parts that need little padding."""
        return tuple(
            Part(rows, most, _spacing(self.rows[rows, :most]))
            for rows, most in parts_of((self.tokens // self.block_size).tolist())
        )

    @cached_property
    def missing(self) -> Tensor | None:
        """Blocks that a sequence does not have, bool [S, B]; None if all sequences have the same
        number.
        """
        if bool((self.tokens // self.block_size == self.num_blocks).all()):
            return None
        return torch.arange(self.num_blocks, device=self.rows.device) >= self.filled[:, None]


def _spacing(rows: Tensor) -> tuple[int, int] | None:
    """Return `Part.spacing` of rows int64 [s, t], or None on a device, because looking would wait
    for it.
    """
    if not rows.is_cpu:
        return None
    apart = rows[:, 0].diff()
    step = int(apart[0]) if len(apart) else 0
    if step < 0 or bool((apart != step).any()) or bool((rows.diff(dim=1) != 1).any()):
        return None
    return int(rows[0, 0]), step


def static_selection(selection: Sequence[int | NumBlocks], batch: Batch) -> Tensor:
    """Return blocks that are the same for every query, int64 [S, n]; -1 where a sequence has no
    such block.
    """
    filled = batch.filled[:, None]
    fixed, from_end = _places(tuple(selection), filled.device)
    found = fixed + filled * from_end  # [S, n]
    return found.masked_fill((found < 0) | (found >= filled), -1)


@cache
def _places(selection: tuple[int | NumBlocks, ...], device: torch.device) -> Tensor:
    """Return int64 [2, n]: the distance of each block, and 1 where it counts from the end."""
    places = [
        (block, block < 0) if isinstance(block, int) else (block.offset, True)
        for block in selection
    ]
    return upload(device, torch.tensor(places).T.contiguous())[0]


def tables(selection: Tensor, batch: Batch, flow: Flow) -> tuple[Tensor, Tensor]:
    """Return block tables for paged attention: the blocks that a flow chose and those that every
    query attends to.

    Args:
        selection: int64 [S, n], -1 for none.

    Returns:
        Rows of the blocks, int64 [S, m]: in order, each once, then the last one repeated. And the
        number of tokens in them, int64 [S].
    """
    # 'behind' sorts after every block
    behind, device = batch.totals[:, None], selection.device
    last = (behind - 1).clamp(min=0)

    always = torch.arange(-flow.LAST, flow.FIRST, device=device)
    fixed = torch.where(always < 0, always + behind, always).clamp(min=0).minimum(last)

    every = (
        torch.cat((fixed, torch.where(selection < 0, behind, selection)), dim=1).sort(dim=1).values
    )
    again = torch.nn.functional.pad(every[:, 1:] == every[:, :-1], (1, 0))
    every = torch.where(again, behind, every).sort(dim=1).values

    lengths = (every < behind).sum(1) * batch.block_size - batch.unwritten
    return batch.rows.gather(1, every.minimum(last)), lengths
