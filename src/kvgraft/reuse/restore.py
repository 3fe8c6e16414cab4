"""What a prompt wants of the tiers below the pool, and how it becomes known again."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from kvgraft.reuse.index import ReuseIndex
from kvgraft.segments.matches import Match, MatchQuery
from kvgraft.segments.store import consecutive


class Stored(Protocol):
    """What says what is stored: `SegmentStore`, or a `ChunkIndex` of what others store."""

    def prefix(self, chain_keys: Sequence[bytes], scope: bytes) -> list[int]: ...
    def match(self, query: MatchQuery) -> list[Match]: ...


class RestoredBlock(Protocol):
    """A block that came back: its tokens int32 [block_size], whose it is, and where it stood."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def scope(self) -> bytes: ...
    @property
    def source(self) -> int: ...
    @property
    def source_start(self) -> int: ...


def wanted_exact(
    stored: Stored,
    chains: Sequence[bytes],
    missing: Iterable[int],
    scope: bytes,
    *,
    contiguous: bool,
) -> dict[int, int]:
    """Numbers of stored blocks that are exact blocks of a prompt -> which.

    Args:
        chains: `chain_hashes` of its blocks.
        missing: blocks that the pool does not hold, ascending.
        contiguous: only as far as one follows the other, for hosts whose prefix hits have no gaps.
    """
    block_of: dict[int, int] = {}
    blocks = list(missing)
    for block, number in zip(
        blocks, stored.prefix([chains[block] for block in blocks], scope), strict=True
    ):
        if number >= 0:
            block_of[number] = block
        elif contiguous:
            break
    return block_of


def wanted_grafts(stored: Stored, query: MatchQuery) -> list[int]:
    """Return the numbers of stored blocks that could be grafted, longest run first."""
    runs = sorted(stored.match(query), key=lambda match: -match.length)
    return list(dict.fromkeys(page for match in runs for page in match.pages.tolist()))


def register_restored(
    index: ReuseIndex, blocks: Sequence[RestoredBlock], pages: Sequence[int]
) -> list[bool]:
    """Let blocks that have come back into these pages be grafted, by those who may read their
    scopes. False for those that are known often enough."""
    registered = [False] * len(blocks)
    order = sorted(
        range(len(blocks)),
        key=lambda at: (blocks[at].scope, blocks[at].source, blocks[at].source_start),
    )
    starts = [((blocks[at].scope, blocks[at].source), blocks[at].source_start) for at in order]
    for run in consecutive(starts, index.pool.block_size):
        tokens = np.concatenate([blocks[at].tokens for at in order[run]])
        (scope, source), start = starts[run.start]
        found = index.register(tokens, [pages[at] for at in order[run]], source, start, scope)
        for at, known in zip(order[run], found, strict=True):
            registered[at] = known
    return registered
