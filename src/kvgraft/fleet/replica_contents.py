"""The text that one server holds, as far as those can tell who send it prompts: the last that fits
into its KV pool."""

from collections import OrderedDict

import numpy as np

from kvgraft.fleet.router_view import pack
from kvgraft.segments.fingerprints import SPACING, Fingerprints


class ReplicaContents:
    """Fingerprints of the prompts that a server has read, the last used ones. For one thread.

    It is an estimate: vLLM drops what was not used for longest, too, of a prompt its end first; but
    by blocks, and in favour of answers as well.

    Args:
        capacity_bytes: of text that its pool holds.
    """

    def __init__(self, capacity_bytes: float) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._begun: OrderedDict[int, None] = OrderedDict()  # chains
        self._sketches: tuple[bytes, bytes] | None = None  # as long as nothing has changed
        self.resize(capacity_bytes)

    def __len__(self) -> int:
        """Fingerprints."""
        return len(self._held)

    def resize(self, capacity_bytes: float) -> None:
        """How much text the pool holds has become known better."""
        self._capacity = int(capacity_bytes / SPACING)
        self._shrink()

    def add(self, text: Fingerprints) -> None:
        """A prompt was read."""
        for value, chained in zip(
            text.values.tolist()[::-1], text.chain().tolist()[::-1], strict=True
        ):
            self._held[value] = self._begun[chained] = None
            self._held.move_to_end(value)
            self._begun.move_to_end(chained)
        self._sketches = None
        self._shrink()

    def holds(self, text: Fingerprints) -> tuple[np.ndarray, np.ndarray]:
        """Which fingerprints of a prompt are held, and up to which ones the prompt was read as a
        beginning: bool [n] each."""
        held = np.array([value in self._held for value in text.values.tolist()], bool)
        begun = np.array([chained in self._begun for chained in text.chain().tolist()], bool)
        return held, begun

    def clear(self) -> None:
        """Nothing is held."""
        self._held.clear()
        self._begun.clear()
        self._sketches = None

    def sketches(self) -> tuple[bytes, bytes]:
        """Of the fingerprints, and of their chains, see `known_text.pack`."""
        if self._sketches is None:
            held, begun = (
                np.fromiter(values, np.uint64, len(values)) for values in (self._held, self._begun)
            )
            self._sketches = pack(held), pack(begun)
        return self._sketches

    def _shrink(self) -> None:
        """A chain is never younger than its fingerprint, and there are more of them: it goes
        first."""
        for kept in (self._held, self._begun):
            while len(kept) > self._capacity:
                kept.popitem(last=False)
                self._sketches = None
