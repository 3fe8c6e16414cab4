"""Write-behind: a thread that runs jobs in order, with a backlog of bounded size."""

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("kvgraft")


class ChunkWriter:
    """One daemon thread and its jobs.

    Args:
        max_bytes: bytes that all waiting jobs together may hold.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_backlog_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        # The first job is running.
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._num_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvgraft-store", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> bool:
        """Queue a job that holds `num_bytes` of memory; False if the backlog has no room for it or
        is closing."""
        with self._changed:
            if self._closing or (num_bytes and self._num_bytes + num_bytes > self.max_bytes):
                return False
            self._jobs.append((job, num_bytes))
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every job is done, or for at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Run all waiting jobs, then end the thread. Waits at most `timeout_s` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job, num_bytes = self._jobs[0]
            try:
                job()
            except Exception:
                logger.exception("a job of the segment store failed")
            with self._changed:
                self._jobs.popleft()
                self._num_bytes -= num_bytes
                self._changed.notify_all()
