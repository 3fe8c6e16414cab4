"""Places that several machines share: chunks by key, and what has come to them, in its order."""

import time
from typing import Any, Protocol
from urllib.parse import urlsplit

HOUR = 3600  # seconds; records are listed by the hour in which they came
MAX_RECORDS = 1 << 20  # that a Redis stream keeps


class Place(Protocol):
    """What a `SharedTier` needs of a place. Any method may raise whatever its client raises."""

    def put(self, key: bytes, record: bytes, data: bytes) -> None:
        """Keep a chunk, whole or not at all, and then tell of it."""

    def get(self, key: bytes) -> bytes | None:
        """The data of a chunk; None if it is not there, or no longer."""

    def remove(self, key: bytes) -> None:
        """Let a chunk go; one that is not there is no error."""

    def come_since(self, mark: str) -> tuple[list[bytes], str]:
        """Records that have come since a mark (empty: all that are known), and the mark of the last one. A record may
        come twice, and its chunk be gone."""

    def close(self) -> None:
        """End all connections."""


def open_place(url: str, timeout_s: float) -> Place:
    """A place by its URL: `redis://`, `rediss://`, `unix://` or `valkey://` a server, anything else what fsspec knows
    (`s3://bucket/path`, `gs://`, `file:///path`).

    Args:
        timeout_s: of one operation, where the client has such a thing.

    Raises:
        ValueError: the client for it is not installed, or the URL is none.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise ValueError(f"{url!r} is no URL: give redis://HOST/0 or s3://BUCKET/PATH, for example")
    try:
        if scheme in ("redis", "rediss", "unix", "valkey", "valkeys"):
            return RedisPlace(url, timeout_s)
        return FilePlace(url)
    except ImportError as error:
        raise ValueError(f"{url}: {error}: pip install 'kvgraft[fleet]'") from error


class RedisPlace:
    """A Redis or Valkey server. What does not fit there the server evicts, as it is configured (`maxmemory-policy`)."""

    def __init__(self, url: str, timeout_s: float) -> None:
        import redis

        url = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)

    def put(self, key: bytes, record: bytes, data: bytes) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(_chunk(key), data)
            pipeline.xadd("kvgraft:records", {"record": record}, maxlen=MAX_RECORDS, approximate=True)
            pipeline.execute()

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._client.get(_chunk(key))
        return found

    def remove(self, key: bytes) -> None:
        self._client.delete(_chunk(key))

    def come_since(self, mark: str) -> tuple[list[bytes], str]:
        found = self._client.xrange("kvgraft:records", f"({mark}" if mark else "-", "+")
        return [fields[b"record"] for _, fields in found], found[-1][0].decode() if found else mark

    def close(self) -> None:
        self._client.close()


class FilePlace:
    """A directory of any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(url)
        self._root = self._root.rstrip("/")

    def put(self, key: bytes, record: bytes, data: bytes) -> None:
        self._write(f"chunks/{key.hex()[:2]}/{key.hex()}", data)
        now = time.time_ns()
        self._write(f"records/{now // 10**9 // HOUR:08d}/{now:020d}-{key.hex()[:16]}", record)

    def get(self, key: bytes) -> bytes | None:
        try:
            found: bytes = self._files.cat_file(f"{self._root}/chunks/{key.hex()[:2]}/{key.hex()}")
        except FileNotFoundError:
            return None
        return found

    def remove(self, key: bytes) -> None:
        try:
            self._files.rm_file(f"{self._root}/chunks/{key.hex()[:2]}/{key.hex()}")
        except FileNotFoundError:
            return

    def come_since(self, mark: str) -> tuple[list[bytes], str]:
        """Clocks of two machines may differ: what came in the minute before the mark is told again."""
        since = f"{max(int(mark or 0) - 60 * 10**9, 0):020d}"
        first = f"{int(since) // 10**9 // HOUR:08d}"
        hours = [hour for hour in self._names("records") if hour >= first]
        names = [f"records/{hour}/{name}" for hour in hours for name in self._names(f"records/{hour}")]
        new = sorted(name for name in names if name.rpartition("/")[2][:20] > since)
        if not new:
            return [], mark
        found = self._files.cat([f"{self._root}/{name}" for name in new], on_error="omit")
        return list(found.values()), max(new[-1].rpartition("/")[2][:20], mark)

    def close(self) -> None:
        """Nothing to do: fsspec keeps what is open."""

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        temporary = f"{path}.{time.time_ns():x}.tmp"
        self._files.pipe_file(temporary, data)
        self._files.mv(temporary, path)

    def _names(self, folder: str) -> list[str]:
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return [name for name in names if not name.endswith(".tmp")]


def _chunk(key: bytes) -> bytes:
    return b"kvgraft:chunk:" + key
