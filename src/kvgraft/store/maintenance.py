"""Maintenance of a store's directory without a store: operations on its chunks for an operator."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvgraft.store.budget import Budget
from kvgraft.store.catalogue import Catalogue, CatalogueRow, check_is_ours, within
from kvgraft.store.files import (
    CATALOGUE,
    BadPayload,
    DirectoryLock,
    PayloadFiles,
    private_directory,
)


class StoreDirectory:
    """Contents of a store's directory, for its operator. Stores may use it meanwhile; they notice
    changes.

    Raises:
        FileNotFoundError: it is no directory of a store.
        CatalogueDamaged, OSError: it cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / CATALOGUE).is_file():
            raise FileNotFoundError(f"no chunks are stored in {directory}: it has no {CATALOGUE}")
        self._files = PayloadFiles(private_directory(directory))
        # Check the schema before anything is written there.
        check_is_ours(self._files.directory / CATALOGUE)
        self._lock = DirectoryLock(self._files.directory)
        self._lock.share()
        try:
            self._catalogue = Catalogue(self._files)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "StoreDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def list(self, namespace: str | None = None) -> list[CatalogueRow]:
        """All chunks, or those of a namespace, least recently used first."""
        rows, _ = self._catalogue.rows()
        return [row for row in rows if namespace in (None, row.record.chunk.namespace)]

    def show(self, prefix: str) -> CatalogueRow:
        """Return the chunk whose hexadecimal key has this prefix.

        Raises:
            KeyError: there is none.
            ValueError: there are several.
        """
        keys = sorted(
            key for key in self._catalogue.chunk_keys() if key.hex().startswith(prefix.lower())
        )
        if len(keys) > 1:
            raise ValueError(
                f"{prefix!r} begins {len(keys)} keys: "
                f"{', '.join(key.hex()[:16] for key in keys[:4])}, ..."
            )
        row = self._catalogue.get(keys[0]) if keys else None
        if row is None:
            raise KeyError(f"no stored chunk has a key that begins with {prefix!r}")
        return row

    def pin(self, prefix: str, pinned: bool = True) -> CatalogueRow:
        """Pin or unpin the chunk that `show` returns. Return its row before the change."""
        row = self.show(prefix)
        self._catalogue.set_pinned(row.key, pinned)
        return row

    def drop(self, prefix: str) -> CatalogueRow:
        """Remove the chunk that `show` returns, and return its row."""
        row = self.show(prefix)
        self._catalogue.remove([(row.key, None)])
        return row

    def verify(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Counter[str]:
        """Read every chunk, and remove those that cannot be used.

        Args:
            progress: called with the number done and the total.

        Returns:
            Numbers of "whole", "missing", "damaged" and "foreign" chunks.
        """
        rows, damaged = self._catalogue.rows()
        counts = Counter(damaged=self._catalogue.remove([(key, None) for _, key in damaged]))
        for done, row in enumerate(rows, start=1):
            try:
                self._files.read(row.record, row.num_bytes, row.digest)
                counts["whole"] += 1
            except BadPayload as bad:
                counts[bad.reason] += self._catalogue.remove([(row.key, row.digest)])
            progress(done, len(rows))
        return +counts

    def gc(self, disk_bytes: int | None = None, quota: float = 1.0) -> Counter[str]:
        """Remove garbage of killed processes and, with a budget, the least recently used chunks
        above it.

        Returns:
            Counts of `Catalogue.clean`, and the number of "evicted" chunks.

        Raises:
            RuntimeError: another process uses the directory, and may be writing.
        """
        if not self._lock.try_alone():
            raise RuntimeError(
                f"{self._files.directory} is in use by another process: stop it first"
            )
        try:
            counts = self._catalogue.clean()
            if disk_bytes is not None:
                _, victims = within(Budget(disk_bytes, quota), self.list())
                counts["evicted"] = self._catalogue.remove([(row.key, None) for row in victims])
            return +counts
        finally:
            self._lock.share()

    def close(self) -> None:
        """Close the directory."""
        self._catalogue.close()
        self._lock.close()
