"""Floating-point operations of a prefill pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """Numbers of keys that the queries of a pass see.

    Attributes:
        whole, local: int64, the sums over the queries of each prompt, for heads that see all tokens
            and for local heads. Queries of `unread` are not in them.
        unread: positions int64 [n] on the device of queries that the host does not know, and the
            prompt of each, int64 [n]; None if it knows all.
    """

    whole: np.ndarray
    local: np.ndarray
    unread: tuple[Tensor, np.ndarray] | None = None


class FlopCounts:
    """Counts of floating-point operations.

    Args:
        num_prompts: prompts of the pass.
        local_tokens: number of tokens that local heads see at most.

    Attributes:
        attention, ffn: int64, per prompt the operations of all layers and scores: of the attention
            block with its projections, and of the FFN. `settle` completes them.
    """

    def __init__(self, num_prompts: int, local_tokens: int) -> None:
        self.attention = np.zeros(num_prompts, np.int64)
        self.ffn = np.zeros(num_prompts, np.int64)
        self._local_tokens = local_tokens
        # positions on the device, their prompts, operations for each key in both kinds of heads
        self._unread: list[tuple[Tensor, np.ndarray, int, int]] = []

    def attend(self, seen: SeenKeys, whole: int, local: int = 0) -> None:
        """Count attention, with so many operations for each query and key in heads of each kind."""
        self.attention += seen.whole * whole + seen.local * local
        if seen.unread is not None:
            self._unread.append((*seen.unread, whole, local))

    def settle(self) -> None:
        """Count the queries that the host did not know. Waits for the device."""
        if not self._unread:
            return
        # Layers of one set of tokens share their positions.
        tensors = list({id(positions): positions for positions, *_ in self._unread}.values())
        read = torch.cat(tensors).cpu().split([len(positions) for positions in tensors])
        known = {id(there): here.numpy() + 1 for there, here in zip(tensors, read, strict=True)}
        for positions, prompts, whole, local in self._unread:
            keys = known[id(positions)]
            every = keys * whole + np.minimum(keys, self._local_tokens) * local
            np.add.at(self.attention, prompts, every)
        self._unread.clear()
