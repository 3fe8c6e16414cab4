"""Stages of a decode step whose cost can be watched. Without a watcher they cost nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# receives the name of a stage, and is entered around it
Watcher = Callable[[str], AbstractContextManager[object]]

_watchers: list[Watcher] = []


def watched(stage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a stage, or part of one: indexer, top-k (within the indexer) or attention."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _watchers:
                return function(*args, **kwargs)
            with _watchers[-1](stage):
                return function(*args, **kwargs)

        return run

    return decorate


def is_watched() -> bool:
    """Return whether stages of this process are watched now."""
    return bool(_watchers)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Enter this watcher, and no other, around every stage of the process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
