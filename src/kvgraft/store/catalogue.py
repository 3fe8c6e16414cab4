"""Catalogue of the disk tier: a table of chunks in SQLite, which several processes may use, and
their files."""

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvgraft.core.chunk import ChunkRecord
from kvgraft.store.budget import Budget
from kvgraft.store.files import (
    CATALOGUE,
    DIGEST_BYTES,
    PayloadFiles,
    make_private_file,
    move_aside,
)

_SCHEMA = 1
_PATIENCE = 30.0  # seconds to wait for other writers
_TABLE = """
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: numbers above the last one seen are new
    key BLOB NOT NULL UNIQUE,
    record BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,
    digest BLOB NOT NULL,
    pinned INTEGER NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL
)"""
_INDEX = "CREATE INDEX pins ON chunks (pinned)"  # covers what `pins` asks for
_SELECT = "SELECT id, key, record, num_bytes, digest, pinned, created, used FROM chunks"
_DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
logger = logging.getLogger("kvgraft")


class CatalogueDamaged(OSError):
    """The file is not, or no longer, a catalogue of this schema."""


@dataclass(frozen=True, eq=False)
class CatalogueRow:
    """A chunk on disk.

    Attributes:
        id: number of the row; 0 before it is inserted.
        num_bytes, digest: length of its file in bytes, and BLAKE3 of it.
        pinned: whether it is never evicted.
        created, used: seconds since the epoch; use is written in batches.
    """

    id: int
    record: ChunkRecord
    num_bytes: int
    digest: bytes
    pinned: bool
    created: float
    used: float

    @property
    def key(self) -> bytes:
        """Key of the chunk."""
        return self.record.key


