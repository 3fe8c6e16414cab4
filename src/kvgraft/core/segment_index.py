"""Index of identical text and, optionally, of near-duplicates: one of blocks, and one of segments
on top of it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.matches import Match, MatchQuery
from kvgraft.core.segmentation import Similarity
from kvgraft.core.similar import SimilarIndex
from kvgraft.core.table import IsLive


class SegmentIndex:
    """Blocks by content, wherever they occur in a prompt.

    Args:
        is_live: see `VirtualBlockIndex`.
        similarity: definition of near-duplicates; None finds only identical text.
        anchors: token sequences that begin a segment, for near-duplicates.
    """

    def __init__(
        self,
        block_size: int,
        is_live: IsLive,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        self.blocks = VirtualBlockIndex(block_size, is_live)
        self.similar = SimilarIndex(self.blocks, similarity, anchors) if similarity else None

    def nbytes(self) -> int:
        """Host memory in bytes."""
        return self.blocks.nbytes() + (0 if self.similar is None else self.similar.nbytes())

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        versions: np.ndarray,
        *,
        scope: bytes,
        usable: np.ndarray | None = None,
        **place: Any,
    ) -> np.ndarray:
        """Register consecutive blocks of one source: `VirtualBlockIndex.insert`.

        Their segments are registered, too: in all blocks, or in those where `usable` bool [m] is
        set.
        """
        ids = self.blocks.insert(tokens, pages, versions, scope=scope, **place)
        if self.similar is not None:
            self.similar.insert(ids if usable is None else np.where(usable, ids, -1), scope)
        return ids

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the parts of a prompt that are known."""
        return self.index_for(query).match(query)

    def index_for(self, query: MatchQuery) -> VirtualBlockIndex | SimilarIndex:
        """Return the index that answers a query."""
        return self.similar if query.similar and self.similar is not None else self.blocks
