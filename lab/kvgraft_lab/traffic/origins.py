"""Origins of a prompt's tokens, and their counts."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Origin(IntEnum):
    """Origin of a token's KV; grafts of depth d are GRAFTED + d."""

    NEW = 0
    PREFIX = 1
    CONTINUED = 2
    # runs of near-duplicates that are too short for exact matching
    SIMILAR = 3
    GRAFTED = 4


@dataclass(frozen=True, eq=False)
class Stretches:
    """A prompt as stretches of one origin: origins int16 [n] and their lengths in tokens int32 [n],
    in order.
    """

    origins: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, origins: np.ndarray) -> "Stretches":
        """Return the stretches of an `Origin` per token, int16 [T]."""
        starts = np.concatenate(([0], np.flatnonzero(np.diff(origins)) + 1))
        return cls(origins[starts], np.diff(starts, append=len(origins)).astype(np.int32))


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of prompts by origin: all that a cost estimate needs.

    Attributes:
        grafted: grafted tokens by depth, from 0 to the greatest one.
        similar: tokens of near-duplicates, at any depth.
    """

    requests: int
    prompt: int
    prefix: int
    continued: int
    grafted: tuple[int, ...]
    similar: int
    new: int

    @classmethod
    def of(cls, prompts: Iterable[Stretches]) -> "TokenCounts":
        """Return the counts of several prompts."""
        counted = list(prompts)
        origins = np.concatenate([np.empty(0, np.int16), *(one.origins for one in counted)])
        lengths = np.concatenate([np.empty(0, np.int32), *(one.lengths for one in counted)])
        sums = np.bincount(origins, lengths, minlength=Origin.GRAFTED + 1).astype(np.int64).tolist()
        return cls(
            requests=len(counted),
            prompt=sum(sums),
            prefix=sums[Origin.PREFIX],
            continued=sums[Origin.CONTINUED],
            grafted=tuple(sums[Origin.GRAFTED :]),
            similar=sums[Origin.SIMILAR],
            new=sums[Origin.NEW],
        )

    @property
    def known(self) -> int:
        """Number of tokens that are not new."""
        return self.prompt - self.new

    def share(self, tokens: int) -> float:
        """Return tokens as a share of all prompt tokens."""
        return tokens / self.prompt if self.prompt else 0.0
