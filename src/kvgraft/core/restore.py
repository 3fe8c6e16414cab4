"""Stored blocks that a prompt needs from the tiers below the pool, and their registration after
they are restored."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from kvgraft.core.admission import PromptState
from kvgraft.core.chunk import consecutive
from kvgraft.core.matches import Match, MatchQuery, in_blocks
from kvgraft.core.reuse_index import ReuseIndex


class Stored(Protocol):
    """Index of stored blocks: `SegmentStore`, or a `ChunkIndex` of chunks that others store."""

    def prefix(self, chain_keys: Sequence[bytes], scope: bytes) -> list[int]: ...
    def match(self, query: MatchQuery) -> list[Match]: ...


class RestoredBlock(Protocol):
    """A restored block: its tokens int32 [block_size], its scope, and its place in its source."""

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
    """Map numbers of stored blocks to the blocks of a prompt that they are exactly.

    Args:
        chains: `chain_hashes` of its blocks.
        missing: blocks that the pool does not hold, ascending.
        contiguous: stop at the first block that is not stored, for hosts whose prefix hits have no
            gaps.
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


def wanted_blocks(
    stored: Stored,
    index: ReuseIndex,
    prompt: PromptState,
    chains: Sequence[bytes],
    hits: Collection[int],
    matches: Sequence[Match] | None = None,
    *,
    contiguous: bool,
    grafts: bool,
) -> tuple[dict[int, int], list[int]]:
    """Return the stored blocks that a prompt needs in addition to what the pool holds.

    Args:
        chains: `chain_hashes` of the blocks that it may have exactly.
        hits: blocks of the prompt that the pool provides.
        matches: text that the pool provides for grafts; None: all that the index finds.
        contiguous: see `wanted_exact`.
        grafts: whether blocks to graft from are wanted, too.

    Returns:
        `wanted_exact`; and the numbers of all stored blocks to restore, first exact blocks of the
            prompt, then blocks to graft from, longest run first.
    """
    missing = (block for block in range(len(chains)) if block not in hits)
    exact = wanted_exact(stored, chains, missing, prompt.scopes[0], contiguous=contiguous)
    if not grafts:
        return exact, list(exact)

    tokens, similar = prompt.input_ids, prompt.matches_similar
    whole = prompt.grafts_local_heads
    free = np.ones(len(tokens), bool)
    in_blocks(free, index.pool.block_size)[[*hits, *exact.values()]] = False
    if matches is None:
        query = index.query(tokens, prompt.scopes, free, similar=similar, whole=whole)
        matches = index.match(query)

    for match in matches:
        free[match.start : match.start + match.length] = False

    query = index.query(tokens, prompt.scopes, free, similar=similar)
    return exact, list(dict.fromkeys([*exact, *wanted_grafts(stored, query)]))


def register_restored(
    index: ReuseIndex, blocks: Sequence[RestoredBlock], pages: Sequence[int]
) -> list[bool]:
    """Register restored blocks in these pages as graft sources, in their scopes.

    Returns:
        For each block whether it was registered; False if enough others hold its content.
    """
    registered = [False] * len(blocks)
    order = sorted(
        range(len(blocks)),
        key=lambda at: (blocks[at].scope, blocks[at].source, blocks[at].source_start),
    )
    starts = [((blocks[at].scope, blocks[at].source), blocks[at].source_start) for at in order]
    for run in consecutive(starts, index.pool.block_size):
        tokens = np.concatenate([blocks[at].tokens for at in order[run]])
        (scope, source), start = starts[run.start]
        found = index.register_exact(tokens, [pages[at] for at in order[run]], source, start, scope)
        for at, known in zip(order[run], found, strict=True):
            registered[at] = known

    return registered
