"""Beside the scheduler: what lies in the tiers below vLLM's blocks, what goes there, and what is brought back."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.segments.keys import chain_hashes
from kvgraft.segments.store import Chunk, Record, Register, consecutive
from kvgraft.vllm.compat import nonce_hash
from kvgraft.vllm.connector.known import KnownText
from kvgraft.vllm.connector.metadata import CHUNK_BLOCKS, Keep, Load, StoreOrders, StoreReport
from kvgraft.vllm.connector.tracked import Tracked


class StoredText:
    """The scheduler's view of the workers' stores. It may lag behind them: what is gone is a miss, and then forgotten.

    Args:
        known: what is in vLLM's blocks; what comes back becomes known there.
    """

    def __init__(self, known: KnownText, num_ranks: int) -> None:
        self.known = known
        self._register = Register(known.block_size, CHUNK_BLOCKS, *known.cuts)
        self._first_source = int.from_bytes(os.urandom(7))  # so that sources of two servers differ
        self._num_ranks = num_ranks
        self._num_ready = 0  # ranks that have said what their stores hold
        self._done: Counter[bytes] = Counter()  # ranks that have done a thing
        self._orders = StoreOrders()
        self._keeping: dict[bytes, list[int]] = {}  # blocks that are held until they have been read
        self._loading: dict[int, tuple[Load, list[_Coming], np.ndarray]] = {}
        self._num_loads = 0

    def __len__(self) -> int:
        """Chunks that are stored."""
        return len(self._register)

    def keep(self, tracked: Tracked, blocks: Sequence[int], *, ended: bool) -> None:
        """Have the exact blocks of a request stored, as far as they are named: by chunks, the rest when it ends."""
        size, first = self.known.block_size, tracked.num_stored
        stop = min(tracked.num_offered, tracked.first_approximate // size)
        stop = stop if ended else stop // CHUNK_BLOCKS * CHUNK_BLOCKS
        if stop <= first:
            return
        tokens = np.array(tracked.request.all_token_ids[: stop * size], np.int64)
        chains = chain_hashes(tokens, size, tracked.scope)
        for begin in range(first, stop, CHUNK_BLOCKS):
            where = slice(begin, min(begin + CHUNK_BLOCKS, stop))
            part = tokens[where.start * size : where.stop * size]
            source = self._first_source + tracked.source
            chunk = Chunk(tracked.scope, tracked.label, tuple(chains[where]), part, source, begin * size)
            if chunk.key not in self._register and chunk.key not in self._keeping:
                self._keeping[chunk.key] = list(blocks[where])
                self.known.pool.acquire(self._keeping[chunk.key])
                self._orders.keeps.append(Keep(chunk, np.array(blocks[where])))
        tracked.num_stored = stop

    def is_coming(self, tracked: Tracked, num_prefix: int, num_spare: int, *, grafts: bool) -> bool:
        """Whether a prompt should wait for blocks that are being brought back; asks once, for as many as fit."""
        if tracked.load is not None:
            return tracked.load in self._loading
        if self._num_ready < self._num_ranks:
            return True
        wanted, hashes = self._wanted(tracked, num_prefix, grafts)
        found = [(number, self._register.find(number, tracked.scope)) for number in wanted[: max(num_spare, 0)]]
        coming = [_Coming(held[0], held[1], hashes.get(number)) for number, held in found if held is not None]
        tracked.load = self._num_loads = self._num_loads + 1
        if coming:
            places = [(block.record.key, block.place) for block in coming]
            load = Load(tracked.load, places, self.known.pool.allocate(len(coming)))
            self._loading[load.number] = (load, coming, np.ones(len(coming), bool))
            self._orders.loads.append(load)
        return bool(coming)

    def take_orders(self) -> StoreOrders:
        """What the workers are to do in this step."""
        orders, self._orders = self._orders, StoreOrders()
        return orders

    def on_report(self, report: StoreReport) -> None:
        """What the workers have done; it counts when all ranks have done it."""
        self._num_ready += report.ready
        for record in report.records:
            if self._is_done(b"record" + record.key):
                self._register.add(record)
        for key in report.read:
            if self._is_done(b"read" + key):
                self.known.pool.release(self._keeping.pop(key))
        for number, arrived in report.loaded:
            load, coming, everywhere = self._loading[number]
            everywhere &= np.array(arrived)
            if self._is_done(b"load" + number.to_bytes(8)):
                del self._loading[number]
                self._take_in(load, coming, everywhere.tolist())

    def forget(self) -> None:
        """Nothing that is stored now is found any more by this server."""
        self._register = Register(self.known.block_size, CHUNK_BLOCKS, *self.known.cuts)

    @property
    def num_held(self) -> int:
        """Blocks that this holds for the workers."""
        held = [*self._keeping.values(), *(load.blocks for load, *_ in self._loading.values())]
        return len({block for blocks in held for block in blocks})

    def _is_done(self, what: bytes) -> bool:
        """Note that another rank has done something; whether all have."""
        self._done[what] += 1
        if self._done[what] < self._num_ranks:
            return False
        del self._done[what]
        return True

    def _wanted(self, tracked: Tracked, num_prefix: int, grafts: bool) -> tuple[list[int], dict[int, bytes]]:
        """Stored blocks beyond what vLLM's blocks hold: exact ones first, with vLLM's hashes for them; then others."""
        size, tokens = self.known.block_size, np.array(tracked.token_ids, np.int64)
        free = np.ones(len(tokens), bool)
        free[:num_prefix] = False
        first, hashes = num_prefix // size, {}
        chains = chain_hashes(tokens[:-1], size, tracked.scope)[first:]
        for block, number in enumerate(self._register.prefix(chains, tracked.scope), first):
            if number < 0 or block >= len(tracked.request.block_hashes):
                break
            hashes[number] = tracked.request.block_hashes[block]
            free[block * size : (block + 1) * size] = False
        if not grafts:
            return list(hashes), hashes
        for match in self.known.match(tracked, tokens, free):
            free[match.start : match.start + match.length] = False
        similar, clean = self.known.matches_similar(tracked), self.known.require_clean_context
        matches = self._register.match(tokens, tracked.scope, free, clean, similar)
        grafted = [page for match in sorted(matches, key=lambda m: -m.length) for page in match.pages.tolist()]
        return list(dict.fromkeys([*hashes, *grafted])), hashes

    def _take_in(self, load: Load, coming: Sequence["_Coming"], arrived: Sequence[bool]) -> None:
        """Name what has come back; forget chunks that could not be read."""
        nonce, size = os.urandom(32), self.known.block_size
        here: list[tuple[_Coming, int]] = []
        for place, (block, page, ok) in enumerate(zip(coming, load.blocks, arrived, strict=True)):
            if ok:
                self.known.pool.name(page, nonce_hash(nonce, place) if block.block_hash is None else block.block_hash)
                here.append((block, page))
            else:
                self._register.remove(block.record.key)
        here.sort(key=lambda pair: pair[0].start)
        for run in consecutive([block.start for block, _ in here], size):
            tokens = np.concatenate([block.tokens for block, _ in here[run]])
            first, pages = here[run.start][0], [page for _, page in here[run]]
            source, start = first.start
            self.known.name(tokens, pages, source, start, first.record.chunk.scope)
        self.known.pool.release(load.blocks)


@dataclass(frozen=True)
class _Coming:
    """A block on its way: the one at `place` of a chunk; with vLLM's hash if it is an exact block of the request."""

    record: Record
    place: int
    block_hash: bytes | None

    @property
    def start(self) -> tuple[int, int]:
        """Its source, and the position of its first token there."""
        chunk = self.record.chunk
        return chunk.source, chunk.source_start + self.place * chunk.block_size

    @property
    def tokens(self) -> np.ndarray:
        """int32 [block_size]."""
        size = self.record.chunk.block_size
        return self.record.chunk.tokens[self.place * size : (self.place + 1) * size]
