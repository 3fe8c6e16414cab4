"""The tier on disk: payload files, their catalogue, and a thread that writes them. Other processes
may use the directory, too."""

import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.core.chunk import ChunkRecord, Gone, nbytes
from kvgraft.store.budget import Budget
from kvgraft.store.catalogue import Catalogue, CatalogueReader, CatalogueRow, within
from kvgraft.store.files import (
    BadPayload,
    DirectoryLock,
    PayloadFiles,
    digest_of,
    encode,
    private_directory,
)
from kvgraft.store.writer import ChunkWriter

if TYPE_CHECKING:
    from torch import Tensor

_NOTED_USES = 64  # uses that are written together
logger = logging.getLogger("kvgraft")


class DiskTier:
    """Chunks in a directory, within a budget. A chunk waits in memory until the writer's thread has
    written it.

    `_lock` guards all that this process knows of the directory. It is held while a payload is read,
    for a limited time, so that no other thread removes it meanwhile. It is never held while the
    writer's thread changes the directory (with `_catalogue`, its own connection).

    Args:
        directory: private to this user; several processes may use it.

    Raises:
        OSError, sqlite3.Error: the directory cannot be used; the message says why.
    """

    hits = "disk_hits"

    def __init__(self, directory: Path, budget: Budget, max_backlog_bytes: int) -> None:
        self.budget = budget
        # written, or being written, as far as this process knows
        self.rows: dict[bytes, CatalogueRow] = {}
        self._lock = threading.RLock()
        self._waiting: dict[bytes, tuple[ChunkRecord, dict[str, Tensor]]] = {}  # to be written
        # key and digest (None: any) of chunks to remove
        self._leaving: set[tuple[bytes, bytes | None]] = set()
        self._used: dict[bytes, float] = {}  # to be noted
        self._news: dict[bytes, ChunkRecord | Gone] = {}  # changes for the next `poll`
        self._polls = True
        self._files = PayloadFiles(private_directory(directory))

        with contextlib.ExitStack() as opened:
            directory_lock = opened.enter_context(
                contextlib.closing(DirectoryLock(self._files.directory))
            )
            is_alone = directory_lock.try_alone()
            self._catalogue, damaged = (
                Catalogue.checked(self._files) if is_alone else (Catalogue(self._files), 0)
            )
            opened.callback(self._catalogue.close)
            self._counts = Counter(catalogue_damaged=damaged) + (
                self._catalogue.clean() if is_alone else Counter()
            )
            directory_lock.share()
            self._reader = opened.enter_context(contextlib.closing(CatalogueReader(self._files)))
            self._writer = opened.enter_context(contextlib.closing(ChunkWriter(max_backlog_bytes)))
            self._load()
            self._opened = opened.pop_all()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self.rows or key in self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes of the files, as far as this process knows."""
        with self._lock:
            return self.budget.nbytes

    @property
    def counts(self) -> Counter[str]:
        """Chunks that were found, refused, or unusable, and failures."""
        with self._lock:
            return self._counts.copy()

    def put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Queue a chunk for writing. Return None, and count it, if it will not be written.

        Chunks that it evicts leave when it is written, and are reported by `poll`.
        """
        with self._lock:
            if not self.budget.fits(nbytes(stored)):
                self._counts["too_large"] += 1
            elif not self._writer.submit(partial(self._write, record, stored), nbytes(stored)):
                self._counts["backlog"] += 1
            else:
                self._waiting[record.key] = record, stored
                self._news.pop(record.key, None)
                return []
            return None

    def get(self, record: ChunkRecord) -> "dict[str, Tensor] | None":
        """Return the stored tensors, if this very chunk is here. A chunk with an unusable file is
        counted and removed; one that is not read in time is counted, and stays."""
        with self._lock:
            if self._waits(record):
                return self._waiting[record.key][1]
            row = self.rows.get(record.key)
            if row is None or row.record is not record:
                return None
            try:
                return self._files.read_in_time(record, row.num_bytes, row.digest)
            except TimeoutError:
                self._counts["late"] += 1
                return None
            except BadPayload as bad:
                self._counts[bad.reason if self._reader.is_current(row) else "missing"] += 1
                self.remove(record.key)
                return None

    def touch(self, key: bytes) -> None:
        """Note that a chunk was used. Unknown keys are ignored."""
        with self._lock:
            if key in self:
                self.budget.touch(key)
                self._used[key] = time.time()
                if len(self._used) == _NOTED_USES:
                    self._writer.submit(self._note_used)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Pin or unpin a chunk that is here and written; a pinned one is never evicted."""
        with self._lock:
            self.budget.pin(key, pinned)
            self.rows[key] = replace(self.rows[key], pinned=pinned)
            self._writer.submit(lambda: self._attempt(self._catalogue.set_pinned, key, pinned))

    def remove(self, key: bytes) -> None:
        """Forget a chunk now, and remove its row and file soon. Unknown keys are ignored."""
        with self._lock:
            self._news.pop(key, None)
            self._let_go(key)
            if self._leaving:
                self._writer.submit(self._erase)

    def poll(self, *, others: bool = True) -> dict[bytes, ChunkRecord | Gone]:
        """Return changes since the last call that `put` and `remove` did not make.

        The result maps a key to how its chunk left, or to the record of a chunk that another
        process has put here. It replaces everything that was known of that key.

        Args:
            others: also look for chunks that other processes have put here.
        """
        with self._lock:
            if others and self._polls:
                self._take_up()
            news, self._news = self._news, {}
            return news

    def flush(self) -> None:
        """Wait until all pending changes are written."""
        self._writer.submit(self._note_used)
        self._writer.flush()

    def close(self) -> None:
        """Write all pending changes, then close the directory."""
        self.flush()
        self._opened.close()

    # The methods below need the lock to be held.

    def _load(self) -> None:
        """Read the contents of the directory, as far as the budget allows."""
        self._synced_version = self._catalogue.version()
        rows, damaged = self._reader.all_rows()
        kept, unwanted = within(self.budget, rows)
        self._counts += Counter(damaged=len(damaged), evicted=len(unwanted))
        self.rows = {row.key: row for row in kept}
        self._news = {row.key: row.record for row in kept}
        self._leaving = {(row.key, row.digest) for row in unwanted} | {
            (key, None) for _, key in damaged
        }
        self._writer.submit(self._erase)

    def _take_up(self) -> None:
        """Add chunks that other processes have written. After a first failure it does not try
        again."""
        try:
            rows = self._reader.new_rows()
        except sqlite3.Error as error:
            self._polls = False
            self._failed("catalogue_failed", error)
            return
        if rows is None:
            return
        for row in rows:
            if (row.key, row.digest) not in self._leaving:
                self._adopt(row)
        self._writer.submit(lambda: self._attempt(self._sync))

    def _adopt(self, row: CatalogueRow) -> None:
        """Add a row of the catalogue. It is news unless this process wrote it."""
        known = self.rows.get(row.key)
        if known is not None and known.digest == row.digest:
            self.rows[row.key] = replace(known, id=row.id)
            return
        self._waiting.pop(row.key, None)
        self.budget.hold(row.key, row.record.chunk.scope, row.num_bytes, pinned=row.pinned)
        self.rows[row.key] = row
        self._news[row.key] = row.record

    def _waits(self, record: ChunkRecord) -> bool:
        """Return whether this very record, not another one with its key, waits to be written."""
        return self._waiting.get(record.key, (None,))[0] is record

    def _let_go(self, key: bytes) -> None:
        """Forget a chunk. If it is written, or being written, its file will be removed."""
        if (row := self._forget(key)) is not None:
            self._leaving.add((key, row.digest))

    def _forget(self, key: bytes) -> CatalogueRow | None:
        self._waiting.pop(key, None)
        self._used.pop(key, None)
        self.budget.remove(key)
        return self.rows.pop(key, None)

    def _failed(self, reason: str, error: Exception) -> None:
        self._counts[reason] += 1
        logger.warning("segment store, %s: %s: %s", self._files.directory, reason, error)

    # The methods below run in the writer's thread.

    def _write(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> None:
        """Write a chunk, unless it was dropped. A failure costs only the copy on disk."""
        try:
            data, now = encode(record, stored), time.time()
            row = CatalogueRow(0, record, len(data), digest_of(data), False, now, now)
            if not self._make_room(row):
                return
            self._erase()
            held = self._catalogue.insert(row, data)
            with self._lock:
                # If it no longer waits, it was dropped meanwhile and will be removed.
                if self._waits(record):
                    del self._waiting[record.key]
                    self._adopt(held)
        except Exception as error:
            with self._lock:
                self._failed("write_failed", error)
                self._give_up(record)

    def _make_room(self, row: CatalogueRow) -> bool:
        """Account for a chunk that will be written; False if it no longer waits, or there is no
        room."""
        with self._lock:
            if not self._waits(row.record):
                return False
            evicted = self.budget.add(row.key, row.record.chunk.scope, row.num_bytes)
            if evicted is None:
                self._counts["too_large"] += 1
                self._give_up(row.record)
                return False
            for key in evicted:
                self._let_go(key)
                self._news[key] = Gone.EVICTED
            self.rows[row.key] = row
            return True

    def _give_up(self, record: ChunkRecord) -> None:
        """Drop a chunk that still waits, since it will not be written. The lock is held."""
        if self._waits(record):
            self._forget(record.key)
            self._news[record.key] = Gone.EVICTED

    def _erase(self) -> None:
        """Remove rows and files of chunks that left, unless other processes have replaced them."""
        with self._lock:
            leaving = self._leaving.copy()
        if leaving:
            self._attempt(self._catalogue.remove, leaving)
        with self._lock:
            self._leaving -= leaving

    def _attempt(self, change: Callable[..., object], *given: object) -> None:
        """Change the catalogue. A failure is counted, and repaired when the directory is next
        opened."""
        try:
            change(*given)
        except (OSError, sqlite3.Error) as error:
            with self._lock:
                self._failed("catalogue_failed", error)

    def _note_used(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._attempt(self._catalogue.set_used, used)

    def _sync(self) -> None:
        """Apply removals and pins of other processes."""
        with self._lock:
            version = self._catalogue.version()
            if version == self._synced_version:
                return
            self._synced_version = version
            pins = self._catalogue.pins()
            for key, row in list(self.rows.items()):
                if row.id and row.id not in pins:
                    self._forget(key)
                    self._news[key] = Gone.REMOVED
                elif row.id and pins[row.id] != row.pinned:
                    self.budget.pin(key, pins[row.id])
                    self.rows[key] = replace(row, pinned=pins[row.id])
