"""Backend of the shared tier in a directory of any file system that fsspec supports."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvgraft.store.budget import Budget
from kvgraft.store.files import open_regular, private_directory

MINUTE = 60 * 10**9  # nanoseconds; records are listed by the minute of their arrival
# Beyond this number of minutes, listing the existing ones is cheaper than trying each.
MANY_MINUTES = 30
STALE_S = 3600.0  # age at which a half-written file is removed
# The place is scanned again after 1 / SWEEPS of the capacity was written.
SWEEPS = 16
_TEMPORARY = ".tmp"


class _Listed(NamedTuple):
    """A record, parsed from its file name."""

    path: str
    came: int  # nanoseconds
    name: str  # name of its chunk


class FileBackend:
    """Chunks in `FOLDER/chunks/NAME`, and an empty or small file `FOLDER/records/MINUTE/TIME-NAME`
    for each record.

    Clocks of machines may differ by a minute.

    Args:
        url: of a local directory, which is then private to this user, or of any other directory.
        capacity: bytes of chunks. Writers remove the oldest chunks above it.
        quota: share of it that chunks of one scope (the first part of their names) may take.

    Raises:
        OSError: a local directory cannot be used; PermissionError if others may read it.
    """

    def __init__(self, url: str, folder: str, capacity: int, quota: float) -> None:
        import fsspec

        self._files: Any
        self._files, root = fsspec.core.url_to_fs(url)
        protocols = self._files.protocol
        self._is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
        if self._is_local:
            private_directory(Path(root))
        self._root = f"{root.rstrip('/')}/{folder}".rstrip("/")
        self._capacity, self._quota = capacity, quota
        self._written: int | None = None  # bytes since the last scan
        self._read: dict[str, set[str]] = {}  # names of records, by minute

    def put(self, name: str, record: bytes, data: bytes) -> bool:
        path = f"{self._root}/chunks/{name}"
        if len(data) > self._quota * self._capacity:
            return False
        if self._written is None or (self._written + len(data)) * SWEEPS > self._capacity:
            self._sweep(path, len(data))
        self._write(path, data)
        self._written = (self._written or 0) + len(data)
        self._tell(name, record)
        return True

    def get(self, name: str, most: int) -> bytes | None:
        path = f"{self._root}/chunks/{name}"
        try:
            if self._is_local:
                with open_regular(Path(path)) as file:
                    return file.read(most)
            found: bytes = self._files.cat_file(path, start=0, end=most)
        except FileNotFoundError:
            return None
        return found

    def remove(self, name: str, record: bytes) -> None:
        self._remove(f"{self._root}/chunks/{name}")
        self._tell(name, record)

    def read_log(self, mark: str, most: int) -> tuple[list[bytes], str]:
        """Read the log; a mark is a time. Since clocks differ, unread records of the minutes around
        it are new, too."""
        now = time.time_ns() // MINUTE
        since = int(mark) // MINUTE - 1 if mark else 0
        unread = (listed for minute in self._minutes(since, now) for listed in self._unread(minute))
        new = list(islice(unread, most))
        found = self._files.cat([listed.path for listed in new], on_error="omit") if new else {}
        for listed in new:
            self._read.setdefault(_minute_of(listed.path), set()).add(listed.path)

        is_all = len(new) < most
        # A record dated in the future must not hide later ones.
        came = [min(listed.came, now * MINUTE) for listed in new]
        mark = str(max([int(mark or 0), *came, *([now * MINUTE] if is_all else [])]))
        for minute in [minute for minute in self._read if int(minute) < int(mark) // MINUTE - 1]:
            del self._read[minute]

        return [found[listed.path] for listed in new if listed.path in found], mark

    def close(self) -> None:
        """Do nothing: fsspec manages its own connections."""

    def _tell(self, name: str, record: bytes) -> None:
        now = time.time_ns()
        self._write(
            f"{self._root}/records/{now // MINUTE:010d}/{now:020d}-{name.replace('/', '-')}", record
        )

    def _minutes(self, since: int, now: int) -> list[str]:
        """Minutes that may have records. One minute ahead is included, since another clock may be
        ahead."""
        if now - since <= MANY_MINUTES:
            return [f"{minute:010d}" for minute in range(since, now + 2)]
        names = (path.rpartition("/")[2] for path in self._list(f"{self._root}/records"))
        return sorted(name for name in names if name.isdecimal() and int(name) >= since)

    def _unread(self, minute: str) -> list[_Listed]:
        read = self._read.get(minute, set())
        paths = self._list(f"{self._root}/records/{minute}")
        if self._is_local:
            # Reading a FIFO would block.
            paths = [path for path in paths if path in read or Path(path).is_file()]
        return sorted(
            (listed for path in paths if path not in read for listed in _listed(path)),
            key=lambda r: r.came,
        )

    def _list(self, folder: str) -> list[str]:
        try:
            found = self._files.ls(folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/") for path in found]

    def _sweep(self, coming: str, num_bytes: int) -> None:
        """Make room for a chunk: remove the oldest ones above the capacity or a scope's quota, and
        garbage.

        Garbage is records without a chunk, and old half-written files.
        """
        sizes = {path: int(info["size"]) for path, info in self._find("chunks")}
        records = [listed for path, _ in self._find("records") for listed in _listed(path)]
        came = {f"{self._root}/chunks/{listed.name}": listed.came for listed in records}
        budget = Budget(self._capacity, self._quota)
        chunks = sorted(
            (path for path in sizes if not path.endswith(_TEMPORARY)),
            key=lambda path: came.get(path, 0),
        )
        for path, size in [*((path, sizes[path]) for path in chunks), (coming, num_bytes)]:
            budget.add(path.encode(), path.rpartition("/")[0].encode(), size)

        for path in chunks:
            if path.encode() not in budget:
                self._remove(path)

        young = time.time_ns() - MINUTE
        for listed in records:
            if listed.came < young and f"{self._root}/chunks/{listed.name}".encode() not in budget:
                self._remove(listed.path)

        for path in sizes:
            began = path.removesuffix(_TEMPORARY).rpartition(".")[2]
            if (
                path.endswith(_TEMPORARY)
                and began.isdecimal()
                and int(began) < time.time_ns() - STALE_S * 10**9
            ):
                self._remove(path)

        self._written = 0

    def _find(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            yield from self._files.find(f"{self._root}/{folder}", detail=True, refresh=True).items()
        except FileNotFoundError:
            return

    def _write(self, path: str, data: bytes) -> None:
        """Write a file that appears only when it is whole. Object stores guarantee that
        themselves."""
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not self._is_local:
            self._files.pipe_file(path, data)
            return
        temporary = f"{path}.{time.time_ns()}{_TEMPORARY}"
        self._files.pipe_file(temporary, data)
        self._files.mv(temporary, path)

    def _remove(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            return


def _listed(path: str) -> Iterator[_Listed]:
    """Yield the parsed record, unless it is half-written."""
    came, _, name = path.rpartition("/")[2].partition("-")
    if came.isdecimal() and not path.endswith(_TEMPORARY):
        yield _Listed(path, int(came), name.replace("-", "/"))


def _minute_of(path: str) -> str:
    return path.split("/")[-2]
