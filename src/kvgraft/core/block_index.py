"""Virtual-block index: finds cached parts of a prompt at any token offset (SparseX, sections
4.3-4.5)."""

import hashlib
import os
import sys
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvgraft.core.keys import as_int32, block_hashes, check_scope, window_hashes
from kvgraft.core.matches import MAX_DEPTH, Match, MatchQuery
from kvgraft.core.run_selection import claim, longest_first
from kvgraft.core.table import EntryTable, IsLive, IsWhole, occurrence

_INSERT_BATCH = 1 << 14  # blocks; bounds the temporary arrays of an insertion
_LEVELS = 8  # levels of depth that a match distinguishes


@dataclass(frozen=True)
class _Prompt:
    query: MatchQuery
    unclaimed: bytearray  # [T], 1 where a token may still be grafted


@dataclass
class _Run:
    """Claimed tokens [start, start + length) of a prompt. `ids` are the entries that cover them, of
    at most this depth."""

    start: int
    length: int
    source_start: int
    ids: list[int]
    depth: int


class VirtualBlockIndex:
    """Index of physical blocks by content and namespace. It owns no KV memory and no page. For one
    thread.

    Args:
        block_size: tokens per block.
        is_live: (pages int32 [n], versions int64 [n]) -> bool [n], whether each page still holds
            the content that it had under that version. Dead entries are dropped when they are
            found.
        max_sources: greatest number of entries with one content in one scope. Entries of greater
            depth do not count, so each depth may add as many.

    Attributes:
        num_lost: blocks that prompts would have matched if they had not been reclaimed.
        num_too_deep: tokens of the last prompt that are known, but only deeper than it may graft
            from.
    """

    def __init__(self, block_size: int, is_live: IsLive, *, max_sources: int = 4) -> None:
        for name, value in (("block_size", block_size), ("max_sources", max_sources)):
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        self.block_size = block_size
        self.max_sources = max_sources
        self._entries = EntryTable(block_size, is_live)
        self.num_lost = self.num_too_deep = 0
        # A secret root of the lookup hashes prevents constructed collisions.
        self._secret = os.urandom(32)

    def __len__(self) -> int:
        """Entries held, live and stale."""
        return len(self._entries)

    def nbytes(self) -> int:
        """Host memory of the index in bytes, including spare capacity."""
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
        depth: int | np.ndarray = 0,
        after: int = -1,
        unlimited: bool = False,
        is_whole: IsWhole | None = None,
    ) -> np.ndarray:
        """Register m consecutive blocks of one source sequence.

        Args:
            tokens: token ids, int [m * block_size].
            pages: distinct physical blocks that hold their KV, int [m].
            versions: content versions of the pages, int [m].
            source: unique identity of the sequence.
            source_start: position of the first token in the source, a multiple of block_size.
            scope: `scope_digest` of model and namespace.
            depth: of all blocks or int [m], see `Match`.
            after: entry id of the block before the first, so that runs link across calls; no link
                if it was dropped.
            unlimited: register blocks even if max_sources others hold the content, since these will
                outlive them.
            is_whole: only other entries in such pages count.

        Returns:
            Entry ids, int32 [m]: the known id if the scope already has that page in that version;
                -1 if max_sources live entries already hold the content. The depth of a known block
                never decreases.
        """
        tokens, pages, versions = (
            as_int32("tokens", tokens),
            as_int32("pages", pages),
            np.asarray(versions, np.int64),
        )
        self._check_insertion(tokens, pages, versions, source, source_start, after)
        depths = np.broadcast_to(np.asarray(depth), pages.shape)
        if len(depths) and not 0 <= depths.min() <= depths.max() <= MAX_DEPTH:
            raise ValueError(f"depth is {depth}, must be in [0, {MAX_DEPTH}]")

        blocks = tokens.reshape(-1, self.block_size)
        starts = source_start + self.block_size * np.arange(len(blocks), dtype=np.int32)
        ids = np.empty(len(blocks), np.int32)
        for at in range(0, len(blocks), _INSERT_BATCH):
            batch = slice(at, at + _INSERT_BATCH)
            columns = {
                "page": pages[batch],
                "version": versions[batch],
                "source_start": starts[batch],
            }
            columns["depth"] = depths[batch].astype(np.int16)
            limit = sys.maxsize if unlimited else self.max_sources
            ids[batch] = self._insert(blocks[batch], columns, source, scope, limit, is_whole)

        self._entries.link(np.append(np.int32(after), ids))
        return ids

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the parts of a prompt that can be grafted: disjoint matches sorted by start.

        Blocks on one diagonal (same source, same shift) form runs. The longest run claims its
        positions first (ties: earlier scope, then earlier offset, then lower entry id). Other runs
        lose whole blocks there.

        Blocks of greater depth come after all others, for the positions that are left. Depths
        beyond the first _LEVELS - 1 form one level, so that the cost does not grow with the number
        of depths. Then runs grow token by token into the neighbouring blocks of their source.
        """
        free = query.unclaimed()
        prompt = _Prompt(query, bytearray(free.tobytes()))
        found = [self._candidates(prompt, free, scope) for scope in query.scopes]
        starts, ids = (np.concatenate(parts) for parts in zip(*found, strict=True))
        ranks = np.repeat(np.arange(len(found)), [len(part) for part, _ in found])
        too_deep = self._entries.depth[ids] > query.max_depth
        hidden = starts[too_deep & (not query.require_clean_context)]
        starts, ids, ranks = starts[~too_deep], ids[~too_deep], ranks[~too_deep]
        depths = self._entries.depth[ids]
        levels, runs = np.unique(depths).tolist(), list[_Run]()
        for depth in [*levels[: _LEVELS - 1], *levels[_LEVELS - 1 :][-1:]]:
            usable = depths <= depth
            runs += self._claim(prompt, starts[usable], ids[usable], ranks[usable], depth)

        self._extend(prompt, runs, step=-1)
        self._extend(prompt, runs, step=+1)
        runs.sort(key=lambda run: run.start)
        left = np.frombuffer(prompt.unclaimed, bool)
        self.num_too_deep = (
            int((left & self._covered(hidden, query.tokens)).sum()) if len(hidden) else 0
        )
        return self._as_matches(runs)

    def discard_stale(self) -> int:
        """Drop every entry whose page has been recycled, and return how many."""
        return self._entries.discard_stale()

    @property
    def entries(self) -> EntryTable:
        """Table of entries, for other indexes, which only read it."""
        return self._entries

    def lookup_scope(self, scope: bytes) -> bytes:
        """Root of the lookup hashes of a scope, 32 bytes, secret to this index."""
        check_scope(scope)
        return hashlib.sha256(self._secret + scope).digest()

    def around(
        self, entry: int, before: int, after: int, scope: bytes, max_depth: int
    ) -> np.ndarray:
        """Return the entry with up to `before` and `after` consecutive blocks of its source on
        either side, as ids int32.

        All are live, of this scope, and of at most this depth. The result is empty if the entry
        itself is not.
        """
        entries = self._entries
        ids = np.array(
            [*entries.walk(entry, -1, before)[::-1], entry, *entries.walk(entry, +1, after)],
            np.int32,
        )
        usable = entries.live(ids) & (entries.depth[ids] <= max_depth) & entries.is_of(ids, scope)
        here = int(np.flatnonzero(ids == entry)[0])
        if not usable[here]:
            return ids[:0]
        bad = np.flatnonzero(~usable)
        return ids[bad[bad < here].max(initial=-1) + 1 : bad[bad > here].min(initial=len(ids))]

    def as_match(self, start: int, length: int, source_start: int, ids: np.ndarray) -> Match:
        """Make a match of tokens [start, start + length) of a prompt, from source_start on in a
        source.

        Args:
            ids: entries of the blocks that cover it.
        """
        pages, depth = self._entries.page[ids], int(self._entries.depth[ids].max())
        return Match(start, length, source_start, pages, depth, int(self._entries.source[ids[0]]))

    def _check_insertion(
        self,
        tokens: np.ndarray,
        pages: np.ndarray,
        versions: np.ndarray,
        source: int,
        source_start: int,
        after: int,
    ) -> None:
        size, capacity = self.block_size, self._entries.capacity
        if not len(tokens) == size * len(pages) == size * len(versions):
            given = f"{len(tokens)} tokens, {len(pages)} pages and {len(versions)} versions"
            raise ValueError(f"{given}: each page needs one version and {size} tokens")
        if len(np.unique(pages)) < len(pages):
            raise ValueError("pages repeat: a physical block holds one block of a source")
        if not -(2**63) <= source < 2**63:
            raise ValueError(f"source is {source}, must be a signed 64-bit integer")
        if source_start < 0 or source_start % size or source_start + len(tokens) >= 2**31:
            raise ValueError(
                f"source_start is {source_start}, must be a multiple of {size}, the end below 2^31"
            )
        if not -1 <= after < capacity:
            raise ValueError(f"after is {after}, must be -1 or an entry id below {capacity}")

    def _insert(
        self,
        blocks: np.ndarray,
        columns: dict[str, np.ndarray],
        source: int,
        scope: bytes,
        max_sources: int,
        is_whole: IsWhole | None,
    ) -> np.ndarray:
        entries, keys = self._entries, block_hashes(blocks, self.lookup_scope(scope))
        rows, held = entries.find(keys)
        same = (entries.tokens[held] == blocks[rows]).all(axis=1) & entries.is_of(held, scope)
        rows, held = rows[same], held[same]
        ids = np.full(len(blocks), -1, np.int32)
        known = (entries.page[held] == columns["page"][rows]) & (
            entries.version[held] == columns["version"][rows]
        )
        ids[rows[known]] = held[known]
        depths = columns["depth"]
        entries.depth[held[known]] = np.maximum(entries.depth[held[known]], depths[rows[known]])
        counts = entries.depth[held] <= depths[rows]
        if is_whole is not None:
            counts[counts] = is_whole(entries.page[held[counts]])

        num_sources = np.bincount(rows[counts], minlength=len(blocks))
        new = np.flatnonzero(ids < 0)
        new = new[np.argsort(depths[new], kind="stable")]
        contents = np.ascontiguousarray(blocks[new]).view(f"V{blocks.itemsize * self.block_size}")[
            :, 0
        ]
        new = new[
            num_sources[new] + occurrence(np.unique(contents, return_inverse=True)[1]) < max_sources
        ]
        columns = {"tokens": blocks, **columns}
        ids[new] = entries.add(
            keys[new],
            **{name: column[new] for name, column in columns.items()},
            scope=np.frombuffer(scope, np.uint64),
            source=source,
            previous=-1,
            following=-1,
        )
        return ids

    def _candidates(
        self, prompt: _Prompt, free: np.ndarray, scope: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, ids) of the live entries of a scope, of any depth, that match a fully
        free window: int64 [n], int32 [n]."""
        keys = window_hashes(prompt.query.tokens, self.block_size, self.lookup_scope(scope))
        if not len(keys):
            return np.empty(0, np.int64), np.empty(0, np.int32)

        entries, windows = self._entries, sliding_window_view(prompt.query.tokens, self.block_size)
        num_free = np.concatenate(([0], free.cumsum()))
        offsets = np.flatnonzero(
            num_free[self.block_size :] - num_free[: -self.block_size] == self.block_size
        )
        rows, ids, dropped, dead = entries.find_and_drop(keys[offsets])
        dropped = dropped[entries.depth[dead] <= prompt.query.max_depth]
        if len(dropped):
            lost = self._covered(offsets[dropped], free) & ~self._covered(offsets[rows], free)
            self.num_lost += int(lost.sum()) // self.block_size

        starts = offsets[rows]
        usable = entries.is_of(ids, scope) & (windows[starts] == entries.tokens[ids]).all(axis=1)
        if prompt.query.is_whole is not None:
            usable[usable] = prompt.query.is_whole(entries.page[ids[usable]])

        return starts[usable], ids[usable]

    def _covered(self, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Tokens that lie in block windows at these starts: bool [T]."""
        begun, ended = (
            np.bincount(at, minlength=len(tokens) + 1) for at in (starts, starts + self.block_size)
        )
        return (begun - ended).cumsum()[: len(tokens)] > 0

    def _claim(
        self, prompt: _Prompt, starts: np.ndarray, ids: np.ndarray, ranks: np.ndarray, depth: int
    ) -> list[_Run]:
        """Form runs of the candidates, of at most this depth, and claim their positions, longest
        first.

        Args:
            ranks: order of the candidates' scopes; a source has one scope.
        """
        if not len(ids):
            return []

        entries, size, unclaimed = self._entries, self.block_size, prompt.unclaimed
        source, source_start = entries.source[ids], entries.source_start[ids]
        lines = np.stack((source, source_start - starts, starts))  # [3, n]
        order = np.lexsort((ids, *lines[::-1]))
        steps = np.diff(lines[:, order])
        # entries at one place of one source differ in their ids only: the first one counts
        differs = steps.any(axis=0)
        order, steps = order[np.append(True, differs)], steps[:, differs]
        apart = (steps != [[0], [0], [size]]).any(axis=0)
        edges = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(order)]))
        candidates = np.stack((edges[:-1], edges[1:]), axis=1)
        starts, ids, ranks, source_start = (
            starts[order],
            ids[order],
            ranks[order],
            source_start[order],
        )
        may_begin = (not prompt.query.require_clean_context) | (source_start == 0)

        return [
            _Run(
                int(starts[at]),
                size * (stop - at),
                int(source_start[at]),
                ids[at:stop].tolist(),
                depth,
            )
            for at, stop in longest_first(
                starts, ids, ranks, candidates, may_begin, unclaimed, size
            )
        ]

    def _extend(self, prompt: _Prompt, runs: list[_Run], step: int) -> None:
        """Grow each run to the left (step -1) or right (+1) by less than a block, since a whole
        block would be in the run."""
        edges = np.array([run.ids[-1 if step > 0 else 0] for run in runs], np.int32)
        near = self._neighbours(prompt, runs, edges, step)
        places = np.array(
            [run.start + run.length if step > 0 else run.start - 1 for run in runs], np.int64
        )
        positions = places[:, None] + step * np.arange(self.block_size)  # [runs, block_size]
        inside = (near >= 0)[:, None] & (positions >= 0) & (positions < len(prompt.query.tokens))
        equal = inside & (
            self._entries.tokens[near, ::step]
            == prompt.query.tokens[np.where(inside, positions, 0)]
        )
        reach = np.logical_and.accumulate(equal, axis=1).sum(axis=1)

        columns = (column.tolist() for column in (places, reach, near))
        for run, place, most, entry in zip(runs, *columns, strict=True):
            count = claim(prompt.unclaimed, place, most, step) if most else 0
            if not count:
                continue
            run.length += count
            run.ids.insert(len(run.ids) if step > 0 else 0, entry)
            if step < 0:
                run.start, run.source_start = run.start - count, run.source_start - count

    def _neighbours(
        self, prompt: _Prompt, runs: list[_Run], ids: np.ndarray, step: int
    ) -> np.ndarray:
        """Live entry next to each run's edge in its source, or -1: int32 [runs].

        It must have the run's scope and at most its depth.
        """
        entries, near = self._entries, self._entries.adjacent(ids, step)
        depths = np.array([run.depth for run in runs], np.int16)
        allowed = (near >= 0) & (entries.depth[near] <= depths)
        allowed &= (entries.scope[near] == entries.scope[ids]).all(axis=1)
        if prompt.query.is_whole is not None:
            allowed[allowed] = prompt.query.is_whole(entries.page[near[allowed]])
        return np.where(allowed, near, -1)

    def _as_matches(self, runs: list[_Run]) -> list[Match]:
        """Make matches of all runs at once, like `as_match`."""
        if not runs:
            return []

        entries, ids = self._entries, np.array([i for run in runs for i in run.ids], np.int32)
        stops = np.cumsum([len(run.ids) for run in runs])
        firsts, pages = np.append(0, stops[:-1]), entries.page[ids]
        depths = np.maximum.reduceat(entries.depth[ids], firsts)
        columns = (c.tolist() for c in (firsts, stops, depths, entries.source[ids[firsts]]))
        return [
            Match(run.start, run.length, run.source_start, pages[first:stop], depth, source)
            for run, first, stop, depth, source in zip(runs, *columns, strict=True)
        ]
