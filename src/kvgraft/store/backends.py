"""Backends of the shared tier: places that several machines share, with chunks by name and a log of
changes."""

from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvgraft.store.file_backend import FileBackend
from kvgraft.store.redis_backend import SCHEMES, RedisBackend

ALLOWED = "redis://HOST:6379/0, valkey://HOST:6379/0, s3://BUCKET/PATH or file:///DIR"


class Backend(Protocol):
    """Operations of a place that a `SharedTier` needs. Methods may raise any error of their client,
    and are called from any thread."""

    def put(self, name: str, record: bytes, data: bytes) -> bool:
        """Store a chunk, then append its record to the log; False if it is too large to be
        stored."""

    def get(self, name: str, most: int) -> bytes | None:
        """Return the first `most` bytes of a chunk's data, since anything may lie there; None if it
        does not exist."""

    def remove(self, name: str, record: bytes) -> None:
        """Remove a chunk, and append a record of that to the log. Unknown names are ignored."""

    def read_log(self, mark: str, most: int) -> tuple[list[bytes], str]:
        """Return at most `most` records after a mark (empty: from the beginning), and the mark of
        the last one.

        An empty new mark says that the log has begun again. A record may come twice, and its chunk
        may be gone.
        """

    def close(self) -> None:
        """End all connections."""


def is_server(url: str) -> bool:
    """Return whether a URL names a Redis or Valkey server, which limits its own size."""
    return urlsplit(url).scheme in SCHEMES


def local_directory(url: str) -> Path | None:
    """Return the directory of this machine that a URL names, or None."""
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme in ("file", "local") else None


def check_url(url: str) -> None:
    """Raise ValueError if no backend supports such a URL, or its client is not installed. Connects
    to nothing."""
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
    """Open a place by its URL.

    Args:
        folder: prefix of all names there.
        timeout_s: timeout of one operation, if the client has one.
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
    """Return a URL without its password, for display."""
    parts = urlsplit(url)
    place = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{parts.scheme}://{place}" if parts.scheme else place
