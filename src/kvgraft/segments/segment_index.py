"""Identical text and, if wanted, near-duplicates of it: one index of blocks, and one of segments
beside it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft.segments.index import VirtualBlockIndex
from kvgraft.segments.matches import Match, MatchQuery
from kvgraft.segments.segmentation import Similarity
from kvgraft.segments.similar import SimilarIndex
from kvgraft.segments.table import IsLive


class SegmentIndex:
    """Blocks by content, wherever they stand in a prompt.

    Args:
        is_live: of `VirtualBlockIndex`.
        similarity: what counts as a near-duplicate; None knows identical text only.
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
        """Name consecutive blocks of one source: `VirtualBlockIndex.insert`. The segments in them
        become known, too: in all of them, or in those where `usable` bool [m] is set."""
        ids = self.blocks.insert(tokens, pages, versions, scope=scope, **place)
        if self.similar is not None:
            self.similar.insert(ids if usable is None else np.where(usable, ids, -1), scope)
        return ids

    def match(self, query: MatchQuery) -> list[Match]:
        """Return what of a prompt is known: `VirtualBlockIndex.match`, `SimilarIndex.match`."""
        index = self.similar if query.similar and self.similar is not None else self.blocks
        return index.match(query)
