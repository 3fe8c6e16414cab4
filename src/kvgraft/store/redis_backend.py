"""Backend of the shared tier on a Redis or Valkey server."""

import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
PASSWORD = "KVGRAFT_SHARED_PASSWORD"  # noqa: S105 - the name of an environment variable
MAX_RECORDS = 1 << 17  # records in the stream
BEHIND_S = 5.0  # least timeout of operations that no request waits for


class RedisBackend:
    """Chunks under `kvgraft:[FOLDER:]NAME`, and a stream of records. The server evicts chunks by
    its own `maxmemory-policy`.

    Args:
        url: without a password, which is taken from `KVGRAFT_SHARED_PASSWORD`.
        timeout_s: timeout of operations that a request waits for: connecting, and each part of an
            answer.

    Raises:
        ValueError: the URL is not of these schemes, or has a password, which would be logged.
    """

    def __init__(self, url: str, folder: str, timeout_s: float) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        parts = urlsplit(url)
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                f"a password in the URL of a shared tier would stand in logs: set {PASSWORD} "
                "instead"
            )
        url = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
        known: dict[str, Any] = {
            "password": os.environ.get(PASSWORD),
            "retry": Retry(NoBackoff(), 0),
        }

        def client(seconds: float) -> Any:
            return redis.Redis.from_url(
                url, socket_timeout=seconds, socket_connect_timeout=seconds, **known
            )

        self._asked, self._behind = client(timeout_s), client(max(timeout_s, BEHIND_S))
        self._prefix = f"kvgraft:{folder}:" if folder else "kvgraft:"
        self._records = f"{self._prefix}records"

    def put(self, name: str, record: bytes, data: bytes) -> bool:
        with self._behind.pipeline(transaction=True) as pipeline:
            pipeline.set(self._prefix + name, data)
            self._tell(pipeline, record)
            pipeline.execute()
        return True

    def get(self, name: str, most: int) -> bytes | None:
        found: bytes = self._asked.getrange(self._prefix + name, 0, most - 1)
        return found or None  # no chunk is empty

    def remove(self, name: str, record: bytes) -> None:
        with self._behind.pipeline(transaction=True) as pipeline:
            pipeline.delete(self._prefix + name)
            self._tell(pipeline, record)
            pipeline.execute()

    def read_log(self, mark: str, most: int) -> tuple[list[bytes], str]:
        """Read the log; a mark is the number of a record in the stream.

        A mark before all remaining records is valid. A mark behind the last record means that all
        were removed, and that numbers have begun again.
        """
        found = self._behind.xrange(self._records, f"({mark}" if mark else "-", "+", count=most)
        if found:
            return [fields.get(b"record", b"") for _, fields in found], found[-1][0].decode()
        last = self._behind.xrevrange(self._records, count=1) if mark else []
        is_there = bool(last) and _as_numbers(last[0][0].decode()) >= _as_numbers(mark or "0-0")
        return [], mark if is_there else ""

    def close(self) -> None:
        self._asked.close()
        self._behind.close()

    def _tell(self, pipeline: Any, record: bytes) -> None:
        pipeline.xadd(self._records, {"record": record}, maxlen=MAX_RECORDS, approximate=True)


def _as_numbers(mark: str) -> tuple[int, ...]:
    return tuple(map(int, mark.split("-")))
