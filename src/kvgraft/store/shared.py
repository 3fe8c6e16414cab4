"""Shared tier: chunks that one machine has stored and other machines find."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from kvgraft.core.chunk import KEY_BYTES, ChunkRecord, Gone, nbytes
from kvgraft.store.backends import Backend, open_backend
from kvgraft.store.files import BadPayload, decode, encode, most_bytes
from kvgraft.store.secret import derive
from kvgraft.store.signer import Signer, without_source
from kvgraft.store.writer import ChunkWriter

Result = TypeVar("Result")


PAUSE_S = 30.0  # seconds that the breaker stays open
PATIENCE = 3  # failures in a row
logger = logging.getLogger("kvgraft")


if TYPE_CHECKING:
    from torch import Tensor

PERIOD_S = 1.0  # seconds between two reads of the log
START_S = 5.0  # greatest wait in seconds for the first read of the log
FLUSH_S = 10.0  # greatest wait in seconds for pending writes
MAX_RECORDS = 1 << 17  # known records; beyond them the oldest are forgotten
PAGE = 512  # records per read of the log
NEWS = 256  # changes per poll, since the caller has other work
NUM_READERS = 8
LOOKING, READING, WRITING = "looking", "reading", "writing"  # kinds of calls to a place
_REMOVED = b"-"  # first byte of the record of a removal; other records are JSON
logger = logging.getLogger("kvgraft")


class SharedTier:
    """Chunks in a `Backend`.

    A chunk is written later, by a thread. A chunk that does not arrive in time is a miss, and so is
    one that was changed on the way: all data is signed. Only opening, `fetch`, `flush` and `close`
    wait for the place, each for a limited time.

    `_lock` guards what this process knows of the place, and is never held while the place is
    called.

    Args:
        place: used by this object alone.
        secret: 32 bytes that the servers of a fleet share. They sign and name their chunks with it.
        timeout_s: seconds that `fetch` waits.
        max_backlog_bytes: payload that may wait to be written.
    """

    hits = "shared_hits"

    def __init__(
        self,
        place: Backend,
        secret: bytes,
        *,
        timeout_s: float = 0.5,
        max_backlog_bytes: int = 1 << 28,
    ) -> None:
        self._backend, self._timeout_s, self._id = place, timeout_s, os.urandom(8)
        self._signer = Signer(secret)
        self._lock = threading.RLock()
        self._records: dict[bytes, ChunkRecord] = {}  # chunks that can be fetched
        self._waiting: dict[bytes, tuple[ChunkRecord, dict[str, Tensor]]] = {}  # to be written
        self._news: dict[bytes, ChunkRecord | Gone] = {}
        self._counts: Counter[str] = Counter()
        self._breaker, self._mark = CircuitBreaker("segment store, shared tier"), ""
        self._writer = ChunkWriter(max_backlog_bytes)
        self._readers = Readers(NUM_READERS, "kvgraft-shared")
        self._ended, self._looked = threading.Event(), threading.Event()
        self._looker = threading.Thread(target=self._look, name="kvgraft-shared-news", daemon=True)
        self._looker.start()
        self._looked.wait(START_S)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._records or key in self._waiting

    @property
    def counts(self) -> Counter[str]:
        """Events of the shared tier. Chunks "shared_written". Chunks requested and missed:
        "shared_gone", "shared_late" (not in time), "shared_failed" (which also counts errors
        without a request), "shared_damaged", "shared_foreign", "shared_paused" (not requested or
        not written while the circuit breaker is open). Records "shared_forged": not signed with our
        secret. Not written: "shared_backlog", "shared_too_large"."""
        with self._lock:
            return self._counts.copy()

    def record(self, key: bytes) -> ChunkRecord | None:
        """Return the record of a chunk that can be fetched, or None."""
        with self._lock:
            return self._records.get(key)

    def put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> list[bytes] | None:
        """Queue a chunk for writing, if it is not there. Return None, and count it, if it will not
        be written."""
        with self._lock:
            if record.key in self:
                return []
            if self._breaker.is_open:
                self._counts["shared_paused"] += 1
            elif not self._writer.submit(partial(self._write, record, stored), nbytes(stored)):
                self._counts["shared_backlog"] += 1
            else:
                self._waiting[record.key] = record, stored
                self._news.pop(record.key, None)
                return []
            return None

    def fetch(
        self, records: Sequence[ChunkRecord], asked_at: float | None = None
    ) -> dict[ChunkRecord, dict[str, "Tensor"]]:
        """Return the stored tensors of chunks that arrive whole and in time.

        Args:
            records: the most needed first.
            asked_at: `time.monotonic` when the waiting began; None: now.
        """
        deadline = (time.monotonic() if asked_at is None else asked_at) + self._timeout_s
        with self._lock:
            arrived = {
                record: self._waiting[record.key][1] for record in records if self._waits(record)
            }
            wanted = [
                record
                for record in records
                if record not in arrived and record.key in self._records
            ]

        if not wanted:
            return arrived
        if self._breaker.is_open:
            self._count("shared_paused", len(wanted))
            return arrived
        # The time was spent before the place was called, so its breaker does not count this.
        if time.monotonic() >= deadline:
            self._count("shared_late", len(wanted))
            return arrived

        asked = {record: self._readers.submit(partial(self._read, record)) for record in wanted}
        wait(asked.values(), max(deadline - time.monotonic(), 0.0))
        answers = {record: _answer_of(future) for record, future in asked.items()}
        for record, answer in answers.items():
            if isinstance(answer, dict):
                arrived[record] = answer
            else:
                self._missed(record, answer)

        silent = [
            str(answer) for answer in answers.values() if answer in ("shared_late", "shared_failed")
        ]
        if len(silent) == len(asked):
            self._breaker.failed(READING, silent[0])
        else:
            self._breaker.worked(READING)

        return arrived

    def remove(self, key: bytes) -> None:
        """Forget a chunk now, and have it removed soon, for all machines that share the place."""
        with self._lock:
            waiting, record = self._waiting.pop(key, None), self._records.pop(key, None)
            self._news.pop(key, None)
            record = record or (waiting[0] if waiting else None)
        if record is not None:
            record_bytes = self._signer.close_record(removal(key, self._id))
            name = self._signer.name(record)
            self._writer.submit(lambda: self._erase(name, record_bytes))

    def poll(self) -> dict[bytes, ChunkRecord | Gone]:
        """Return some of the changes since the last calls that `put`, `remove` and `fetch` did not
        make.

        These are chunks that others have put or removed, and chunks that could not be written.
        """
        with self._lock:
            news = dict(list(self._news.items())[:NEWS])
            for key in news:
                del self._news[key]
            return news

    def flush(self) -> None:
        """Wait until all pending chunks are written or have failed, for 10 s at most."""
        self._writer.flush(FLUSH_S)

    def close(self) -> None:
        """Write all pending chunks, for 10 s at most, then close the place."""
        self._writer.close(FLUSH_S)
        self._ended.set()
        self._looker.join(PERIOD_S)
        self._readers.close()
        self._backend.close()

    # The methods below need the lock to be held.

    def _waits(self, record: ChunkRecord) -> bool:
        """Return whether this very record, not another one with its key, waits to be written."""
        return self._waiting.get(record.key, (None,))[0] is record

    def _know(self, record: ChunkRecord) -> None:
        """Add a chunk that can be fetched. Beyond the limit the oldest is forgotten, since the
        place evicts without notice."""
        self._records[record.key] = record
        if len(self._records) > MAX_RECORDS:
            oldest = next(iter(self._records))
            del self._records[oldest]
            self._news[oldest] = Gone.EVICTED

    def _forget_all(self) -> None:
        """Forget all records, since the log of the backend begins again."""
        self._news |= dict.fromkeys(self._records, Gone.EVICTED)
        self._records.clear()

    def _forget_removed(self, key: bytes) -> None:
        """Forget a chunk that another server has removed everywhere."""
        self._waiting.pop(key, None)
        self._records.pop(key, None)
        self._news[key] = Gone.REMOVED

    # The methods below run in threads of this tier.

    def _read(self, record: ChunkRecord) -> "dict[str, Tensor] | str":
        """Read the stored tensors of a chunk, or return the reason for a miss."""
        name, plain = self._signer.name(record), without_source(record)
        try:
            sealed = self._backend.get(name, self._signer.closed_bytes(most_bytes(plain)))
            return (
                "shared_gone" if sealed is None else decode(self._signer.open(sealed, name), plain)
            )
        except BadPayload as bad:
            return f"shared_{bad.reason}"
        # Clients of places raise errors of any type.
        except Exception as error:
            logger.debug("segment store, shared tier: %r", error)
            return "shared_failed"

    def _write(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> None:
        """Write a chunk, unless it was removed, the breaker is open or the tier is closing."""
        with self._lock:
            if not self._waits(record):
                return

        is_kept = False
        if self._breaker.is_open or self._ended.is_set():
            self._count("shared_paused")
        else:
            is_kept = self._attempt(WRITING, lambda: self._put(record, stored))

        with self._lock:
            # If it no longer waits, it was removed meanwhile.
            if self._waits(record):
                del self._waiting[record.key]
                if is_kept:
                    self._know(record)
                else:
                    self._news[record.key] = Gone.EVICTED

    def _put(self, record: ChunkRecord, stored: dict[str, "Tensor"]) -> bool:
        name, record_bytes = self._signer.name(record), self._signer.close_record(record.encode())
        is_kept = self._backend.put(
            name, record_bytes, self._signer.close(encode(without_source(record), stored), name)
        )
        self._count("shared_written" if is_kept else "shared_too_large")
        return is_kept

    def _erase(self, name: str, record_bytes: bytes) -> None:
        self._attempt(WRITING, lambda: self._backend.remove(name, record_bytes))

    def _look(self) -> None:
        """Read the log periodically until the tier is closed."""
        while not self._ended.is_set():
            if not self._breaker.is_open:
                self._attempt(LOOKING, self._take_up)
            self._looked.set()
            self._ended.wait(PERIOD_S)

    def _take_up(self) -> bool:
        """Read all new records of the log."""
        read: list[bytes] = []
        while len(read) in (0, PAGE) and not self._ended.is_set():
            read, mark = self._backend.read_log(self._mark, PAGE)
            with self._lock:
                if self._mark and not mark:
                    self._forget_all()
            self._mark = mark
            for data in read:
                self._take_in(data)
            if not read:
                break
        return True

    def _take_in(self, data: bytes) -> None:
        """Apply a record of the log, which may be one of ours."""
        try:
            plain = self._signer.open_record(data)
            record = None if plain.startswith(_REMOVED) else ChunkRecord.decode(plain)
        except (BadPayload, ValueError):
            self._count("shared_forged")
            return
        with self._lock:
            if record is None:
                if plain[len(_REMOVED) : -KEY_BYTES] != self._id:
                    self._forget_removed(plain[-KEY_BYTES:])
            elif record.key not in self:
                self._news[record.key] = record
                self._know(record)

    def _attempt(self, doing: str, act: Callable[[], bool | None]) -> bool:
        """Call the place. A failure is counted."""
        try:
            found = act()
        # Clients of places raise errors of any type.
        except Exception as error:
            self._count("shared_failed")
            self._breaker.failed(doing, f"{type(error).__name__}: {error}")
            return False
        self._breaker.worked(doing)
        return bool(found)

    def _missed(self, record: ChunkRecord, reason: str) -> None:
        """Count a chunk that did not arrive. Forget it, unless a later attempt may succeed."""
        with self._lock:
            self._counts[reason] += 1
            if reason not in ("shared_late", "shared_failed"):
                self._records.pop(record.key, None)

    def _count(self, reason: str, number: int = 1) -> None:
        with self._lock:
            self._counts[reason] += number


def removal(key: bytes, by: bytes) -> bytes:
    """Return the record of a removal.

    Args:
        key: of the chunk.
        by: 8 bytes that name the server that removes it.
    """
    return _REMOVED + by + key


def _answer_of(future: "Future[dict[str, Tensor] | str]") -> "dict[str, Tensor] | str":
    """Return the result of a read, or the reason for a miss. A read that has not begun is
    cancelled."""
    return "shared_late" if future.cancel() or not future.done() else future.result()


class Readers:
    """Pool of daemon threads, like a `ThreadPoolExecutor`. A thread that hangs does not delay the
    end of the process."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, act: Callable[[], Result]) -> "Future[Result]":
        """Queue a call; calls start in their order."""
        future: Future[Result] = Future()
        self._asked.put((future, act))
        return future

    def close(self) -> None:
        """End all threads that do not hang, without waiting."""
        for _ in range(self._count):
            self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, act = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)


