"""The tier that several machines share: what one has read the others find."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING

from blake3 import blake3

from kvgraft.segments.store.chunk import Record, nbytes
from kvgraft.segments.store.files import DIGEST_BYTES, BadPayload, decode, encode
from kvgraft.segments.store.places import Place
from kvgraft.segments.store.writer import Writer

if TYPE_CHECKING:
    from torch import Tensor

PERIOD_S = 2.0  # between two looks at what has come
PAUSE_S = 30.0  # for which a place is left alone that failed `PATIENCE` times in a row
PATIENCE = 3
logger = logging.getLogger("kvgraft")


class SharedTier:
    """Chunks in a `Place`. What is put is written later, by a thread; what is asked for and does not come in time is a
    miss, and so is what was changed on the way: all data is signed.

    Args:
        place: to be used by this object alone.
        secret: 32 bytes that the servers of a fleet share, by which they know their own data.
        timeout_s: for which one chunk is waited.
        max_backlog_bytes: of what waits to be written.
        clock: seconds.

    `counts` has `shared_hits` (blocks, by the store), `shared_gone`, `shared_late`, `shared_failed`, `shared_damaged`,
    `shared_paused` (not asked, since it failed just now), `shared_written` and `shared_backlog`.
    """

    hits = "shared_hits"

    def __init__(
        self,
        place: Place,
        secret: bytes,
        *,
        timeout_s: float = 0.5,
        max_backlog_bytes: int = 1 << 28,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(secret) != DIGEST_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, must have {DIGEST_BYTES}")
        self._place, self._secret, self._timeout_s, self._clock = place, secret, timeout_s, clock
        self._lock = threading.RLock()
        self._records: dict[bytes, Record] = {}  # what can be asked for
        self._news: dict[bytes, Record] = {}
        self._counts: Counter[str] = Counter()
        self._failures, self._paused_until, self._mark = 0, 0.0, ""
        self._writer = Writer(max_backlog_bytes)
        self._readers = ThreadPoolExecutor(4, "kvgraft-shared")
        self._ended = threading.Event()
        self._looker = threading.Thread(target=self._look, name="kvgraft-shared-news", daemon=True)
        self._looker.start()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._records

    @property
    def counts(self) -> Counter[str]:
        """What has happened, by the names above."""
        with self._lock:
            return self._counts.copy()

    def put(self, record: Record, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Write a chunk soon; None, and counted, if it will not be written."""
        if not self._writer.submit(lambda: self._write(record, stored), nbytes(stored)):
            self._count("shared_backlog")
            return None
        return []

    def get(self, record: Record) -> "dict[str, Tensor] | None":
        """The stored tensors of a chunk, if they come in time and whole."""
        if record.key not in self:
            return None
        if self._is_paused():
            self._count("shared_paused")
            return None
        asked: Future[bytes | None] = self._readers.submit(self._place.get, record.key)
        try:
            data = asked.result(self._timeout_s)
        except Late:
            asked.cancel()
            return self._missed("shared_late")
        except Exception as error:  # whatever the client raises
            logger.debug("shared tier: %r", error)
            return self._missed("shared_failed")
        self._failures = 0
        if data is None:
            self._forget(record.key, "shared_gone")
            return None
        try:
            if data[:DIGEST_BYTES] != self._sign(record.key, data[DIGEST_BYTES:]):
                raise BadPayload("damaged")
            return decode(data[DIGEST_BYTES:], record)
        except BadPayload:
            self._forget(record.key, "shared_damaged")
            return None

    def touch(self, key: bytes) -> None:
        """Nothing to do: the place knows what is asked for."""

    def remove(self, key: bytes) -> None:
        """Forget a chunk, and have it removed soon."""
        with self._lock:
            known = self._records.pop(key, None) is not None
            self._news.pop(key, None)
        if known:
            self._writer.submit(lambda: self._attempt(lambda: self._place.remove(key)))

    def poll(self) -> dict[bytes, Record]:
        """What others have put there since the last call."""
        with self._lock:
            news, self._news = self._news, {}
            return news

    def flush(self) -> None:
        """Wait until all that was put is written, or has failed."""
        self._writer.flush()

    def close(self) -> None:
        """Write all that was put, then let the place go."""
        self._ended.set()
        self._writer.close()
        self._looker.join()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._place.close()

    def _sign(self, key: bytes, data: bytes) -> bytes:
        return blake3(key + data, key=self._secret).digest()

    def _write(self, record: Record, stored: dict[str, "Tensor"]) -> None:
        if self._is_paused():
            self._count("shared_backlog")
            return
        data = encode(record, stored)
        signed, told = self._sign(record.key, data) + data, record.encode()
        if self._attempt(lambda: self._place.put(record.key, self._sign(b"record", told) + told, signed)):
            with self._lock:
                self._records[record.key] = record
            self._count("shared_written")

    def _look(self) -> None:
        """Look what has come, until the end."""
        while True:
            if not self._is_paused():
                self._attempt(self._take_up)
            if self._ended.wait(PERIOD_S):
                return

    def _take_up(self) -> None:
        told, self._mark = self._place.come_since(self._mark)
        for data in told:
            if data[:DIGEST_BYTES] != self._sign(b"record", data[DIGEST_BYTES:]):
                self._count("shared_damaged")
                continue
            record = Record.decode(data[DIGEST_BYTES:])
            with self._lock:
                if record.key not in self._records:
                    self._records[record.key] = self._news[record.key] = record

    def _attempt(self, act: Callable[[], None]) -> bool:
        """Do something with the place; what fails is counted."""
        try:
            act()
        except Exception as error:  # whatever the client raises
            logger.debug("shared tier: %r", error)
            self._missed("shared_failed")
            return False
        self._failures = 0
        return True

    def _missed(self, reason: str) -> None:
        self._count(reason)
        self._failures += 1
        if self._failures >= PATIENCE:
            self._paused_until, self._failures = self._clock() + PAUSE_S, 0
            logger.warning("shared tier: %s, left alone for %.0f s", reason, PAUSE_S)

    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _forget(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._records.pop(key, None)
        self._count(reason)

    def _count(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1
