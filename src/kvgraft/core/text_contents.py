"""Estimate of the text that one server holds: the latest prompts that fit into its KV pool."""

from collections import OrderedDict

import numpy as np

from kvgraft.core.fingerprints import SPACING, Fingerprints


class TextContents:
    """Fingerprints of the prompts that a server has read, in order of their last use; for one
    thread.

    The estimate evicts the least recently used text first, and the end of a prompt before its
    beginning, as vLLM does. vLLM evicts by blocks, and answers use blocks as well.

    Args:
        capacity_bytes: bytes of text that the server's pool holds.

    Attributes:
        version: a number that increases with each change.
    """

    def __init__(self, capacity_bytes: float) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        # chains of fingerprints from the beginning of a prompt
        self._begun: OrderedDict[int, None] = OrderedDict()
        self.version = 0
        self.resize(capacity_bytes)

    def __len__(self) -> int:
        """Return the number of fingerprints."""
        return len(self._held)

    def resize(self, capacity_bytes: float) -> None:
        """Set the bytes of text that the pool holds, and evict what does not fit."""
        self._capacity = int(capacity_bytes / SPACING)
        self._shrink()

    def add(self, text: Fingerprints) -> None:
        """Add the fingerprints of a prompt that the server has read."""
        for value, chained in zip(
            text.values.tolist()[::-1], text.chain().tolist()[::-1], strict=True
        ):
            self._held[value] = self._begun[chained] = None
            self._held.move_to_end(value)
            self._begun.move_to_end(chained)
        self.version += 1
        self._shrink()

    def holds(self, text: Fingerprints) -> tuple[np.ndarray, np.ndarray]:
        """Return the held fingerprints of a prompt, and those held as the beginning of a prompt.

        Returns:
            Two bool arrays [n], by fingerprint of the prompt.
        """
        held = np.array([value in self._held for value in text.values.tolist()], bool)
        begun = np.array([chained in self._begun for chained in text.chain().tolist()], bool)
        return held, begun

    def clear(self) -> None:
        """Remove all fingerprints."""
        self._held.clear()
        self._begun.clear()
        self.version += 1

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all fingerprints and their chains: two arrays uint64 [n]."""
        held, begun = (
            np.fromiter(values, np.uint64, len(values)) for values in (self._held, self._begun)
        )
        return held, begun

    def _shrink(self) -> None:
        """Evict the least recently used entries above the capacity.

        There are at least as many chains as fingerprints, and a chain is never more recent than its
        fingerprint. So the chain is evicted first.
        """
        for kept in (self._held, self._begun):
            while len(kept) > self._capacity:
                kept.popitem(last=False)
                self.version += 1
