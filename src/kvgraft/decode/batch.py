"""The sequences of a step, where their blocks lie, and the block tables that paged attention
takes."""

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
        rows: which of the batch.
        num_blocks: that are full, of the longest.
        spacing: the first row and the distance from one sequence's to the next's, if the rows of
            each follow one another and all sequences are equally far apart: then they can be read
            where they are.
    """

    rows: slice
    num_blocks: int
    spacing: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a step, one for each KV head of each request. What all layers share is made
    of them once.

    Attributes:
        rows: int64 [S, T], the row of each block in the caches [rows, ...]; any row behind the last
            block.
        tokens: int64 [S] on the CPU, of each sequence; beside the rows if the host does not know
            them: then what follows from them is computed there, in shapes that depend on `rows`
            alone.
    """

    rows: Tensor
    tokens: Tensor
    block_size: int

    @cached_property
    def lengths(self) -> Tensor:
        """`tokens` beside the rows."""
        return upload(self.rows.device, self.tokens)[0]

    @cached_property
    def totals(self) -> Tensor:
        """int64 [S] beside the rows, blocks that hold tokens."""
        return upload(self.rows.device, -(-self.tokens // self.block_size))[0]

    @cached_property
    def filled(self) -> Tensor:
        """int64 [S] beside the rows, those that are full: B. Only they have entries in the caches
        of a flow."""
        return upload(self.rows.device, self.tokens // self.block_size)[0]

    @cached_property
    def unwritten(self) -> Tensor:
        """int64 [S] beside the rows, places for tokens in the last block."""
        return upload(self.rows.device, -self.tokens % self.block_size)[0]

    @cached_property
    def num_blocks(self) -> int:
        """B of the longest, or more if the host does not know."""
        return (
            int(self.tokens.max()) // self.block_size if self.tokens.is_cpu else self.rows.shape[1]
        )

    @cached_property
    def work(self) -> Lengths:
        """The full blocks of each sequence, to be shared among the programs of a kernel."""
        return Lengths(self.filled, self._if_known(self.tokens // self.block_size))

    @memoised
    def attended(self, width: int) -> Lengths:
        """The tokens that each sequence attends to at most, in a table of so many blocks."""
        known = (-(-self.tokens // self.block_size)).clamp(max=width) * self.block_size
        return Lengths(upload(self.rows.device, known)[0], self._if_known(known))

    def _if_known(self, numbers: Tensor) -> Tensor | None:
        return numbers if numbers.is_cpu else None

    @memoised
    def fixed(self, selection: tuple[int | NumBlocks, ...], flow: Flow) -> tuple[Tensor, Tensor]:
        """`tables` of blocks that are the same for every query."""
        return tables(static_selection(selection, self), self, flow)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The sequences that have full blocks, so that little is padded where each part is computed
        by itself."""
        return tuple(
            Part(rows, most, _spacing(self.rows[rows, :most]))
            for rows, most in parts_of((self.tokens // self.block_size).tolist())
        )

    @cached_property
    def missing(self) -> Tensor | None:
        """bool [S, B]: blocks that a sequence does not have; None if all have as many."""
        if bool((self.tokens // self.block_size == self.num_blocks).all()):
            return None
        return torch.arange(self.num_blocks, device=self.rows.device) >= self.filled[:, None]


def _spacing(rows: Tensor) -> tuple[int, int] | None:
    """See `Part.spacing`; rows int64 [s, t]. None on a device, since to look would be to wait."""
    if not rows.is_cpu:
        return None
    apart = rows[:, 0].diff()
    step = int(apart[0]) if len(apart) else 0
    if step < 0 or bool((apart != step).any()) or bool((rows.diff(dim=1) != 1).any()):
        return None
    return int(rows[0, 0]), step


def static_selection(selection: Sequence[int | NumBlocks], batch: Batch) -> Tensor:
    """Blocks that are the same for every query; those that a sequence does not have are none."""
    filled = batch.filled[:, None]
    fixed, from_end = _places(tuple(selection), filled.device)
    found = fixed + filled * from_end  # [S, n]
    return found.masked_fill((found < 0) | (found >= filled), -1)


@cache
def _places(selection: tuple[int | NumBlocks, ...], device: torch.device) -> Tensor:
    """int64 [2, n]: of each block its distance from the beginning or, where the second is 1, from
    the end."""
    places = [
        (block, block < 0) if isinstance(block, int) else (block.offset, True)
        for block in selection
    ]
    return upload(device, torch.tensor(places).T.contiguous())[0]


def tables(selection: Tensor, batch: Batch, flow: Flow) -> tuple[Tensor, Tensor]:
    """Block tables of what a flow chose and of what is attended to in any case, as paged attention
    takes them.

    Args:
        selection: int64 [S, n], -1 for none.

    Returns:
        The rows of the blocks int64 [S, m], in order, each once, then the last one again; and how
        many tokens they hold, int64 [S].
    """
    behind, device = batch.totals[:, None], selection.device  # sorts behind every block
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
