"""The tiers of a store together: host memory and, below it, the disk and a shared place, which
other processes also change."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.core.chunk import ChunkRecord, Gone, nbytes
from kvgraft.store.budget import Budget
from kvgraft.store.catalogue import CatalogueDamaged
from kvgraft.store.disk import DiskTier
from kvgraft.store.shared import SharedTier

if TYPE_CHECKING:
    from torch import Tensor


class MemoryTier:
    """Payloads by the key of their chunk, within a budget. It has no lock: the caller must
    serialise access."""

    hits = "ram_hits"

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._payloads: dict[bytes, dict[str, Tensor]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._payloads

    def put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Store a payload. Return the keys that were evicted for it, or None if there is no
        room."""
        self.remove(record.key)
        evicted = self.budget.add(record.key, record.chunk.scope, nbytes(stored))
        if evicted is not None:
            for key in evicted:
                del self._payloads[key]
            self._payloads[record.key] = stored
        return evicted

    def get(self, record: ChunkRecord) -> "dict[str, Tensor] | None":
        """Return the payload, or None if it is not here."""
        return self._payloads.get(record.key)

    def touch(self, key: bytes) -> None:
        """Make a payload the most recently used of its scope. Unknown keys are ignored."""
        self.budget.touch(key)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin or unpin a payload that is here; a pinned one is never evicted."""
        self.budget.pin(key, pinned)

    def remove(self, key: bytes) -> None:
        """Remove a payload. Unknown keys are ignored."""
        self.budget.remove(key)
        self._payloads.pop(key, None)


if TYPE_CHECKING:
    from torch import Tensor


class Tiers:
    """All tiers of a store. A chunk is put into every tier that accepts it, and read from the first
    that has it, then cached in host memory.

    It has no lock, like `MemoryTier`.

    Args:
        disk, shared: None: no such tier.
    """

    def __init__(
        self, memory: MemoryTier, disk: DiskTier | None, shared: SharedTier | None
    ) -> None:
        self.memory, self.disk, self.shared = memory, disk, shared
        self._below = [tier for tier in (disk, shared) if tier is not None]
        self._near = [tier for tier in (memory, disk) if tier is not None]
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(
        cls,
        ram_bytes: int,
        directory: Path | None,
        disk_bytes: int,
        quota: float,
        max_backlog_bytes: int,
        shared: SharedTier | None,
    ) -> "Tiers":
        """Open the tiers; see `SegmentStore` for arguments and errors."""
        memory = MemoryTier(Budget(ram_bytes, quota))
        if directory is None:
            return cls(memory, None, shared)
        try:
            return cls(
                memory, DiskTier(directory, Budget(disk_bytes, quota), max_backlog_bytes), shared
            )
        except (CatalogueDamaged, sqlite3.Error) as error:
            raise CatalogueDamaged(
                f"the catalogue of {directory} cannot be used: {error}"
            ) from error

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in (self.memory, *self._below))

    @property
    def counts(self) -> Counter[str]:
        """Blocks served by tier, refused chunks, and the counts of the tiers below."""
        return sum((tier.counts for tier in self._below), self._counts)

    def put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Store a chunk. Return the keys that were evicted from a tier for it, or None, counted, if
        no tier takes it."""
        evicted = [tier.put(record, stored) for tier in (self.memory, *self._below)]
        if all(keys is None for keys in evicted):
            # Tiers below have counted it themselves.
            if not self._below:
                self._counts["too_large"] += 1
            return None
        return [key for keys in evicted for key in keys or ()]

    def write_missing(self, record: ChunkRecord) -> None:
        """Write a chunk that is in host memory to the tiers that lack it."""
        missing = [tier for tier in self._below if record.key not in tier]
        if missing and (stored := self.memory.get(record)) is not None:
            for tier in missing:
                tier.put(record, stored)

    def get(
        self,
        record: ChunkRecord,
        num_blocks: int,
        arrived: Mapping[ChunkRecord, dict[str, "Tensor"]],
    ) -> tuple["dict[str, Tensor] | None", list[bytes]]:
        """Return the stored tensors of a chunk, and the keys that were evicted from host memory for
        it.

        Args:
            num_blocks: number of its blocks that are needed, for the counts.
            arrived: chunks that `SharedTier.fetch` has returned.
        """
        for tier in self._near:
            if (stored := tier.get(record)) is not None:
                self._counts[tier.hits] += num_blocks
                return stored, [] if tier is self.memory else self.memory.put(record, stored) or []
        if record in arrived:
            self._counts[SharedTier.hits] += num_blocks
            return arrived[record], self.memory.put(record, arrived[record]) or []
        return None, []

    def far(self, records: Iterable[ChunkRecord]) -> list[ChunkRecord]:
        """Records of chunks that only the shared tier has."""
        keys = {record.key: record for record in records}
        if self.shared is None:
            return []
        return [
            record for key, record in keys.items() if key in self.shared and not self.is_near(key)
        ]

    def is_near(self, key: bytes) -> bool:
        """Return whether a tier of this machine has a chunk."""
        return any(key in tier for tier in self._near)

    def touch(self, key: bytes) -> None:
        """Note that a chunk was used. Unknown keys are ignored. The shared place notices its own
        reads."""
        for tier in self._near:
            tier.touch(key)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin or unpin a chunk that is here: on disk if it is there, otherwise in memory. The
        shared place has no pins."""
        tier = self.disk if self.disk and key in self.disk else self.memory
        tier.pin(key, pinned)

    def remove(self, key: bytes) -> None:
        """Remove a chunk from all tiers."""
        for tier in (self.memory, *self._below):
            tier.remove(key)

    def poll(self, *, others: bool) -> dict[bytes, ChunkRecord | Gone]:
        """Return changes of the tiers below, see `DiskTier.poll`. A chunk that is already here is
        no news from the shared tier."""
        news = self.disk.poll(others=others) if self.disk else {}
        if self.shared and others:
            for key, what in self.shared.poll().items():
                is_known = key in news if what is Gone.EVICTED else self.is_near(key)
                if what is Gone.REMOVED or not is_known:
                    news[key] = what
        return news

    def removed(self, key: bytes) -> ChunkRecord | None:
        """Handle a chunk that another process has removed from the disk or the shared place.

        Returns:
            The record of the shared tier, if that still has the chunk.
        """
        found = self.shared.record(key) if self.shared else None
        if self.shared and self.disk and found is None:
            self.disk.remove(key)
        return found

    def flush(self) -> None:
        """Wait until all chunks that were put are written; for the shared tier 10 s at most."""
        for tier in self._below:
            tier.flush()

    def close(self) -> None:
        """Write all pending chunks, then close directory and shared place."""
        for tier in self._below:
            tier.close()
