"""The tiers of a store as one: host memory and, below it, the disk, where others may come and go."""

import sqlite3
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.segments.store.budget import Budget
from kvgraft.segments.store.catalogue import CatalogueDamaged
from kvgraft.segments.store.chunk import Record
from kvgraft.segments.store.disk import DiskTier, Gone
from kvgraft.segments.store.memory import MemoryTier

if TYPE_CHECKING:
    from torch import Tensor


class Tiers:
    """What is put goes into every tier that takes it; what is asked for comes from the first that has it, and goes into
    host memory. It has no lock, as `MemoryTier`.

    Args:
        disk: None: host memory only.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier | None) -> None:
        self.memory, self.disk = memory, disk
        self._all: list[MemoryTier | DiskTier] = [memory] if disk is None else [memory, disk]
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(
        cls, ram_bytes: int, directory: Path | None, disk_bytes: int, quota: float, max_backlog_bytes: int
    ) -> "Tiers":
        """See `SegmentStore` for the arguments, and for what it raises."""
        memory = MemoryTier(Budget(ram_bytes, quota))
        if directory is None:
            return cls(memory, None)
        try:
            return cls(memory, DiskTier(directory, Budget(disk_bytes, quota), max_backlog_bytes))
        except (CatalogueDamaged, sqlite3.Error) as error:
            raise CatalogueDamaged(f"the catalogue of {directory} cannot be used: {error}") from error

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in self._all)

    @property
    def counts(self) -> Counter[str]:
        """Blocks that were served, by tier; what was refused; and what the disk counts."""
        return self._counts + (self.disk.counts if self.disk else Counter())

    def put(self, record: Record, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Keep a chunk; the keys of those that had to leave a tier for it, or None, counted, if no tier takes it."""
        evicted = [tier.put(record, stored) for tier in self._all]
        if all(keys is None for keys in evicted):
            if self.disk is None:  # which has counted it
                self._counts["too_large"] += 1
            return None
        return [key for keys in evicted for key in keys or ()]

    def write_missing(self, record: Record) -> None:
        """Write a chunk that is in host memory only."""
        if self.disk and record.key not in self.disk and (stored := self.memory.get(record)) is not None:
            self.disk.put(record, stored)

    def get(self, record: Record, num_blocks: int) -> tuple["dict[str, Tensor] | None", list[bytes]]:
        """What is stored of a chunk, of which so many blocks are wanted, and the keys of those that had to leave host
        memory for it."""
        for tier in self._all:
            if (stored := tier.get(record)) is not None:
                self._counts[tier.hits] += num_blocks
                evicted = None if tier is self.memory else self.memory.put(record, stored)
                return stored, evicted or []
        return None, []

    def touch(self, key: bytes) -> None:
        """Note that a chunk was used; one that is not here is no error."""
        for tier in self._all:
            tier.touch(key)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Whether a chunk that is here is never evicted: on disk, if it is there."""
        tier = self.disk if self.disk and key in self.disk else self.memory
        tier.pin(key, pinned)

    def poll(self, *, others: bool) -> dict[bytes, Record | Gone]:
        """See `DiskTier.poll`."""
        return self.disk.poll(others=others) if self.disk else {}

    def flush(self) -> None:
        """Wait until all that was put is written."""
        if self.disk:
            self.disk.flush()

    def close(self) -> None:
        """Write all that was put, then let the directory go."""
        if self.disk:
            self.disk.close()
