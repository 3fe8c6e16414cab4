"""Beside the scheduler: what the stores of several ranks have in common, whatever each of them says
how often."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_pool import BLOCK, FULL, LOCAL, SLIDING, fill, make_pool, manager_of

from kvgraft.core.keys import chain_hashes, scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.server.tenancy import Salts, Tenant
from kvgraft.store import Chunk, ChunkRecord
from kvgraft.vllm.connector.admission import make_admission
from kvgraft.vllm.connector.metadata import StoreReport, WorkerMetadata
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.connector.store_scheduler import StoreScheduler
from kvgraft.vllm.options import Control, RequestOptions
from kvgraft.vllm.settings import KVGraftSettings

SCOPE = scope_digest("model", "namespace")
TOKENS = np.arange(3 * BLOCK)


def record() -> ChunkRecord:
    chunk = Chunk(SCOPE, "", tuple(chain_hashes(TOKENS, BLOCK, SCOPE)), TOKENS, 1, 0)
    return ChunkRecord(chunk, {"keys": ("float32", (1, len(TOKENS), 8))}, False)


def state_of(num_registered: int) -> RequestState:
    """A request that has read `TOKENS`; its first blocks are registered."""
    salt = Salts().of(Tenant.of("key"), "namespace")
    request = SimpleNamespace(cache_salt=salt, all_token_ids=TOKENS.tolist())
    state = RequestState(request, Control("list"), BlockProvenance(scope_digest("model", salt)))
    state.provenance.num_registered = num_registered
    return state


@pytest.fixture
def stored() -> StoreScheduler:
    """Of a server of two ranks."""
    settings = KVGraftSettings.parse({})
    return StoreScheduler(make_admission(manager_of(make_pool()), BLOCK, settings, 0.5), 2)


def scheduler_of(blocks: Any, specs: Sequence[Any]) -> StoreScheduler:
    """Of a server of one rank, with these groups of layers."""
    settings = KVGraftSettings.parse({})
    return StoreScheduler(make_admission(manager_of(blocks, specs), BLOCK, settings, 0.5), 1)


GROUPS = [(FULL, SLIDING), (SLIDING, FULL), (FULL, SLIDING, LOCAL)]


@pytest.mark.parametrize("specs", GROUPS, ids=str)
def test_a_block_is_stored_while_all_groups_hold_it(specs: tuple[Any, ...]):
    blocks = make_pool(20)
    stored, pages = scheduler_of(blocks, specs), {}
    for group in stored.admission.pool.groups.main, *stored.admission.pool.groups.others:
        pages[group] = fill(blocks, 3, seed=1, group=group)
    held = stored.admission.pool.num_used
    main, *_, last = pages
    blocks._maybe_evict_cached_block(blocks.blocks[pages[last][1]])
    state = state_of(num_registered=3)
    stored.keep(state, pages[main], ended=True)
    [keep] = stored.take_orders().keeps
    assert keep.blocks.tolist() == [[own[0]] for own in pages.values()]
    assert state.provenance.num_stored == 3
    stored.on_report(0, StoreReport(read=[keep.chunk.key]))
    assert stored.admission.pool.num_used == held


def test_a_request_that_has_fewer_blocks_than_were_known_stores_no_others():
    blocks = make_pool(20)
    stored = scheduler_of(blocks, (FULL,))
    pages = fill(blocks, 3, seed=1)
    stored.keep(state_of(num_registered=3), pages[:1], ended=True)
    [keep] = stored.take_orders().keeps
    assert keep.blocks.tolist() == [pages[:1]]
    stored.keep(state_of(num_registered=3), [], ended=True)
    assert not stored.take_orders().keeps


@pytest.mark.parametrize("specs", GROUPS, ids=str)
def test_stored_blocks_come_back_to_all_groups(specs: tuple[Any, ...]):
    """As far as there is room, and those that arrive."""
    blocks = make_pool(20)
    stored = scheduler_of(blocks, specs)
    pool = stored.admission.pool
    request = SimpleNamespace(all_token_ids=[9, 9, *TOKENS.tolist(), 9], block_hashes=[])
    for spare, arrived in ((2 * len(specs) + 1, [True, False]), (99, [True, True])):
        state = RequestState(
            request, RequestOptions(KVGraftSettings().default.policy), BlockProvenance(SCOPE)
        )
        # a chunk with a block that could not be read is gone
        stored.on_report(0, StoreReport(records=[record()], ready=True))
        assert stored.is_coming(state, 0, spare, grafts=True)
        [load] = stored.take_orders().loads
        assert load.blocks.shape == (len(specs), 2), "the first one stays known"
        assert pool.num_used == load.blocks.size
        stored.on_report(0, StoreReport(loaded=[(load.number, arrived)]))
        assert pool.num_used == 0
        pages = load.blocks[0].tolist()
        assert pool.complete(pages).tolist() == arrived
        assert pool.is_live(load.blocks[0], pool.versions_of(pages)).tolist() == arrived


def test_a_chunk_is_stored_when_each_rank_has_it(stored: StoreScheduler):
    for _ in range(3):
        stored.on_report(0, StoreReport(records=[record()]))
        assert len(stored) == 0
    stored.on_report(1, StoreReport(records=[record()]))
    assert len(stored) == 1


def test_blocks_are_held_until_each_rank_has_read_them(stored: StoreScheduler):
    pages = stored.admission.pool.allocate(3)
    stored._keeping[b"key"] = pages
    for _ in range(3):
        stored.on_report(1, StoreReport(read=[b"key"]))
        assert stored.num_held == stored.admission.pool.num_used == 3
    stored.on_report(0, StoreReport(read=[b"key"]))
    assert stored.num_held == stored.admission.pool.num_used == 0


def test_after_a_pause_prompts_wait_until_each_rank_has_looked_what_others_have_shared(
    stored: StoreScheduler, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr("kvgraft.vllm.connector.store_scheduler.time.monotonic", lambda: now)
    admission = make_admission(manager_of(make_pool()), BLOCK, KVGraftSettings.parse({}), 0.5)
    sharing = StoreScheduler(admission, 2, is_shared=True)

    def waits(store: StoreScheduler) -> bool:
        request = SimpleNamespace(all_token_ids=TOKENS.tolist(), block_hashes=[])
        state = RequestState(
            request, RequestOptions(KVGraftSettings().default.policy), BlockProvenance(SCOPE)
        )
        return store.is_coming(state, 0, 9, grafts=True)

    for store in (stored, sharing):
        for rank in (0, 1):
            store.on_report(rank, StoreReport(ready=True))
        assert not waits(store)
        assert not store.take_orders().look
    now += 2.0
    assert (waits(stored), waits(sharing)) == (False, True)
    assert (stored.take_orders().look, sharing.take_orders().look) == (False, True)
    for rank, still in ((0, True), (0, True), (1, False)):
        assert waits(sharing)
        sharing.on_report(rank, StoreReport(looked=True))
        assert waits(sharing) == still
    assert not sharing.take_orders().look


def test_prompts_wait_until_each_rank_has_said_what_it_holds(stored: StoreScheduler):
    request = SimpleNamespace(all_token_ids=TOKENS.tolist(), block_hashes=[])
    state = RequestState(
        request, RequestOptions(KVGraftSettings().default.policy), BlockProvenance(SCOPE)
    )
    for rank, waits in ((0, True), (0, True), (1, False)):
        stored.on_report(rank, StoreReport(ready=True))
        assert stored.is_coming(state, 0, 9, grafts=True) == waits


def test_a_load_has_arrived_where_each_rank_has_it(stored: StoreScheduler):
    for rank in (0, 1):
        stored.on_report(rank, StoreReport(records=[record()], ready=True))
    request = SimpleNamespace(all_token_ids=[9, 9, *TOKENS.tolist(), 9], block_hashes=[])
    state = RequestState(
        request, RequestOptions(KVGraftSettings().default.policy), BlockProvenance(SCOPE)
    )
    assert stored.is_coming(state, 0, 9, grafts=True)
    [load] = stored.take_orders().loads
    for _ in range(2):
        stored.on_report(0, StoreReport(loaded=[(load.number, [True, True, False])]))
        assert stored.is_coming(state, 0, 9, grafts=True)
    stored.on_report(1, StoreReport(loaded=[(load.number, [True, True, True])]))
    assert not stored.is_coming(state, 0, 9, grafts=True)
    assert stored.admission.pool.versions_of(load.blocks[0].tolist()).astype(bool).tolist() == [
        True,
        True,
        False,
    ]


def test_shared_text_comes_back_for_who_may_read_it(stored: StoreScheduler):
    """And stays what it was: nobody else's, in a load with text of the reader's own."""
    mine, own = scope_digest("model", "mine"), np.arange(500, 500 + 2 * BLOCK)
    chunk = Chunk(mine, "", tuple(chain_hashes(own, BLOCK, mine)), own, 2, 0)
    records = [record(), ChunkRecord(chunk, {"keys": ("float32", (1, len(own), 8))}, False)]
    for rank in (0, 1):
        stored.on_report(rank, StoreReport(records=records, ready=True))
    prompt = [9, 9, *own.tolist(), *TOKENS.tolist(), 9]
    request, options = (
        SimpleNamespace(all_token_ids=prompt, block_hashes=[]),
        KVGraftSettings().default,
    )
    for shared, num_blocks in (((), 2), ((scope_digest("model", "other"),), 0), ((SCOPE,), 3)):
        state = RequestState(request, options, BlockProvenance(mine), shared=shared)
        assert stored.is_coming(state, 0, 9, grafts=True) == (num_blocks > 0)
        for load in stored.take_orders().loads:
            assert load.blocks.shape == (1, num_blocks), "what has come back is not asked for again"
            for rank in (0, 1):
                stored.on_report(rank, StoreReport(loaded=[(load.number, [True] * num_blocks)]))
    tokens, free = np.array(prompt), np.ones(len(prompt), bool)
    for scope, shared, length in (
        (mine, (), 2),
        (mine, (SCOPE,), 5),
        (SCOPE, (), 3),
        (b"x" * 32, (), 0),
    ):
        matches = stored.admission.index.match(
            stored.admission.index.query(tokens, (scope, *shared), free, similar=False)
        )
        assert sum(match.length for match in matches) == length * BLOCK


def test_reports_of_one_step_keep_their_ranks():
    reports = {rank: StoreReport(read=[bytes([rank])]) for rank in range(3)}
    together = WorkerMetadata(stores={0: reports[0]})
    for rank in (1, 2):
        together = together.aggregate(WorkerMetadata(stores={rank: reports[rank]}))  # type: ignore[assignment]
    assert together.stores == reports