class Catalogue:
    """One connection to the table of chunks, and their files. For one thread at a time.

    Row and file change in one transaction. So a process that is killed leaves whole chunks, and
    garbage that `clean` removes: a temporary file, an orphan (a file without a row), or a row whose
    file is missing.

    Args:
        files: directory of the catalogue, which is made if it does not exist.
        check: check the whole table for damage.

    Raises:
        CatalogueDamaged: it is no database, a damaged one, or of another schema.
        sqlite3.OperationalError: it cannot be opened now.
    """

    def __init__(self, files: PayloadFiles, *, check: bool = False) -> None:
        self._files, path = files, files.directory / CATALOGUE
        make_private_file(path)
        self._database = sqlite3.connect(
            path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            self._open(check)
        except (sqlite3.DatabaseError, CatalogueDamaged) as error:
            self._database.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
                raise CatalogueDamaged(f"{path}: {error}") from error
            raise

    @classmethod
    def checked(cls, files: PayloadFiles) -> tuple["Catalogue", int]:
        """Open the catalogue of a directory that no other process uses. Return it, and the number
        of damaged ones moved aside."""
        try:
            return cls(files, check=True), 0
        except CatalogueDamaged as error:
            aside = move_aside(files.directory / CATALOGUE)
            logger.warning("segment store: a damaged catalogue is now %s: %s", aside, error)
            return cls(files), 1

    def rows(self, after: int = 0) -> tuple[list[CatalogueRow], list[tuple[int, bytes]]]:
        """Return rows with a greater id, least recently used first, and (id, key) of damaged
        rows."""
        return self._rows(f"{_SELECT} WHERE id > ? ORDER BY used, id", after)

    def get(self, key: bytes) -> CatalogueRow | None:
        """Return the row of a chunk, if it exists and is whole."""
        rows, _ = self._rows(f"{_SELECT} WHERE key = ?", key)
        return rows[0] if rows else None

    def chunk_keys(self) -> set[bytes]:
        """The keys of all chunks."""
        return {key for (key,) in self._database.execute("SELECT key FROM chunks")}

    def pins(self) -> dict[int, bool]:
        """Return the pinned state of each row, by id."""
        return {
            id: bool(pinned)
            for id, pinned in self._database.execute("SELECT id, pinned FROM chunks")
        }

    def version(self) -> int:
        """Return a number that changes whenever another connection has written."""
        return self._database.execute("PRAGMA data_version").fetchone()[0]

    def insert(self, row: CatalogueRow, data: bytes) -> CatalogueRow:
        """Add a chunk and return its row, or the row of another process that has added it before.

        Its file is written under a temporary name and synced to disk. Then, in one transaction, the
        row is inserted, the file gets its name, and the row is committed.
        """
        temporary = self._files.write(row.key, data)
        try:
            with self._writing():
                if (other := self.get(row.key)) is not None:
                    return other
                values = (
                    row.key,
                    row.record.encode(),
                    row.num_bytes,
                    row.digest,
                    row.pinned,
                    row.created,
                    row.used,
                )
                cursor = self._database.execute(
                    "INSERT OR REPLACE INTO chunks (key, record, num_bytes, digest, pinned, "
                    "created, used)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
                try:
                    self._files.publish(temporary, row.key)
                    self._database.execute("COMMIT")
                except BaseException:
                    self._files.remove(row.key)
                    raise
        finally:
            temporary.unlink(missing_ok=True)

        return replace(row, id=cursor.lastrowid or 0)

    def remove(self, chunks: Iterable[tuple[bytes, bytes | None]]) -> int:
        """Remove chunks, by key and digest (None: any), and return how many rows were removed.

        The commit comes last, after the row and the file are removed.
        """
        num_removed = 0
        with self._writing():
            for key, digest in chunks:
                command = "DELETE FROM chunks WHERE key = ? AND (? IS NULL OR digest = ?)"
                removed = self._database.execute(command, (key, digest, digest)).rowcount
                if removed or digest is None:
                    self._files.remove(key)
                num_removed += removed
        return num_removed

    def clean(self) -> Counter[str]:
        """Remove garbage of killed processes. No other process may use the directory.

        Returns:
            Numbers of "temporaries", "orphans" and "missing" files.
        """
        present, temporaries = self._files.scan()
        held = self.chunk_keys()
        for temporary in temporaries:
            temporary.unlink()
        for key in present - held:
            self._files.remove(key)
        self.remove((key, None) for key in held - present)
        return +Counter(
            temporaries=len(temporaries), orphans=len(present - held), missing=len(held - present)
        )

    def set_pinned(self, key: bytes, pinned: bool) -> None:
        """Write whether a chunk is pinned."""
        with self._writing():
            self._database.execute("UPDATE chunks SET pinned = ? WHERE key = ?", (pinned, key))

    def set_used(self, used: Mapping[bytes, float]) -> None:
        """Write when chunks were used."""
        with self._writing():
            self._database.executemany(
                "UPDATE chunks SET used = ? WHERE key = ?",
                [(time, key) for key, time in used.items()],
            )

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def _open(self, check: bool) -> None:
        execute = self._database.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        with self._writing():
            if not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                execute(_TABLE)
                execute(_INDEX)
                execute(f"PRAGMA user_version = {_SCHEMA}")

        if (schema := execute("PRAGMA user_version").fetchone()[0]) != _SCHEMA:
            raise CatalogueDamaged(f"schema {schema}, expected {_SCHEMA}")

        execute(f"{_SELECT} LIMIT 1").fetchall()
        if check and (found := execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise CatalogueDamaged(str(found))

    def _rows(
        self, query: str, value: int | bytes
    ) -> tuple[list[CatalogueRow], list[tuple[int, bytes]]]:
        rows, damaged = [], []
        for id, key, record, num_bytes, digest, pinned, created, used in self._database.execute(
            query, (value,)
        ):
            try:
                row = CatalogueRow(
                    id, ChunkRecord.decode(record), num_bytes, digest, bool(pinned), created, used
                )
                if row.key != key or not isinstance(num_bytes, int) or len(digest) != DIGEST_BYTES:
                    raise ValueError("the row does not fit its record")
                rows.append(row)
            except (ValueError, TypeError):
                damaged.append((id, key))

        return rows, damaged

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            if self._database.in_transaction:
                self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")


def within(
    budget: Budget, rows: list[CatalogueRow]
) -> tuple[list[CatalogueRow], list[CatalogueRow]]:
    """Split the chunks on disk into those that fit an empty budget, and the others.

    Args:
        rows: least recently used first. Pinned ones always fit.
    """
    for row in sorted(rows, key=lambda row: not row.pinned):
        scope = row.record.chunk.scope
        if row.pinned:
            budget.hold(row.key, scope, row.num_bytes, pinned=True)
        else:
            budget.add(row.key, scope, row.num_bytes)
    return [row for row in rows if row.key in budget], [
        row for row in rows if row.key not in budget
    ]


def check_is_ours(path: Path) -> None:
    """Check a catalogue without changing anything in its directory; CatalogueDamaged if it has
    another schema."""
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=_PATIENCE, uri=True)
    try:
        schema = database.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
            raise CatalogueDamaged(f"{path}: {error}") from error
        raise
    finally:
        database.close()
    if schema != _SCHEMA:
        raise CatalogueDamaged(f"schema {schema}, expected {_SCHEMA}")


class CatalogueReader:
    """A connection that only reads. For one thread at a time, like `Catalogue`, with the same
    errors."""

    def __init__(self, files: PayloadFiles) -> None:
        self._catalogue = Catalogue(files)
        self._version = -1
        self._last_id = 0

    def all_rows(self) -> tuple[list[CatalogueRow], list[tuple[int, bytes]]]:
        """Return all rows like `Catalogue.rows`. `new_rows` will not return them again."""
        self._version = self._catalogue.version()
        rows, damaged = self._catalogue.rows()
        self._last_id = max([row.id for row in rows] + [id for id, _ in damaged], default=0)
        return rows, damaged

    def new_rows(self) -> list[CatalogueRow] | None:
        """Return rows that are new since the last call, least recently used first; None if no
        process has written."""
        version = self._catalogue.version()
        if version == self._version:
            return None
        rows, _ = self._catalogue.rows(after=self._last_id)
        self._version = version
        self._last_id = max([row.id for row in rows], default=self._last_id)
        return rows

    def is_current(self, row: CatalogueRow) -> bool:
        """Return whether the catalogue still has this row; another process may have replaced it.
        True if it cannot be read."""
        try:
            now = self._catalogue.get(row.key)
        except sqlite3.Error:
            return True
        return now is not None and now.digest == row.digest

    def close(self) -> None:
        """Close the connection."""
        self._catalogue.close()
