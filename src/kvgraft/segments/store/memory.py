"""The tier in host memory."""

from typing import TYPE_CHECKING

from kvgraft.segments.store.budget import Budget
from kvgraft.segments.store.chunk import nbytes

if TYPE_CHECKING:
    from torch import Tensor


class MemoryTier:
    """Payloads by the key of their chunk, within a budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._payloads: dict[bytes, dict[str, Tensor]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._payloads

    def get(self, key: bytes) -> "dict[str, Tensor] | None":
        """The payload, which becomes the most recently used of its scope."""
        self.budget.touch(key)
        return self._payloads.get(key)

    def put(self, key: bytes, scope: bytes, payload: dict[str, "Tensor"]) -> list[bytes] | None:
        """Keep a payload; returns the keys of those that had to go, or None if there is no room for it."""
        self.remove(key)
        victims = self.budget.add(key, scope, nbytes(payload))
        if victims is not None:
            for victim in victims:
                del self._payloads[victim]
            self._payloads[key] = payload
        return victims

    def remove(self, key: bytes) -> None:
        """Let a payload go; one that is not here is no error."""
        self.budget.remove(key)
        self._payloads.pop(key, None)
