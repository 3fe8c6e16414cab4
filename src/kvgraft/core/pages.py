"""Protocol of a page pool. The native engine's pool (`kv/pages.py`) and vLLM's (`vllm/pool.py`)
implement it."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from kvgraft.core.pins import PinnablePages


class Pages(PinnablePages, Protocol):
    """Physical blocks with reference counts. A page's version changes when it loses its content.

    Each host has keys of its own, by which its prefix lookup finds blocks.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def publish(self, page: int, key: Any) -> None:
        """Let the prefix lookup find a page that the caller holds by this key."""

    def lookup_all(self, keys: Iterable[Any]) -> list[int | None]:
        """Return the page that the prefix lookup finds by each key, or None."""

    def keep(self, pages: Sequence[int]) -> None:
        """Mark content as reusable: it outlives its last reference until it is reclaimed."""

    def forget(self, pages: Sequence[int]) -> None:
        """Hide the content of these pages from lookups. Free ones are the next to be reclaimed."""

    def versions_of(self, pages: Sequence[int]) -> np.ndarray:
        """Return the version of the content of each page: int64 [n]."""

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """Return whether each page still holds the content of that version: bool [n]."""