class CircuitBreaker:
    """Circuit breaker that opens after `PATIENCE` failures of one kind in a row, for `PAUSE_S`
    seconds.

    After that, one more failure opens it again, until a call of that kind succeeds. The first
    failure of a kind in a row is logged as a warning.

    Args:
        what: name of the service, for the log.
        clock: returns seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()  # in a row, by kind
        self._paused_until = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the service must not be called now."""
        return self._clock() < self._paused_until

    def worked(self, kind: str) -> None:
        """Note that a call of this kind succeeded."""
        with self._lock:
            del self._failures[kind]

    def failed(self, kind: str, why: str) -> None:
        """Note that a call of this kind failed, and why."""
        with self._lock:
            self._failures[kind] += 1
            if self._failures[kind] == 1:
                logger.warning("%s: %s: %s", self._what, kind, why)
            if self._failures[kind] >= PATIENCE:
                self._paused_until = self._clock() + PAUSE_S


@dataclass(frozen=True)
class Sharing:
    """A shared tier that is not opened yet.

    Attributes:
        url: see `open_backend`.
        secret: 32 bytes that the servers of a fleet share.
        rank: number of this rank, if there are several. Each has its own part of the place. None:
            there is one.
        timeout_s: seconds that one prompt waits in total.
        capacity, quota: of a file system, see `FileBackend`.
    """

    url: str
    secret: bytes = field(repr=False)
    rank: int | None
    timeout_s: float
    capacity: int
    quota: float

    def open(self) -> "SharedTier":
        """Open the tier; see `open_backend` for its errors. An unreachable place is no error."""
        return SharedTier(self._backend(), self._own_secret, timeout_s=self.timeout_s)

    def remove(self, records: Iterable[ChunkRecord]) -> None:
        """Remove chunks for all machines that share the place, as its operator. Raises any error of
        the place's client."""
        seal = Signer(self._own_secret)
        with closing(self._backend()) as place:
            for record in records:
                place.remove(
                    seal.name(record), seal.close_record(removal(record.key, os.urandom(8)))
                )

    @property
    def _own_secret(self) -> bytes:
        """Secret of this rank. Ranks have different data of equal shape for one text, so they must
        not accept each other's."""
        return self.secret if self.rank is None else derive(self.secret, f"rank {self.rank}")

    def _backend(self) -> Backend:
        folder = "" if self.rank is None else f"rank-{self.rank}"
        return open_backend(self.url, folder, self.timeout_s, self.capacity, self.quota)
