"""Places that several machines share: chunks by name, and what has come to them, in its order."""

from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvgraft.segments.store.file_backend import FileBackend
from kvgraft.segments.store.redis_backend import SCHEMES, RedisBackend

ALLOWED = "redis://HOST:6379/0, valkey://HOST:6379/0, s3://BUCKET/PATH or file:///DIR"


class Backend(Protocol):
    """What a `SharedTier` needs of a place. Any method may raise whatever its client raises, and
    any thread call it."""

    def put(self, name: str, record: bytes, data: bytes) -> bool:
        """Keep a chunk, and tell its record when that is done; False if it is too large ever to be
        kept."""

    def get(self, name: str, most: int) -> bytes | None:
        """The data of a chunk, so many bytes of it at most (anything may lie there); None if it is
        not there."""

    def remove(self, name: str, record: bytes) -> None:
        """Let a chunk go, and tell a record of that; one that is not there is no error."""

    def read_log(self, mark: str, most: int) -> tuple[list[bytes], str]:
        """So many records at most that have come since a mark (empty: since ever), and the mark of
        the last one, to go on with; an empty one says that the log of the backend has begun again.
        A record may come twice, and its chunk be gone."""

    def close(self) -> None:
        """End all connections."""


def is_server(url: str) -> bool:
    """Whether a URL names a Redis or Valkey server, which itself bounds what it holds."""
    return urlsplit(url).scheme in SCHEMES


def local_directory(url: str) -> Path | None:
    """The directory of this machine that a URL names, if it names one."""
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme in ("file", "local") else None


def check_url(url: str) -> None:
    """Raise ValueError if there is no place with such a URL, or its client is not installed.
    Connects to nothing."""
    parts = urlsplit(url)
    if not parts.scheme:
        raise ValueError(f"shared tier {without_password(url)!r}: no URL: give {ALLOWED}")
    try:
        if is_server(url):
            RedisBackend(url, "", 1.0).close()
            return
        import fsspec

        fsspec.get_filesystem_class(parts.scheme)
    except ImportError as error:
        package = "pip install 'kvgraft[fleet]'" if is_server(url) else "install it"
        raise ValueError(
            f"shared tier {without_password(url)!r}: a client is missing: {error}: {package}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"shared tier {without_password(url)!r}: {error}: allowed are {ALLOWED}"
        ) from error
    if local_directory(url) is not None and (parts.netloc or not parts.path.startswith("/")):
        raise ValueError(
            f"shared tier {without_password(url)!r}: a directory has three slashes before it: "
            "file:///DIR"
        )


def open_backend(url: str, folder: str, timeout_s: float, capacity: int, quota: float) -> Backend:
    """A place by its URL.

    Args:
        folder: names there begin with it.
        timeout_s: of one operation, where the client has such a thing.
        capacity, quota: of a file system, see `FileBackend`.

    Raises:
        ValueError: as `check_url`.
        OSError: a local directory cannot be used.
    """
    check_url(url)
    if is_server(url):
        return RedisBackend(url, folder, timeout_s)
    return FileBackend(url, folder, capacity, quota)


def without_password(url: str) -> str:
    """A URL as it may be shown."""
    parts = urlsplit(url)
    place = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{parts.scheme}://{place}" if parts.scheme else place
