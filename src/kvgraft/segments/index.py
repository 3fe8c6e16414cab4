"""Virtual-block index: finds, at any token offset, what of a prompt is already cached (SparseX, sections 4.3-4.5)."""

import enum
import hashlib
import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvgraft.segments.keys import as_int32, block_digests, block_hashes, check_scope, window_hashes
from kvgraft.segments.table import EntryTable, IsLive

_INSERT_BATCH = 1 << 14  # blocks; bounds the temporary arrays of an insertion


class Lineage(enum.IntEnum):
    """What the KV of a block was computed from: only exact KV, or grafted KV as well."""

    EXACT = 0
    APPROXIMATE = 1


@dataclass(frozen=True, eq=False)
class Match:
    """Tokens [start, start + length) of a prompt that can be grafted from one source.

    Attributes:
        source_start: position in the source of the first token; any token, not only a block's first.
        pages: int32, physical blocks that cover [source_start, source_start + length) of the source.
        lineage: APPROXIMATE if any of the blocks is.
    """

    start: int
    length: int
    source_start: int
    pages: np.ndarray
    lineage: Lineage

    def source_slots(self, block_size: int) -> np.ndarray:
        """Slot of each token in the paged KV pool, int64 [length]."""
        positions = self.source_start % block_size + np.arange(self.length)  # within the pages
        return self.pages[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass
class _Run:
    """Claimed tokens [start, start + length) of a prompt; ids are the entries that cover them."""

    start: int
    length: int
    source_start: int
    ids: list[int]


class VirtualBlockIndex:
    """Names of physical blocks by content and namespace. It owns no KV memory and no page.

    Args:
        block_size: tokens per block.
        is_live: (pages int32 [n], versions int64 [n]) -> bool [n], whether each page still holds the content that it
            had under that version. Entries found dead are dropped.
        max_sources: entries kept of one content in one scope. Approximate entries never keep an exact one out, so
            there may be as many of each lineage.
    """

    def __init__(self, block_size: int, is_live: IsLive, *, max_sources: int = 4) -> None:
        for name, value in (("block_size", block_size), ("max_sources", max_sources)):
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        self.block_size = block_size
        self.max_sources = max_sources
        self._entries = EntryTable(block_size, is_live)
        self._secret = os.urandom(32)  # nobody can construct colliding hashes

    def __len__(self) -> int:
        """Entries held, live and stale."""
        return len(self._entries)

    def nbytes(self) -> int:
        """Host memory of the index in bytes, spare capacity included."""
        return self._entries.nbytes

    def insert(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        versions: np.ndarray,
        *,
        source: int,
        source_start: int,
        scope: bytes,
        lineage: Lineage = Lineage.EXACT,
        after: int = -1,
    ) -> np.ndarray:
        """Name m consecutive blocks of one source sequence.

        Args:
            tokens: token ids, int [m * block_size].
            pages: distinct physical blocks that hold their KV, int [m].
            versions: content versions of the pages, int [m].
            source: the sequence's identity, equal for all its blocks.
            source_start: position of the first token in the source, a multiple of block_size.
            scope: `scope_digest` of model and namespace.
            after: entry id of the block before the first, so that runs link across calls.

        Returns:
            Entry ids, int32 [m]. The known id where the scope already has that page in that version; -1 where
            max_sources live entries already hold the content.
        """
        tokens, pages, versions = as_int32("tokens", tokens), as_int32("pages", pages), np.asarray(versions, np.int64)
        self._check_insertion(tokens, pages, versions, source_start, after)
        blocks = tokens.reshape(-1, self.block_size)
        starts = source_start + self.block_size * np.arange(len(blocks), dtype=np.int32)
        ids = np.empty(len(blocks), np.int32)
        for at in range(0, len(blocks), _INSERT_BATCH):
            batch = slice(at, at + _INSERT_BATCH)
            ids[batch] = self._insert(
                blocks[batch], pages[batch], versions[batch], starts[batch], source, scope, Lineage(lineage)
            )
        self._link(np.append(np.int32(after), ids), source)
        return ids

    def match(
        self,
        tokens: np.ndarray,
        scope: bytes,
        *,
        free: np.ndarray | None = None,
        allow_approximate: bool = False,
        extend: bool = True,
    ) -> list[Match]:
        """Find what of a prompt can be grafted: disjoint matches sorted by start.

        Blocks on one diagonal (same source, same shift) form runs. The longest run claims its positions first (ties:
        earlier offset, then lower entry id); what others lose by that is cut off in whole blocks.

        Args:
            tokens: the prompt, int [T].
            scope: `scope_digest` of model and namespace; entries of another scope are never found.
            free: bool [T], positions that may be grafted (None: all).
            allow_approximate: use blocks of approximate lineage too.
            extend: grow the runs token by token into the neighbouring blocks of their source.
        """
        check_scope(scope)
        tokens = as_int32("tokens", tokens)
        free = np.ones(len(tokens), bool) if free is None else np.asarray(free)
        if free.dtype != bool or free.shape != tokens.shape:
            raise ValueError(f"free is {free.dtype} {free.shape}, expected bool {tokens.shape}")
        ceiling = Lineage.APPROXIMATE if allow_approximate else Lineage.EXACT
        unclaimed = bytearray(free.tobytes())
        runs = self._claim(*self._candidates(tokens, scope, free, ceiling), unclaimed)
        if extend:
            self._extend(runs, -1, tokens, scope, unclaimed, ceiling)
            self._extend(runs, +1, tokens, scope, unclaimed, ceiling)
        return [self._as_match(run) for run in sorted(runs, key=lambda run: run.start)]

    def discard_stale(self) -> int:
        """Drop every entry whose page has been recycled; returns how many."""
        return self._entries.discard_stale()

    def _check_insertion(
        self, tokens: np.ndarray, pages: np.ndarray, versions: np.ndarray, source_start: int, after: int
    ) -> None:
        if not len(tokens) == self.block_size * len(pages) == self.block_size * len(versions):
            raise ValueError(
                f"{len(tokens)} tokens, {len(pages)} pages and {len(versions)} versions, "
                f"expected {self.block_size} tokens for each page and version"
            )
        if len(np.unique(pages)) < len(pages):
            raise ValueError("pages repeat, but a physical block holds one block of a source")
        end = source_start + len(tokens)
        if source_start < 0 or source_start % self.block_size or end > np.iinfo(np.int32).max:
            raise ValueError(f"source_start is {source_start}, must be a multiple of {self.block_size} in [0, 2^31)")
        if not -1 <= after < self._entries.capacity:
            raise ValueError(f"after is {after}, must be -1 or an entry id below {self._entries.capacity}")

    def _insert(
        self,
        blocks: np.ndarray,
        pages: np.ndarray,
        versions: np.ndarray,
        starts: np.ndarray,
        source: int,
        scope: bytes,
        lineage: Lineage,
    ) -> np.ndarray:
        entries, digests = self._entries, block_digests(blocks, scope)
        keys = block_hashes(blocks, self._lookup_scope(scope))
        rows, held = self._entries.find(keys)
        same = (entries.digest[held] == digests[rows]).all(axis=1)
        rows, held = rows[same], held[same]
        ids = np.full(len(blocks), -1, np.int32)
        known = (entries.page[held] == pages[rows]) & (entries.version[held] == versions[rows])
        ids[rows[known]] = held[known]
        entries.lineage[held[known]] = np.maximum(entries.lineage[held[known]], lineage)
        num_sources = np.bincount(rows[entries.lineage[held] <= lineage], minlength=len(blocks))
        new = np.flatnonzero(ids < 0)
        new = new[num_sources[new] + _occurrence(digests[new]) < self.max_sources]
        ids[new] = entries.add(
            keys[new],
            tokens=blocks[new],
            digest=digests[new],
            page=pages[new],
            version=versions[new],
            source=source,
            source_start=starts[new],
            previous=-1,
            following=-1,
            lineage=lineage,
        )
        return ids

    def _link(self, ids: np.ndarray, source: int) -> None:
        """Link the entries of consecutive blocks where both belong to the source."""
        entries, left, right = self._entries, ids[:-1], ids[1:]
        linked = (left >= 0) & (right >= 0) & (entries.source[left] == source) & (entries.source[right] == source)
        linked &= entries.source_start[right] - entries.source_start[left] == self.block_size
        entries.following[left[linked]] = right[linked]
        entries.previous[right[linked]] = left[linked]

    def _lookup_scope(self, scope: bytes) -> bytes:
        check_scope(scope)
        return hashlib.sha256(self._secret + scope).digest()

    def _candidates(
        self, tokens: np.ndarray, scope: bytes, free: np.ndarray, ceiling: Lineage
    ) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ids): live entries whose content, scope and lineage allow them at a wholly free window."""
        if len(tokens) < self.block_size:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        entries, windows = self._entries, np.lib.stride_tricks.sliding_window_view(tokens, self.block_size)
        blocked = np.concatenate(([0], np.cumsum(~free)))  # [T + 1]
        offsets = np.flatnonzero(blocked[self.block_size :] == blocked[: -self.block_size])
        rows, ids = self._entries.find(window_hashes(tokens, self.block_size, self._lookup_scope(scope))[offsets])
        starts = offsets[rows]
        equal = (entries.lineage[ids] <= ceiling) & (windows[starts] == entries.tokens[ids]).all(axis=1)
        starts, ids = starts[equal], ids[equal]
        offsets, rows = np.unique(starts, return_inverse=True)
        authentic = (block_digests(windows[offsets], scope)[rows] == entries.digest[ids]).all(axis=1)
        return starts[authentic], ids[authentic]

    def _claim(self, starts: np.ndarray, ids: np.ndarray, unclaimed: bytearray) -> list[_Run]:
        """Form runs of the candidates and claim their positions, longest first."""
        source, source_start = self._entries.source[ids], self._entries.source_start[ids]
        blocks = np.stack((source, source_start - starts, starts, ids), axis=1)  # [candidates, 4]
        blocks = blocks[np.lexsort(blocks.T[::-1])]
        same_place = (np.diff(blocks[:, :3], axis=0) == 0).all(axis=1)
        blocks = np.delete(blocks, np.flatnonzero(same_place) + 1, axis=0)
        joined = (np.diff(blocks[:, :3], axis=0) == (0, 0, self.block_size)).all(axis=1)
        edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(blocks)]
        offsets, entries = blocks[:, 2].tolist(), blocks[:, 3].tolist()
        return [
            _Run(
                start=offsets[first],
                length=self.block_size * (stop - first),
                source_start=int(self._entries.source_start[entries[first]]),
                ids=entries[first:stop],
            )
            for first, stop in _claim_longest_first(offsets, entries, edges, unclaimed, self.block_size)
        ]

    def _extend(
        self, runs: list[_Run], step: int, tokens: np.ndarray, scope: bytes, unclaimed: bytearray, ceiling: Lineage
    ) -> None:
        """Grow each run to the left (step -1) or right (+1), by less than a block: a whole one would be in the run."""
        edges = np.array([run.ids[-1 if step > 0 else 0] for run in runs], np.int32)
        for run, neighbour in zip(runs, self._neighbours(edges, step, scope, ceiling).tolist(), strict=True):
            if neighbour < 0:
                continue
            position = run.start + run.length if step > 0 else run.start - 1
            count = _reach(self._entries.tokens[neighbour, ::step], tokens, unclaimed, position, step)
            run.length += count
            if count and step > 0:
                run.ids.append(neighbour)
            elif count:
                run.ids.insert(0, neighbour)
                run.start, run.source_start = run.start - count, run.source_start - count

    def _neighbours(self, ids: np.ndarray, step: int, scope: bytes, ceiling: Lineage) -> np.ndarray:
        """The entry next to each in its source, verified as a candidate is, or -1: int32 [n]."""
        entries = self._entries
        linked = (entries.following if step > 0 else entries.previous)[ids]
        right_place = (entries.source[linked] == entries.source[ids]) & (
            entries.source_start[linked] - entries.source_start[ids] == step * self.block_size
        )
        allowed = (entries.lineage[linked] >= 0) & (entries.lineage[linked] <= ceiling)
        rows = np.flatnonzero((linked >= 0) & right_place & allowed)
        near = linked[rows]
        valid = entries.live(near) & (block_digests(entries.tokens[near], scope) == entries.digest[near]).all(axis=1)
        neighbours = np.full(len(ids), -1, np.int32)
        neighbours[rows[valid]] = near[valid]
        return neighbours

    def _as_match(self, run: _Run) -> Match:
        pages, lineage = self._entries.page[run.ids], Lineage(int(self._entries.lineage[run.ids].max()))
        return Match(run.start, run.length, run.source_start, pages, lineage)


def _occurrence(digests: np.ndarray) -> np.ndarray:
    """How many rows before each row have the same content, int64 [m]."""
    content = digests.view(np.uint64)[:, 0]
    order = np.argsort(content, kind="stable")
    ordered, occurrence = content[order], np.empty(len(order), np.int64)
    occurrence[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return occurrence


def _claim_longest_first(
    starts: list[int], ids: list[int], edges: list[int], unclaimed: bytearray, block_size: int
) -> Iterator[tuple[int, int]]:
    """Yield disjoint runs [first, stop) of candidate blocks, longest first, and claim their positions.

    A run between two edges that has lost blocks to a longer one is cut; its pieces compete again.
    """

    def is_open(block: int) -> bool:
        return unclaimed.find(0, starts[block], starts[block] + block_size) < 0

    heap = [(first - stop, starts[first], ids[first], first, stop) for first, stop in pairwise(edges) if first < stop]
    heapq.heapify(heap)
    while heap:
        *_, first, stop = heapq.heappop(heap)
        lost = [block for block in range(first, stop) if not is_open(block)]
        if not lost:
            unclaimed[starts[first] : starts[stop - 1] + block_size] = bytes(block_size * (stop - first))
            yield first, stop
            continue
        for before, after in pairwise([first - 1, *lost, stop]):
            if before + 1 < after:
                piece = before + 1
                heapq.heappush(heap, (piece - after, starts[piece], ids[piece], piece, after))


def _reach(block: np.ndarray, prompt: np.ndarray, unclaimed: bytearray, position: int, step: int) -> int:
    """Claim prompt positions from position on, by step, while they are unclaimed and equal the block's tokens."""
    count = 0
    for token in block:
        if not (0 <= position < len(prompt) and unclaimed[position] and prompt[position] == token):
            break
        unclaimed[position] = 0
        position, count = position + step, count + 1
    return count
