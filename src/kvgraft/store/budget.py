"""Byte budget of a tier with quotas, by least recent use. A scope cannot evict chunks of a scope
that holds less."""

from collections import Counter, OrderedDict
from collections.abc import Iterator


class Budget:
    """Account of the chunks that a tier holds, by key and scope. It holds no payload.

    Args:
        capacity: bytes.
        quota: share of it (0 to 1] that one scope may take.
    """

    def __init__(self, capacity: int, quota: float) -> None:
        if capacity < 0:
            raise ValueError(f"a budget must be at least 0 bytes, got {capacity}")
        if not 0.0 < quota <= 1.0:
            raise ValueError(f"quota must be in (0, 1], got {quota}")
        self.capacity = capacity
        self.share = int(quota * capacity)
        # by scope and key, least recently used first
        self._sizes: dict[bytes, OrderedDict[bytes, int]] = {}
        self._scopes: dict[bytes, bytes] = {}  # by key
        self._held: Counter[bytes] = Counter()  # bytes by scope
        self._pinned: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._scopes

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._held.total()

    def held(self, scope: bytes) -> int:
        """Bytes that a scope holds."""
        return self._held[scope]

    def fits(self, size: int) -> bool:
        """Return whether a chunk of this size fits into the quota of a scope that holds nothing
        else."""
        return size <= self.share

    def add(self, key: bytes, scope: bytes, size: int) -> list[bytes] | None:
        """Add a chunk. Return the keys that were removed for it.

        Over its quota, the scope loses its own oldest chunks. Over the capacity, the scope that
        holds most loses its oldest; in a tie that is this scope.

        Returns:
            None if there is no room apart from pinned chunks and scopes that hold less; nothing has
                changed then.
        """
        self.remove(key)
        victims = self._plan(scope, size)
        if victims is not None:
            for victim in victims:
                self.remove(victim)
            self.hold(key, scope, size)
        return victims

    def hold(self, key: bytes, scope: bytes, size: int, *, pinned: bool = False) -> None:
        """Add a chunk that exists already, without checking the limits."""
        self.remove(key)
        self._sizes.setdefault(scope, OrderedDict())[key] = size
        self._scopes[key] = scope
        self._held[scope] += size
        self.pin(key, pinned)

    def remove(self, key: bytes) -> None:
        """Remove a chunk. Unknown keys are ignored."""
        if (scope := self._scopes.pop(key, None)) is None:
            return
        self._held[scope] -= self._sizes[scope].pop(key)
        self._pinned.discard(key)
        if not self._sizes[scope]:
            del self._sizes[scope], self._held[scope]

    def touch(self, key: bytes) -> None:
        """Make a chunk the most recently used of its scope."""
        if key in self._scopes:
            self._sizes[self._scopes[key]].move_to_end(key)

    def pin(self, key: bytes, pinned: bool = True) -> None:
        """Pin or unpin a chunk that is held; a pinned one is never evicted."""
        if pinned and key in self._scopes:
            self._pinned.add(key)
        else:
            self._pinned.discard(key)

    def _plan(self, scope: bytes, size: int) -> list[bytes] | None:
        """Choose the chunks to evict for one of this size; None if there is no room."""
        held = Counter(self._held)
        held[scope] += size
        queues = {other: self._evictable(other) for other in held}
        victims: list[bytes] = []
        total = held.total()
        while held[scope] > self.share or total > self.capacity:
            over_quota = held[scope] > self.share
            loser = (
                scope if over_quota else max(held, key=lambda other: (held[other], other == scope))
            )
            if (victim := next(queues[loser], None)) is not None:
                held[loser] -= self._sizes[loser][victim]
                total -= self._sizes[loser][victim]
                victims.append(victim)
            elif loser == scope:
                return None
            else:
                # All remaining chunks of this scope are pinned.
                del held[loser]

        return victims

    def _evictable(self, scope: bytes) -> Iterator[bytes]:
        return (key for key in self._sizes.get(scope, ()) if key not in self._pinned)
