"""A circuit breaker for services that other processes run."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

PAUSE_S = 30.0  # for which the breaker stays open
PATIENCE = 3  # failures in a row
logger = logging.getLogger("kvgraft")


class CircuitBreaker:
    """Open after `PATIENCE` failures of one kind in a row, for `PAUSE_S` seconds.

    After that, one more failure opens it again, until a call of that kind succeeds. The first
    failure of a kind in a row is logged as a warning.

    Args:
        what: name of the service, for the log.
        clock: gives seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()  # in a row, by kind
        self._paused_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service must not be called now."""
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
