"""The tier in host memory."""

from typing import TYPE_CHECKING

from kvgraft.segments.store.budget import Budget
from kvgraft.segments.store.chunk import ChunkRecord, nbytes

if TYPE_CHECKING:
    from torch import Tensor


class MemoryTier:
    """Payloads by the key of their chunk, within a budget. It has no lock: who has it lets one
    thread in at a time."""

    hits = "ram_hits"

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._payloads: dict[bytes, dict[str, Tensor]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._payloads

    def put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Keep a payload; returns the keys of those that had to go, or None if there is no room for
        it."""
        self.remove(record.key)
        evicted = self.budget.add(record.key, record.chunk.scope, nbytes(stored))
        if evicted is not None:
            for key in evicted:
                del self._payloads[key]
            self._payloads[record.key] = stored
        return evicted

    def get(self, record: ChunkRecord) -> "dict[str, Tensor] | None":
        """The payload, if it is here."""
        return self._payloads.get(record.key)

    def touch(self, key: bytes) -> None:
        """Make a payload the most recently used of its scope; one that is not here is no error."""
        self.budget.touch(key)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Whether a payload that is here is never evicted."""
        self.budget.pin(key, pinned)

    def remove(self, key: bytes) -> None:
        """Let a payload go; one that is not here is no error."""
        self.budget.remove(key)
        self._payloads.pop(key, None)
