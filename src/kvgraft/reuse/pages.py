"""A page pool as reuse sees it: the native engine's own (`kv/pages.py`) and vLLM's (`vllm/pool.py`)
satisfy it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvgraft.segments.pins import PinnablePages


class Pages(PinnablePages, Protocol):
    """Physical blocks with reference counts. A page's version changes when it loses its content."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def keep(self, pages: Sequence[int]) -> None:
        """Mark content as worth finding again: it outlives its last reference until it is
        reclaimed."""

    def forget(self, pages: Sequence[int]) -> None:
        """Let nobody find what these pages hold; free ones are the next to be reclaimed."""

    def versions_of(self, pages: Sequence[int]) -> np.ndarray:
        """int64 [n]: version of the content of each page."""

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """bool [n]: whether each page still holds what it held under that version."""
