"""Threads that read, and for which nobody waits who ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class Readers:
    """As a `ThreadPoolExecutor`, of daemon threads: one that hangs does not hold up the end of the
    process."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, act: Callable[[], Result]) -> "Future[Result]":
        """Have something done, in the order of what is asked for."""
        future: Future[Result] = Future()
        self._asked.put((future, act))
        return future

    def close(self) -> None:
        """End the threads that do not hang, without waiting."""
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
