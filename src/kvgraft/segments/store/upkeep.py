"""A store's directory without a store: how it is opened and cleaned, and what its operator does with the chunks."""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvgraft.segments.store.budget import Budget
from kvgraft.segments.store.catalogue import NAME, Catalogue, CatalogueDamaged, Row, check_is_ours, move_aside
from kvgraft.segments.store.files import BadPayload, DirectoryLock, PayloadFiles, private_directory

logger = logging.getLogger("kvgraft")


def open_catalogue(path: Path, *, is_alone: bool) -> tuple[Catalogue, bool]:
    """The catalogue, and whether a damaged one had to be moved aside for it.

    Raises:
        CatalogueDamaged: it is damaged, and other processes use it.
    """
    try:
        return Catalogue(path, check=is_alone), False
    except CatalogueDamaged as error:
        if not is_alone:
            raise
        logger.warning("segment store: a damaged catalogue is now %s: %s", move_aside(path), error)
        return Catalogue(path), True


def clean(catalogue: Catalogue, files: PayloadFiles) -> Counter[str]:
    """Remove what a process that was killed has left; nobody else may be using the directory.

    Returns:
        How many "temporaries", "orphans" (files without a row) and "missing" (rows without a file) there were.
    """
    present, temporaries = files.scan()
    held = catalogue.chunk_keys()
    for temporary in temporaries:
        temporary.unlink()
    for key in present - held:
        files.remove(key)
    catalogue.remove_rows(held - present)
    return +Counter(temporaries=len(temporaries), orphans=len(present - held), missing=len(held - present))


class StoreDirectory:
    """What lies in a store's directory, for its operator. Stores may be using it; they notice what is done here.

    Raises:
        FileNotFoundError: it is no directory of a store.
        CatalogueDamaged, OSError: it cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        if not (directory / NAME).is_file():
            raise FileNotFoundError(f"no segments are stored in {directory}: it has no {NAME}")
        self._files = PayloadFiles(private_directory(directory))
        check_is_ours(self._files.directory / NAME)  # before anything is written there
        self._lock = DirectoryLock(self._files.directory)
        self._lock.share()
        try:
            self._catalogue = Catalogue(self._files.directory / NAME)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "StoreDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def list(self, namespace: str | None = None) -> list[Row]:
        """All chunks, or those of a namespace, least recently used first."""
        rows, _ = self._catalogue.rows()
        return [row for row in rows if namespace in (None, row.record.chunk.namespace)]

    def show(self, prefix: str) -> Row:
        """The chunk whose key in hexadecimal begins like this.

        Raises:
            KeyError: there is none.
            ValueError: there are several.
        """
        keys = sorted(key for key in self._catalogue.chunk_keys() if key.hex().startswith(prefix.lower()))
        if len(keys) > 1:
            raise ValueError(
                f"{prefix!r} begins {len(keys)} keys: {', '.join(key.hex()[:16] for key in keys[:4])}, ..."
            )
        row = self._catalogue.get(keys[0]) if keys else None
        if row is None:
            raise KeyError(f"no stored segment has a key that begins with {prefix!r}")
        return row

    def pin(self, prefix: str, pinned: bool = True) -> Row:
        """Never evict the chunk that `show` shows, or allow it again; what it was before."""
        row = self.show(prefix)
        self._catalogue.set_pinned(row.key, pinned)
        return row

    def drop(self, prefix: str) -> Row:
        """Remove the chunk that `show` shows, which is returned."""
        row = self.show(prefix)
        self._catalogue.remove([(row.key, None)], self._files.remove)
        return row

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Counter[str]:
        """Read every chunk, and remove those that cannot be used.

        Args:
            progress: told how many are done, of how many.
        Returns:
            How many are "whole", "missing", "damaged" and "foreign".
        """
        rows, damaged = self._catalogue.rows()
        counts = Counter(damaged=self._catalogue.remove([(key, None) for _, key in damaged], self._files.remove))
        for done, row in enumerate(rows, start=1):
            try:
                self._files.read(row.record, row.num_bytes, row.digest)
                counts["whole"] += 1
            except BadPayload as bad:
                counts[bad.reason] += self._catalogue.remove([(row.key, row.digest)], self._files.remove)
            progress(done, len(rows))
        return +counts

    def gc(self, disk_bytes: int | None = None, quota: float = 1.0) -> Counter[str]:
        """Remove what killed processes have left, and with a budget the least recently used chunks above it.

        Returns:
            As `clean`, and how many were "evicted".

        Raises:
            RuntimeError: another process uses the directory, and may be writing just now.
        """
        if not self._lock.try_alone():
            raise RuntimeError(f"{self._files.directory} is in use by another process: stop it first")
        try:
            counts = clean(self._catalogue, self._files)
            if disk_bytes is not None:
                _, victims = within(Budget(disk_bytes, quota), self.list())
                counts["evicted"] = self._catalogue.remove([(row.key, None) for row in victims], self._files.remove)
            return +counts
        finally:
            self._lock.share()

    def close(self) -> None:
        """Use the directory no longer."""
        self._catalogue.close()
        self._lock.close()


def within(budget: Budget, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """What of the chunks on disk fits into an empty budget, and the others.

    Args:
        rows: least recently used first. Pinned ones fit always.
    """
    for row in sorted(rows, key=lambda row: not row.pinned):
        scope = row.record.chunk.scope
        if row.pinned:
            budget.hold(row.key, scope, row.num_bytes, pinned=True)
        else:
            budget.add(row.key, scope, row.num_bytes)
    return [row for row in rows if row.key in budget], [row for row in rows if row.key not in budget]
