"""Scheduler's view of the segment store: what to store and what to load back into vLLM's blocks."""

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.core.admission import Admission
from kvgraft.core.restore import register_restored, wanted_blocks
from kvgraft.store import ChunkIndex, ChunkRecord
from kvgraft.vllm.connector.metadata import CHUNK_BLOCKS, Keep, Load, StoreOrders, StoreReport
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.patches.requests import nonce_hash
from kvgraft.vllm.pool import SharedPool

# seconds for which news of a shared store counts as fresh
FRESH_S = 1.0


class StoreScheduler:
    """Index of what the workers' stores hold, with the orders to them.

    The index may lag behind the stores. A chunk that is gone is a miss, and is then forgotten.

    Args:
        admission: has the pool and the index, where loaded blocks are registered.
        num_ranks: number of tensor-parallel ranks, each with its own store.
        is_shared: True if other servers write to the same store. After a pause, a new prompt waits
            one step for their chunks.
    """

    def __init__(
        self, admission: Admission[SharedPool], num_ranks: int, *, is_shared: bool = False
    ) -> None:
        self.admission = admission
        self._register = self._make_index()

        # A random start keeps the source numbers of two servers apart.
        self._first_source = int.from_bytes(os.urandom(7))
        self._num_ranks = num_ranks

        # ranks that have reported what their stores hold
        self._ready: set[int] = set()

        # by event: ranks that have reported it
        self._done: defaultdict[bytes, set[int]] = defaultdict(set)
        self._orders = StoreOrders()

        # by chunk: blocks held until all ranks have read them
        self._keeping: dict[bytes, list[int]] = {}
        self._loading: dict[int, tuple[Load, list[_Coming], np.ndarray]] = {}
        self._num_loads = 0
        self._is_shared, self._looks, self._stepped_at = is_shared, False, time.monotonic()

    def __len__(self) -> int:
        """Number of stored chunks."""
        return len(self._register)

    def keep(self, state: RequestState, blocks: Sequence[int], *, ended: bool) -> None:
        """Store the exact blocks of a request, as far as they are registered.

        Args:
            ended: True to store also the last blocks, which fill no chunk.
        """
        pool, provenance = self.admission.pool, state.provenance
        size = pool.block_size
        # a request that was preempted has fewer blocks than before
        known = min(provenance.num_registered, len(blocks))
        stop = min(known, provenance.first_approximate // size)
        stop = stop if ended else stop // CHUNK_BLOCKS * CHUNK_BLOCKS
        if stop <= provenance.num_stored:
            return

        tokens = np.array(state.request.all_token_ids[: stop * size], np.int64)
        storable = provenance.depths(stop, size) == 0
        # a window may have lost its part of a block
        storable[provenance.num_stored :] &= pool.complete(blocks[provenance.num_stored : stop])
        for chunk, where in provenance.chunks(
            tokens, storable, state.label, self._first_source, CHUNK_BLOCKS
        ):
            if chunk.key not in self._register and chunk.key not in self._keeping:
                self._keeping[chunk.key] = pages = list(blocks[where])
                pool.acquire(pages)
                self._orders.keeps.append(Keep(chunk, pool.tables_of(pages)))

    def is_coming(
        self, state: RequestState, num_prefix: int, num_spare: int, *, grafts: bool
    ) -> bool:
        """Return True if a prompt should wait for blocks that are being loaded.

        The first call of a request orders the load, for as many blocks as fit.

        Args:
            num_prefix: tokens that vLLM already has.
            num_spare: pages that may be allocated for the load.
            grafts: True to load blocks to graft from too, not only the exact prefix.
        """
        if state.load is not None:
            return state.load in self._loading

        self._looks |= self._is_shared and time.monotonic() - self._stepped_at > FRESH_S
        if self._looks or len(self._ready) < self._num_ranks:
            return True

        pool = self.admission.pool
        wanted, hashes = self._wanted(state, num_prefix, grafts)
        found = [
            (number, self._register.find(number, *state.scopes))
            for number in wanted[: max(num_spare, 0) // pool.pages_of_block]
        ]
        coming = [
            _Coming(held[0], held[1], hashes.get(number))
            for number, held in found
            if held is not None
        ]

        state.load = self._num_loads = self._num_loads + 1

        if coming:
            places = [(block.record.key, block.place) for block in coming]
            load = Load(state.load, places, pool.tables_of(pool.allocate(len(coming))))
            self._loading[load.number] = (load, coming, np.ones(len(coming), bool))
            self._orders.loads.append(load)

        return bool(coming)

    def take_orders(self) -> StoreOrders:
        """Return the orders to the workers for this step."""
        orders, self._orders = self._orders, StoreOrders()
        orders.look, self._stepped_at = self._looks, time.monotonic()
        return orders

    def on_report(self, rank: int, report: StoreReport) -> None:
        """Process the report of one rank.

        An event counts when all ranks have reported it; repeated reports of one rank count once.
        """
        if report.ready:
            self._ready.add(rank)

        for record in report.records:
            if self._is_done(b"record" + record.key, rank):
                self._register.add(record)

        if report.looked and self._is_done(b"look", rank):
            self._looks = False

        for key in report.read:
            if self._is_done(b"read" + key, rank):
                self.admission.pool.release(self._keeping.pop(key))

        for number, arrived in report.loaded:
            load, coming, everywhere = self._loading[number]
            everywhere &= np.array(arrived)
            if self._is_done(b"load" + number.to_bytes(8), rank):
                del self._loading[number]
                self._take_in(load, coming, everywhere.tolist())

    def forget(self) -> None:
        """Forget all stored chunks in this server."""
        self._register = self._make_index()

    @property
    def num_held(self) -> int:
        """Number of blocks held for reads and loads of the workers."""
        loading = (load.blocks[0].tolist() for load, *_ in self._loading.values())
        held = [*self._keeping.values(), *loading]
        return len({block for blocks in held for block in blocks})

    def _make_index(self) -> ChunkIndex:
        size, cuts = self.admission.pool.block_size, self.admission.index.cuts
        return ChunkIndex(size, CHUNK_BLOCKS, *cuts)

    def _is_done(self, what: bytes, rank: int) -> bool:
        """Record that a rank has done something; return True if all ranks have."""
        self._done[what].add(rank)
        if len(self._done[what]) < self._num_ranks:
            return False
        del self._done[what]
        return True

    def _wanted(
        self, state: RequestState, num_prefix: int, grafts: bool
    ) -> tuple[list[int], dict[int, bytes]]:
        """Return the stored blocks that a prompt wants, with vLLM's hashes of the exact ones.

        Exact blocks behind vLLM's prefix come first, then blocks to graft from.
        """
        chains = state.provenance.chains(state.token_ids[:-1], self.admission.pool.block_size)
        chains = chains[: len(state.request.block_hashes)]

        # Blocks behind an approximate prefix are not exact.
        if state.continued is not None:
            chains = []

        exact, wanted = wanted_blocks(
            self._register,
            self.admission.index,
            state,
            chains,
            range(num_prefix // self.admission.pool.block_size),
            contiguous=True,
            grafts=grafts,
        )
        return wanted, {
            number: state.request.block_hashes[block] for number, block in exact.items()
        }

    def _take_in(self, load: Load, coming: Sequence["_Coming"], arrived: Sequence[bool]) -> None:
        """Register loaded blocks, and forget chunks that could not be read."""
        nonce, pool = os.urandom(32), self.admission.pool
        loaded = load.blocks[0].tolist()
        here: list[tuple[_Coming, int]] = []
        for place, (block, page, ok) in enumerate(zip(coming, loaded, arrived, strict=True)):
            if ok:
                pool.publish(
                    page, nonce_hash(nonce, place) if block.block_hash is None else block.block_hash
                )
                here.append((block, page))
            else:
                self._register.remove(block.record.key)

        if here:
            blocks, pages = zip(*here, strict=True)
            registered = register_restored(self.admission.index, blocks, pages)
            found = zip(here, registered, strict=True)
            pool.forget(
                [page for (block, page), known in found if block.block_hash is None and not known]
            )

        pool.release(loaded)


@dataclass(frozen=True)
class _Coming:
    """A stored block that is being loaded.

    Attributes:
        record: record of its chunk.
        place: number of the block within the chunk.
        block_hash: vLLM's hash if it is an exact block of the request, or None.
    """

    record: ChunkRecord
    place: int
    block_hash: bytes | None

    @property
    def scope(self) -> bytes:
        """Scope (model and namespace) of its text."""
        return self.record.chunk.scope

    @property
    def source(self) -> int:
        """Number of the token sequence that it was computed in."""
        return self.record.chunk.source

    @property
    def source_start(self) -> int:
        """Position of its first token in that sequence."""
        return self.record.chunk.source_start + self.place * self.record.chunk.block_size

    @property
    def tokens(self) -> np.ndarray:
        """Its tokens, int32 [block_size]."""
        size = self.record.chunk.block_size
        return self.record.chunk.tokens[self.place * size : (self.place + 1) * size]
