"""Whether what others run can be asked just now."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

PAUSE_S = 30.0  # for which it is left alone
PATIENCE = 3  # failures in a row
logger = logging.getLogger("kvgraft")


class CircuitBreaker:
    """After three failures in a row of one kind it is left alone for half a minute, then tried
    again: one more failure is enough from then on, until it works. The log has a warning when that
    begins.

    Args:
        what: for the log.
        clock: seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()  # in a row, by kind
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether it is left alone."""
        return self._clock() < self._paused_until

    def worked(self, kind: str) -> None:
        """What was asked for was answered."""
        with self._lock:
            del self._failures[kind]

    def failed(self, kind: str, why: str) -> None:
        """It was not answered, or not in time."""
        with self._lock:
            self._failures[kind] += 1
            if self._failures[kind] == 1:
                logger.warning("%s: %s: %s", self._what, kind, why)
            if self._failures[kind] >= PATIENCE:
                self._paused_until = self._clock() + PAUSE_S
