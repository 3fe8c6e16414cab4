"""The catalogue of the disk tier: a table of chunks in SQLite, which several processes may use at once."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvgraft.segments.store.chunk import Record

DIGEST_BYTES = 32
NAME = "catalogue.sqlite"
_SCHEMA = 1
_PATIENCE = 30.0  # seconds to wait for other writers
_TABLE = """
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given out again: what is above the last one seen is new
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


class CatalogueDamaged(OSError):
    """The file is no catalogue of ours, or no longer."""


@dataclass(frozen=True, eq=False)
class Row:
    """A chunk on disk.

    Attributes:
        id: of the row; 0 before it is there.
        num_bytes, digest: length of its file in bytes, and BLAKE3 of it.
        pinned: it is never evicted.
        created, used: seconds since the epoch; use is noted in batches.
    """

    id: int
    record: Record
    num_bytes: int
    digest: bytes
    pinned: bool
    created: float
    used: float

    @property
    def key(self) -> bytes:
        """The chunk's."""
        return self.record.key


class Catalogue:
    """One connection to the table of chunks. For one thread at a time.

    Args:
        path: its file, made if it does not exist.
        check: look through the whole file for damage.

    Raises:
        CatalogueDamaged: it is no database, a damaged one, or of another schema.
        sqlite3.OperationalError: it cannot be opened now.
    """

    def __init__(self, path: Path, *, check: bool = False) -> None:
        _make_private(path)
        self._database = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            self._open(check)
        except sqlite3.DatabaseError as error:
            self._database.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
                raise CatalogueDamaged(f"{path}: {error}") from error
            raise
        except CatalogueDamaged:
            self._database.close()
            raise

    def rows(self, after: int = 0) -> tuple[list[Row], list[tuple[int, bytes]]]:
        """Rows with a greater id, least recently used first; and (id, key) of those that are damaged."""
        return self._rows(f"{_SELECT} WHERE id > ? ORDER BY used, id", after)

    def get(self, key: bytes) -> Row | None:
        """The row of a chunk, if it is there and whole."""
        rows, _ = self._rows(f"{_SELECT} WHERE key = ?", key)
        return rows[0] if rows else None

    def chunk_keys(self) -> set[bytes]:
        """The keys of all chunks."""
        return {key for (key,) in self._database.execute("SELECT key FROM chunks")}

    def pins(self) -> dict[int, bool]:
        """Whether each row is pinned, by id."""
        return {id: bool(pinned) for id, pinned in self._database.execute("SELECT id, pinned FROM chunks")}

    def version(self) -> int:
        """A number that changes whenever another connection has written."""
        return self._database.execute("PRAGMA data_version").fetchone()[0]

    def insert(self, row: Row, publish: Callable[[], None], retract: Callable[[], None]) -> Row:
        """Add a chunk and publish its file, unless another process has added it; returns the row that is there then.

        Nobody else publishes, adds or removes anything meanwhile. A process that ends here leaves at most the file.
        """
        with self._writing():
            if (other := self.get(row.key)) is not None:
                return other
            values = (row.key, row.record.encode(), row.num_bytes, row.digest, row.pinned, row.created, row.used)
            cursor = self._database.execute(
                "INSERT OR REPLACE INTO chunks (key, record, num_bytes, digest, pinned, created, used)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            try:
                publish()
                self._database.execute("COMMIT")
            except BaseException:
                retract()
                raise
        return replace(row, id=cursor.lastrowid or 0)

    def remove(self, chunks: Iterable[tuple[bytes, bytes | None]], unlink: Callable[[bytes], None]) -> int:
        """Remove chunks and their files, by key and digest (None: any). Returns how many rows there were."""
        num_removed = 0
        with self._writing():
            for key, digest in chunks:
                command = "DELETE FROM chunks WHERE key = ? AND (? IS NULL OR digest = ?)"
                removed = self._database.execute(command, (key, digest, digest)).rowcount
                if removed or digest is None:
                    unlink(key)
                num_removed += removed
        return num_removed

    def remove_rows(self, keys: Iterable[bytes]) -> None:
        """Remove rows, whatever their files."""
        self.remove([(key, None) for key in keys], lambda key: None)

    def set_pinned(self, key: bytes, pinned: bool) -> None:
        """Note that a chunk is to stay, or no longer."""
        with self._writing():
            self._database.execute("UPDATE chunks SET pinned = ? WHERE key = ?", (pinned, key))

    def set_used(self, used: Mapping[bytes, float]) -> None:
        """Note when chunks were used."""
        with self._writing():
            self._database.executemany(
                "UPDATE chunks SET used = ? WHERE key = ?", [(time, key) for key, time in used.items()]
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

    def _rows(self, query: str, value: int | bytes) -> tuple[list[Row], list[tuple[int, bytes]]]:
        rows, damaged = [], []
        for id, key, record, num_bytes, digest, pinned, created, used in self._database.execute(query, (value,)):
            try:
                row = Row(id, Record.decode(record), num_bytes, digest, bool(pinned), created, used)
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


def check_is_ours(path: Path) -> None:
    """Look at a catalogue without changing anything in its directory. CatalogueDamaged if it is none of this schema."""
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


def _make_private(path: Path) -> None:
    """Make a file, of a mode that SQLite takes over to those beside it. One that is there is not so much as opened: to
    close it would end all locks that this process has on it, so that another one could take SQLite's log from us."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def move_aside(path: Path) -> Path:
    """Rename a catalogue, with the files SQLite keeps beside it, to the first free `catalogue.damaged-N`."""
    number = 1
    while (aside := path.with_name(f"catalogue.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        if (beside := path.with_name(path.name + suffix)).exists():
            beside.rename(aside.with_name(aside.name + suffix))
    return aside
