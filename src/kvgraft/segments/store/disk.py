"""The tier on disk: payload files, their catalogue, and a thread that writes them. Others may use the directory too."""

import contextlib
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvgraft.segments.store.budget import Budget
from kvgraft.segments.store.catalogue import NAME, Catalogue, Row
from kvgraft.segments.store.chunk import Record, nbytes
from kvgraft.segments.store.files import BadPayload, DirectoryLock, PayloadFiles, digest_of, encode, private_directory
from kvgraft.segments.store.upkeep import clean, open_catalogue, within
from kvgraft.segments.store.writer import Writer

if TYPE_CHECKING:
    from torch import Tensor

_NOTED_USES = 64  # that are written together
logger = logging.getLogger("kvgraft")


class Owner(Protocol):
    """What the disk tier tells the store, under the lock that both share."""

    counts: Counter[str]

    def appeared(self, record: Record) -> None:
        """A chunk is on disk that this process has not put there; what it had of that key is void."""

    def left(self, key: bytes) -> None:
        """A chunk is no longer on disk."""

    def removed(self, key: bytes) -> None:
        """A chunk was removed by another process; it is not to be served from anywhere."""


class DiskTier:
    """Chunks on disk, within a budget. All methods but `flush`, `close` and the writer's own need `lock` to be held.

    Args:
        directory: private to this user; several processes may use it.
        owner: told of what comes and goes, from the start on.

    Raises:
        OSError, sqlite3.Error: the directory cannot be used; the message says why.
    """

    def __init__(
        self, directory: Path, budget: Budget, max_backlog_bytes: int, lock: threading.RLock, owner: Owner
    ) -> None:
        self.budget = budget
        self.rows: dict[bytes, Row] = {}  # on disk, as far as this process knows
        self._lock, self._owner = lock, owner
        self._pending: dict[bytes, dict[str, Tensor]] = {}  # to be written
        self._leaving: set[bytes] = set()  # digests of what is to be removed from the directory
        self._used: dict[bytes, float] = {}  # to be noted
        self._last_id = 0
        self._polls = True
        self._files = PayloadFiles(private_directory(directory))
        self._directory_lock = DirectoryLock(self._files.directory)
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory_lock.close)
            path, is_alone = self._files.directory / NAME, self._directory_lock.try_alone()
            self._catalogue, damaged = open_catalogue(path, is_alone=is_alone)  # the writer's
            undo.callback(self._catalogue.close)
            owner.counts += Counter({"catalogue_damaged": damaged})
            if is_alone:
                owner.counts += clean(self._catalogue, self._files)
                self._directory_lock.share()
            self._reader = Catalogue(path)
            undo.callback(self._reader.close)
            self._read_version, self._synced_version = self._reader.version(), self._catalogue.version()
            self._writer = Writer(max_backlog_bytes)
            undo.callback(self._writer.close)
            self._load()
            undo.pop_all()

    def __contains__(self, key: bytes) -> bool:
        return key in self.rows or key in self._pending

    def offer(self, record: Record, stored: dict[str, "Tensor"]) -> str | None:
        """Write a chunk some time; the reason why not ("too_large", "backlog"), or None."""
        if not self.budget.fits(nbytes(stored)):
            return "too_large"
        if not self._writer.submit(partial(self._write, record, stored), nbytes(stored)):
            return "backlog"
        self._pending[record.key] = stored
        return None

    def read(self, key: bytes) -> dict[str, "Tensor"]:
        """The stored tensors of a chunk that is here.

        Raises:
            BadPayload: its file cannot be used. The chunk is here no longer then.
        """
        self.touch(key)
        if key in self._pending:
            return self._pending[key]
        row = self.rows[key]
        try:
            return self._files.read(row.record, row.num_bytes, row.digest)
        except BadPayload as bad:
            reason = bad.reason if self._is_current(row) else "missing"
            self._remove(key)
            raise BadPayload(reason) from bad

    def touch(self, key: bytes) -> None:
        """Note that a chunk was used."""
        self.budget.touch(key)
        self._used[key] = time.time()
        if len(self._used) == _NOTED_USES:
            self._writer.submit(self._note_used)

    def drop(self, key: bytes) -> None:
        """Remove a chunk, if it is here."""
        if key in self:
            self._remove(key)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Whether a chunk that is here, and written, is never evicted."""
        self.budget.pin(key, pinned)
        self.rows[key] = replace(self.rows[key], pinned=pinned)
        self._writer.submit(partial(self._attempt, partial(self._catalogue.set_pinned, key, pinned)))

    def poll(self) -> None:
        """Take notice of what other processes have written; the first failure is the last attempt."""
        if not self._polls:
            return
        try:
            version = self._reader.version()
            if version == self._read_version:
                return
            rows, _ = self._reader.rows(after=self._last_id)
        except sqlite3.Error as error:
            self._polls = False
            self._failed("catalogue_failed", error)
            return
        self._read_version = version
        for row in rows:
            self._last_id = max(self._last_id, row.id)
            if row.digest not in self._leaving:
                self._adopt(row)
        self._writer.submit(partial(self._attempt, self._sync))

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(self._note_used)
        self._writer.flush()

    def close(self) -> None:
        """Write everything, then let the directory go."""
        self.flush()
        self._writer.close()
        for closable in (self._reader, self._catalogue, self._directory_lock):
            closable.close()

    def _load(self) -> None:
        """Take up what the directory holds, as far as the budget goes."""
        rows, damaged = self._reader.rows()
        self._last_id = max([row.id for row in rows] + [id for id, _ in damaged], default=0)
        kept, unwanted = within(self.budget, rows)
        self._owner.counts += Counter(damaged=len(damaged), evicted=len(unwanted))
        self._leaving |= {row.digest for row in unwanted}
        leaving = [(row.key, row.digest) for row in unwanted]
        self._writer.submit(partial(self._erase, leaving + [(key, None) for _, key in damaged]))
        for row in kept:
            self.rows[row.key] = row
            self._owner.appeared(row.record)

    def _adopt(self, row: Row) -> None:
        """Take up a row that was read, unless it is one of ours."""
        known = self.rows.get(row.key)
        if known is not None and known.digest == row.digest:
            self.rows[row.key] = replace(known, id=row.id)
            return
        self._pending.pop(row.key, None)
        self.budget.hold(row.key, row.record.chunk.scope, row.num_bytes, pinned=row.pinned)
        self.rows[row.key] = row
        self._owner.appeared(row.record)

    def _remove(self, key: bytes) -> None:
        """Forget a chunk now, and remove its row and file soon."""
        if (row := self._forget(key)) is not None:
            self._leaving.add(row.digest)
            self._writer.submit(partial(self._erase, [(key, row.digest)]))

    def _forget(self, key: bytes) -> Row | None:
        """Forget a chunk; returns its row if it is on disk, or just being written."""
        self._pending.pop(key, None)
        self._used.pop(key, None)
        self.budget.remove(key)
        return self.rows.pop(key, None)

    def _is_current(self, row: Row) -> bool:
        """Whether the catalogue still has this row; another process may have replaced the chunk."""
        try:
            now = self._reader.get(row.key)
        except sqlite3.Error:
            return True
        return now is not None and now.digest == row.digest

    def _failed(self, reason: str, error: Exception) -> None:
        self._owner.counts[reason] += 1
        logger.warning("segment store, %s: %s: %s", self._files.directory, reason, error)

    # What follows is done by the writer's thread.

    def _write(self, record: Record, stored: dict[str, "Tensor"]) -> None:
        """Write a chunk, unless it was dropped; if that fails it may be in memory still."""
        try:
            self._write_now(record, stored)
        except Exception as error:
            with self._lock:
                self._failed("write_failed", error)
                if self._pending.get(record.key) is stored:
                    self._abandon(record.key)

    def _write_now(self, record: Record, stored: dict[str, "Tensor"]) -> None:
        """Make room, write the file, then the row."""
        data, now = encode(record, stored), time.time()
        row = Row(0, record, len(data), digest_of(data), False, now, now)
        with self._lock:
            if self._pending.get(row.key) is not stored:
                return
            victims = self.budget.add(row.key, record.chunk.scope, row.num_bytes)
            if victims is None:
                self._owner.counts["too_large"] += 1
                self._abandon(row.key)
                return
            leaving = [(key, victim.digest) for key in victims if (victim := self._forget(key))]
            self._leaving |= {digest for _, digest in leaving}
            for key in victims:
                self._owner.left(key)
            self.rows[row.key] = row
        self._erase(leaving)
        held = self._publish(row, data)
        with self._lock:
            if self._pending.get(row.key) is stored:
                del self._pending[row.key]
                self._adopt(held)

    def _publish(self, row: Row, data: bytes) -> Row:
        temporary = self._files.write(row.key, data)
        try:
            publish, retract = partial(self._files.publish, temporary, row.key), partial(self._files.remove, row.key)
            return self._catalogue.insert(row, publish, retract)
        finally:
            temporary.unlink(missing_ok=True)

    def _abandon(self, key: bytes) -> None:
        self._forget(key)
        self._owner.left(key)

    def _erase(self, chunks: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Remove rows and files of chunks that are forgotten already, unless others have replaced them."""
        if chunks:
            self._attempt(lambda: self._catalogue.remove(chunks, self._files.remove))
        with self._lock:
            self._leaving -= {digest for _, digest in chunks if digest}

    def _attempt(self, change: Callable[[], object]) -> None:
        """Change the catalogue; what fails is counted, and mended when the directory is next opened."""
        try:
            change()
        except (OSError, sqlite3.Error) as error:
            with self._lock:
                self._failed("catalogue_failed", error)

    def _note_used(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._attempt(partial(self._catalogue.set_used, used))

    def _sync(self) -> None:
        """Take notice of what other processes have removed or pinned."""
        with self._lock:
            version = self._catalogue.version()
            if version == self._synced_version:
                return
            self._synced_version = version
            pins = self._catalogue.pins()
            for key, row in list(self.rows.items()):
                if row.id and row.id not in pins:
                    self._forget(key)
                    self._owner.removed(key)
                elif row.id and pins[row.id] != row.pinned:
                    self.budget.pin(key, pins[row.id])
                    self.rows[key] = replace(row, pinned=pins[row.id])
