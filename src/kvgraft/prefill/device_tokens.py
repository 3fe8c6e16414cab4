"""Sets of tokens that the device has chosen, before the host knows them.

How many tokens are chosen in each prompt depends only on shares, so the host knows it. It can
launch all work on the chosen tokens without waiting for their positions.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvgraft.kernels.layout import joined


@dataclass(frozen=True, eq=False)
class FoundTokens:
    """Tokens that the device has chosen together.

    Attributes:
        tokens: int64 [n] on the device, ascending indices in 0..T.
        counts: number of them in each prompt.
    """

    tokens: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DeviceTokens:
    """A set of tokens that only the device knows completely.

    Rows of these tokens are in the order of `known`, followed by those of each part of `found`.

    Attributes:
        known: bool [T] on the CPU, tokens that the host knows.
        found: all other tokens, not empty; no token occurs twice.
        asks: bool [k] on the device, the known tokens whose queries score; None for all of them.
    """

    known: Tensor
    found: tuple[FoundTokens, ...]
    asks: Tensor | None = None

    def __or__(self, known: Tensor) -> "DeviceTokens":
        """Add tokens bool [T] that are not among those found."""
        return replace(self, known=self.known | known)

    @cached_property
    def masks(self) -> list[Tensor]:
        """The tokens of each part of `found`, bool [T] on the CPU. Waits for the device."""
        tokens = joined([part.tokens for part in self.found]).cpu()
        masks = []
        for part in tokens.split([len(part.tokens) for part in self.found]):
            masks.append(torch.zeros_like(self.known))
            masks[-1][part] = True
        return masks

    @cached_property
    def mask(self) -> Tensor:
        """All tokens of the set, bool [T] on the CPU. Waits for the device."""
        return torch.stack([self.known, *self.masks]).any(0)

    @property
    def found_counts(self) -> np.ndarray:
        """Number of found tokens in each prompt, int64."""
        return np.array([part.counts for part in self.found], np.int64).sum(0)


TokenSet = Tensor | DeviceTokens  # bool [T] on the CPU, if the host knows all tokens


def are_equal(tokens: TokenSet, others: TokenSet) -> bool:
    """Return whether two sets are known to be equal, without waiting for the device."""
    if tokens is others:
        return True
    return isinstance(tokens, Tensor) and isinstance(others, Tensor) and tokens.equal(others)
