"""vTensor: a tensor of a batch of sequences, and its layout (Vortex, section 4.1, sections 8 and
9).

A flow is written for one request. Its tensors are [1, ...]; a tensor with an axis over the blocks
of the request is [1, B, ...]. B differs between requests; all other sizes are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class EntryLayout(Enum):
    """Layout of the entries of sequences."""

    BATCH = "batch"  # data[i]: every sequence has the same number of entries
    RAGGED = "ragged"  # data[indptr[i]:indptr[i + 1]]
    PAGED = "paged"  # data[indices[indptr[i]:indptr[i + 1]]]: sequences may share pages


@dataclass(frozen=True)
class NumBlocks:
    """B, the number of filled blocks of a request, plus an offset."""

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
        indptr: int64 [S + 1] for ragged and paged tensors: start of each sequence in `data` or in
            `indices`.
        indices: int64 [n] for paged tensors: pages of all sequences, end to end.
        axis: position of the axis over blocks for one request. In `data` this axis is the first.

    Raises:
        ValueError: the arguments do not make a layout.
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
        """Layout of this tensor."""
        if self.indptr is None:
            return EntryLayout.BATCH
        return EntryLayout.RAGGED if self.indices is None else EntryLayout.PAGED

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.data) if self.indptr is None else len(self.indptr) - 1

    @property
    def shape(self) -> Shape:
        """Shape for one request."""
        inner = self.data.shape[1:]
        return (
            (1, *inner)
            if self.indptr is None
            else (1, *inner[: self.axis - 1], NumBlocks(), *inner[self.axis - 1 :])
        )

    def sequence(self, number: int) -> Tensor:
        """Return one sequence, [1, ...], to which PyTorch operators apply."""
        if self.indptr is None:
            return self.data[number : number + 1]
        here = slice(int(self.indptr[number]), int(self.indptr[number + 1]))
        found = self.data[here] if self.indices is None else self.data[self.indices[here]]
        return found[None].movedim(1, self.axis)

    @classmethod
    def of(cls, sequences: Sequence[Tensor], axis: int | None) -> "VTensor":
        """Return sequences [1, ...] as one vTensor.

        The layout is batch without an axis over blocks (`axis` is None), and ragged with one.
        """
        if axis is None:
            return cls(torch.cat(list(sequences)))
        counts = torch.tensor([0, *(part.shape[axis] for part in sequences)])
        return cls(
            torch.cat([part.movedim(axis, 1)[0] for part in sequences]), counts.cumsum(0), axis=axis
        )
