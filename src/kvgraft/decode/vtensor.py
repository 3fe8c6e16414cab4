"""vTensor: a tensor of a batch of sequences, and how it is laid out (Vortex, section 4.1, sections
8 and 9).

A flow is written for one request: there a tensor is [1, ...], and one with an axis over the blocks
of the request has it second, [1, B, ...]. B differs between requests; all other sizes are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class EntryLayout(Enum):
    """Where the entries of a sequence lie."""

    BATCH = "batch"  # data[i]: of every sequence as many
    RAGGED = "ragged"  # data[indptr[i]:indptr[i + 1]]
    PAGED = "paged"  # data[indices[indptr[i]:indptr[i + 1]]]: sequences may share pages


@dataclass(frozen=True)
class NumBlocks:
    """B, the number of blocks of a request that have been filled, or so many less or more."""

    offset: int = 0

    def __add__(self, count: int) -> "NumBlocks":
        return NumBlocks(self.offset + count)

    def __sub__(self, count: int) -> "NumBlocks":
        return NumBlocks(self.offset - count)

    def __repr__(self) -> str:
        return f"B{self.offset:+d}" if self.offset else "B"


Dim = int | NumBlocks
Shape = tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class VTensor:
    """Data of a batch of sequences and its layout (Eq. 5).

    Attributes:
        data: batch [S, ...]; ragged [n, ...]; paged [pages, ...].
        indptr: int64 [S + 1] of ragged and paged tensors: where each sequence begins in `data` or
            in `indices`.
        indices: int64 [n] of paged tensors: pages of the sequences, end to end.
        axis: where one request sees the axis over blocks, which `data` has first.

    Raises:
        ValueError: what is given does not make a layout.
    """

    data: Tensor
    indptr: Tensor | None = None
    indices: Tensor | None = None
    axis: int = 1

    def __post_init__(self) -> None:
        if self.indptr is None:
            if self.indices is not None:
                raise ValueError("a vTensor with indices needs an indptr")
            return
        count = len(self.data if self.indices is None else self.indices)
        if self.indptr[0] != 0 or self.indptr[-1] != count or bool((self.indptr.diff() < 0).any()):
            raise ValueError(f"indptr {self.indptr.tolist()} does not ascend from 0 to {count}")
        if (
            self.indices is not None
            and count
            and not 0 <= int(self.indices.min()) <= int(self.indices.max()) < len(self.data)
        ):
            raise ValueError(f"indices are not pages: there are {len(self.data)}")

    @property
    def layout(self) -> EntryLayout:
        """Which one it has."""
        if self.indptr is None:
            return EntryLayout.BATCH
        return EntryLayout.RAGGED if self.indices is None else EntryLayout.PAGED

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.data) if self.indptr is None else len(self.indptr) - 1

    @property
    def shape(self) -> Shape:
        """As one request sees it."""
        inner = self.data.shape[1:]
        return (
            (1, *inner)
            if self.indptr is None
            else (1, *inner[: self.axis - 1], NumBlocks(), *inner[self.axis - 1 :])
        )

    def sequence(self, number: int) -> Tensor:
        """[1, ...]: what the PyTorch operators are applied to."""
        if self.indptr is None:
            return self.data[number : number + 1]
        here = slice(int(self.indptr[number]), int(self.indptr[number + 1]))
        found = self.data[here] if self.indices is None else self.data[self.indices[here]]
        return found[None].movedim(1, self.axis)

    @classmethod
    def of(cls, sequences: Sequence[Tensor], axis: int | None) -> "VTensor":
        """Sequences [1, ...] in batch layout, or, if an axis of theirs is over blocks, ragged."""
        if axis is None:
            return cls(torch.cat(list(sequences)))
        counts = torch.tensor([0, *(part.shape[axis] for part in sequences)])
        return cls(
            torch.cat([part.movedim(axis, 1)[0] for part in sequences]), counts.cumsum(0), axis=axis
        )
