"""Virtual and pinned blocks in vLLM's own block pool: what is live, who holds what, and nothing is
ever lost."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvgraft.core.pins import PinnedDocuments
from kvgraft.vllm.groups import NULL_PAGE, CacheGroups
from kvgraft.vllm.heads.spec import SinkWindowSpec
from kvgraft.vllm.pool import SharedPool
from properties import examples

BLOCK, NUM_PAGES = 4, 9
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)
LOCAL = SinkWindowSpec(**SHAPE, sliding_window=2 * BLOCK, sinks=1)


def make_pool(num_pages: int = NUM_PAGES) -> BlockPool:
    """vLLM's pool of so many pages and the null block."""
    if not hasattr(kv_cache_utils, "NONE_HASH"):  # an engine in this process may have its own
        kv_cache_utils.init_none_hash(sha256)
    return BlockPool(num_gpu_blocks=num_pages + 1, enable_caching=True, hash_block_size=BLOCK)


def manager_of(pool: BlockPool, specs: Sequence[Any] = (FULL,), **more: Any) -> Any:
    """What our code needs of vLLM's KV cache manager, with one group of layers for each of these
    specs, and more."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = SimpleNamespace(kv_cache_groups=groups)
    coordinator = SimpleNamespace(single_type_managers=[None] * len(specs))
    return SimpleNamespace(block_pool=pool, kv_cache_config=config, coordinator=coordinator, **more)


def fill(pool: BlockPool, num_pages: int, seed: int, group: int = 0) -> list[int]:
    """As vLLM does for a request: allocate, compute, and register by hash; the caller holds the
    pages."""
    tokens = [1000 * seed + i for i in range(BLOCK * num_pages)]
    request = Request(str(seed), tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher())
    blocks: list[kv_cache_utils.KVCacheBlock] = pool.get_new_blocks(num_pages)
    pool.cache_full_blocks(
        request=request,
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=num_pages,
        block_size=BLOCK,
        kv_cache_group_id=group,
    )
    return [block.block_id for block in blocks]


def hasher() -> Any:
    return kv_cache_utils.get_request_block_hasher(BLOCK, sha256)


def free(pool: BlockPool, pages: Sequence[int]) -> None:
    pool.free_blocks([pool.blocks[page] for page in reversed(pages)])


@pytest.fixture
def blocks() -> BlockPool:
    return make_pool()


@pytest.fixture
def pool(blocks: BlockPool) -> SharedPool:
    return SharedPool(blocks, BLOCK, CacheGroups(blocks, [], [FULL], BLOCK))


def test_the_null_block_is_no_page(pool: SharedPool):
    assert (pool.num_pages, pool.num_free, pool.num_used) == (NUM_PAGES, NUM_PAGES, 0)
    assert len(pool.hit_counts) == NUM_PAGES + 1
    assert pool.hit_counts.dtype == np.int64


def test_pages_have_versions_as_soon_as_vllm_knows_their_content(
    pool: SharedPool, blocks: BlockPool
):
    fresh = [block.block_id for block in blocks.get_new_blocks(2)]
    assert pool.versions_of(fresh).tolist() == [0, 0]
    known = fill(blocks, 3, seed=1)
    versions = pool.versions_of(known)
    assert versions.dtype == np.int64
    assert len({*versions.tolist(), 0}) == 4
    assert pool.is_live(np.array(known), versions).all()
    assert not pool.is_live(np.array(fresh), pool.versions_of(fresh)).any()
    assert not pool.is_live(np.array(known), versions + 1).any()


def test_equal_content_has_equal_versions_wherever_it_lies(pool: SharedPool, blocks: BlockPool):
    assert (
        pool.versions_of(fill(blocks, 2, seed=1)).tolist()
        == pool.versions_of(fill(blocks, 2, seed=1)).tolist()
    )


def test_free_pages_stay_live_until_vllm_reclaims_them(pool: SharedPool, blocks: BlockPool):
    known = fill(blocks, 3, seed=1)
    versions = pool.versions_of(known)
    free(blocks, known)
    assert pool.num_used == 0
    assert pool.is_live(np.array(known), versions).all()
    blocks.get_new_blocks(NUM_PAGES - 3)
    assert pool.is_live(np.array(known), versions).all(), "pages without content go first"
    [reclaimed] = blocks.get_new_blocks(1)
    assert reclaimed.block_id == known[-1], "of a text its end goes first"
    assert pool.is_live(np.array(known), versions).tolist() == [True, True, False]


def test_new_content_in_an_old_page_is_another_version(pool: SharedPool, blocks: BlockPool):
    old = fill(blocks, NUM_PAGES, seed=1)
    versions = pool.versions_of(old)
    free(blocks, old)
    assert sorted(fill(blocks, NUM_PAGES, seed=2)) == sorted(old)
    assert not pool.is_live(np.array(old), versions).any()
    assert pool.versions_of(old).all()


def test_a_reset_ends_every_version(pool: SharedPool, blocks: BlockPool):
    known = fill(blocks, 3, seed=1)
    versions = pool.versions_of(known)
    free(blocks, known)
    assert blocks.reset_prefix_cache()
    assert pool.versions_of(known).tolist() == [0, 0, 0]
    assert not pool.is_live(np.array(known), versions).any()


def test_held_pages_are_never_reclaimed(pool: SharedPool, blocks: BlockPool):
    known = fill(blocks, 3, seed=1)
    versions = pool.versions_of(known)
    free(blocks, known)
    pool.acquire(known[:2])
    assert [pool.ref_count(page) for page in known] == [1, 1, 0]
    assert (pool.num_used, pool.num_free) == (2, NUM_PAGES - 2)
    taken = blocks.get_new_blocks(NUM_PAGES - 2)
    assert not {block.block_id for block in taken} & set(known[:2])
    assert pool.is_live(np.array(known), versions).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="free blocks"):
        blocks.get_new_blocks(1)
    pool.release(known[:2])
    assert pool.num_free == 2
    assert pool.is_live(np.array(known[:2]), versions[:2]).all()


def test_holding_twice_needs_letting_go_twice(pool: SharedPool, blocks: BlockPool):
    known = fill(blocks, 2, seed=1)
    pool.acquire(known)
    free(blocks, known)
    assert pool.num_used == 2
    pool.acquire(known)
    pool.release(known)
    assert [pool.ref_count(page) for page in known] == [1, 1]
    pool.release(known)
    assert pool.num_used == 0


def test_released_text_is_reclaimed_from_its_end(pool: SharedPool, blocks: BlockPool):
    known = fill(blocks, NUM_PAGES, seed=1)
    pool.acquire(known)
    free(blocks, known)
    pool.release(known)
    order = [blocks.get_new_blocks(1)[0].block_id for _ in known]
    assert order == known[::-1]


class Conservation(RuleBasedStateMachine):
    """Requests of vLLM and holders of ours share the pages in any order; the counts always add
    up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_pool()
        self.pool = SharedPool(self.blocks, BLOCK, CacheGroups(self.blocks, [], [FULL], BLOCK))
        self.requests: list[list[int]] = []
        self.held: list[list[int]] = []
        # what is held, and its versions then
        self.promised: list[tuple[list[int], np.ndarray]] = []
        self.seed = 0

    @rule(num_pages=st.integers(1, 4))
    def request(self, num_pages: int) -> None:
        if num_pages <= self.pool.num_free:
            self.seed += 1
            self.requests.append(fill(self.blocks, num_pages, self.seed))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def end_request(self, which: int) -> None:
        free(self.blocks, self.requests.pop(which % len(self.requests)))

    @rule(pages=st.sets(st.integers(1, NUM_PAGES), min_size=1, max_size=4))
    def hold(self, pages: set[int]) -> None:
        live = [page for page in sorted(pages) if self.pool.versions_of([page])[0]]
        if live:
            self.pool.acquire(live)
            self.held.append(live)
            self.promised.append((live, self.pool.versions_of(live)))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        index = which % len(self.held)
        self.pool.release(self.held.pop(index))
        self.promised.pop(index)

    @invariant()
    def references_are_those_of_the_living(self) -> None:
        living = Counter(page for pages in [*self.requests, *self.held] for page in pages)
        assert {p: self.pool.ref_count(p) for p in range(1, NUM_PAGES + 1)} == {
            page: living[page] for page in range(1, NUM_PAGES + 1)
        }
        assert self.pool.num_used == len(living)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_pages

    @invariant()
    def what_is_held_stays_what_it_was(self) -> None:
        for pages, versions in self.promised:
            assert self.pool.is_live(np.array(pages), versions).all()


TestConservation = Conservation.TestCase
TestConservation.settings = examples(40, stateful_step_count=30)


def test_pinned_text_survives_a_flood_and_other_text_does_not(pool: SharedPool, blocks: BlockPool):
    pinned, kept, other = PinnedDocuments(pool), fill(blocks, 3, seed=1), fill(blocks, 3, seed=2)
    versions = {page: int(pool.versions_of([page])[0]) for page in (*kept, *other)}
    pinned.insert("manual", "ours", kept)
    free(blocks, kept)
    free(blocks, other)
    for seed in range(3, 9):
        free(blocks, fill(blocks, 6, seed))
    assert pool.is_live(np.array(kept), np.array([versions[page] for page in kept])).all()
    assert not pool.is_live(np.array(other), np.array([versions[page] for page in other])).any()
    pinned.delete("manual", "ours")
    assert pool.num_used == 0


def test_capacity_is_a_share_of_the_pages_without_the_null_block(
    pool: SharedPool, blocks: BlockPool
):
    pinned, pages = PinnedDocuments(pool, capacity=4 / NUM_PAGES), fill(blocks, 5, seed=1)
    with pytest.raises(
        ValueError, match="'big' needs 5 pinned pages, but 0 of at most 4 are taken"
    ):
        pinned.insert("big", "ours", pages)
    assert [pool.ref_count(page) for page in pages] == [1] * 5
    pinned.insert("fits", "ours", pages[:4])
    assert [pool.ref_count(page) for page in pages] == [2, 2, 2, 2, 1]


def test_shedding_gives_up_what_was_least_grafted_from_and_only_ones_own(
    pool: SharedPool, blocks: BlockPool
):
    pinned, mine, theirs = (
        PinnedDocuments(pool, watermark=6 / NUM_PAGES, capacity=1.0),
        fill(blocks, 4, 1),
        fill(blocks, 3, 2),
    )
    pinned.insert("mine", "a", mine)
    pinned.insert("theirs", "b", theirs)
    free(blocks, mine)
    free(blocks, theirs)
    pool.hit_counts[[mine[0], mine[3]]] += 1
    assert pool.num_used == 7
    assert pinned.shed("a", num_needed=1) == 2
    [entry] = pinned.list("a")
    assert (entry.pages, entry.num_shed) == ((mine[0], mine[3]), 2)
    assert pinned.list("b")[0].pages == tuple(theirs)
    assert pinned.shed("a", num_needed=NUM_PAGES) == 2
    assert (pinned.list("a"), pool.num_used) == ([], 3)
    assert pinned.shed("a", num_needed=NUM_PAGES) == 0


def test_what_is_spared_is_not_shed(pool: SharedPool, blocks: BlockPool):
    pinned, pages = (
        PinnedDocuments(pool, watermark=1 / NUM_PAGES, capacity=1.0),
        fill(blocks, 4, seed=1),
    )
    pinned.insert("mine", "a", pages)
    free(blocks, pages)
    assert pinned.shed("a", NUM_PAGES, spare=pages[1:3]) == 2
    assert [entry.pages for entry in pinned.list("a")] == [tuple(pages[1:3])]


def test_pages_are_found_by_their_hashes(pool: SharedPool, blocks: BlockPool):
    tokens = [1000 + i for i in range(3 * BLOCK)]
    request = Request("1", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher())
    known = fill(blocks, 3, seed=1)
    assert pool.find(request.block_hashes) == known
    pool.forget(known[1:])
    assert pool.find(request.block_hashes) == known[:1]


def test_what_is_forgotten_is_reclaimed_first_unless_somebody_holds_it(
    pool: SharedPool, blocks: BlockPool
):
    known, held = fill(blocks, 3, seed=1), fill(blocks, 1, seed=2)
    free(blocks, known)
    pool.forget([known[0], *held])
    assert pool.versions_of([*known, *held]).astype(bool).tolist() == [False, True, True, False]
    assert [pool.ref_count(page) for page in (known[0], held[0])] == [0, 1]
    assert blocks.get_new_blocks(1)[0].block_id == known[0]


def test_hashes_are_forgotten_but_for_pages_that_are_kept_or_held(
    pool: SharedPool, blocks: BlockPool
):
    tokens = [1000 + i for i in range(5 * BLOCK)]
    hashes = Request(
        "1", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher()
    ).block_hashes
    known = fill(blocks, 5, seed=1)
    pool.acquire(known[:1])
    free(blocks, known[3:])
    pool.forget_hashes(hashes, own=known[:2], keep=known[4:])
    assert pool.find(hashes) == [known[0], known[2], known[4]], "held by another; not its own; kept"


def test_what_a_request_still_holds_is_not_counted_as_room(pool: SharedPool, blocks: BlockPool):
    pinned, pages = PinnedDocuments(pool), fill(blocks, 3, seed=1)
    pinned.insert("manual", "a", pages)
    assert pinned.num_sheddable("a") == 0
    free(blocks, pages)
    assert pinned.num_sheddable("a") == 3
    pinned.insert("copy", "b", pages)
    assert pinned.num_sheddable("a") == 0


@pytest.mark.parametrize(("spec", "lives"), [(LOCAL, True), (SLIDING, False), (FULL, False)])
def test_only_what_local_heads_have_lost_can_be_done_without(
    blocks: BlockPool, spec: Any, lives: bool
):
    pool = SharedPool(blocks, BLOCK, CacheGroups(blocks, [], [FULL, spec], BLOCK))
    pages, others = fill(blocks, 3, seed=1), fill(blocks, 3, seed=1, group=1)
    versions = pool.versions_of(pages)
    assert pool.is_live(np.array(pages), versions).all()
    blocks.evict_blocks({others[1]})
    assert pool.complete(pages).tolist() == [True, False, True]
    assert pool.is_live(np.array(pages), versions).tolist() == [True, lives, True]
    if lives:
        pool.acquire(pages)
        assert [pool.by_group(page) for page in pages] == list(
            zip(pages, [others[0], NULL_PAGE, others[2]], strict=True)
        )
        assert pool.held(pages[1]) == [pages[1]]
        pool.release(pages)
    pool.forget(pages)
    assert not pool.complete(pages).any()
    assert not any(blocks.blocks[page].block_hash for page in (*pages, *others))
    assert blocks.null_block.ref_cnt == 0


def test_who_held_a_page_without_its_counterpart_leaves_it_to_who_found_one(blocks: BlockPool):
    pool = SharedPool(blocks, BLOCK, CacheGroups(blocks, [], [FULL, LOCAL], BLOCK))
    [page] = fill(blocks, 1, seed=1)
    pool.acquire([page])
    [counterpart] = fill(blocks, 1, seed=1, group=1)  # the text has been read again
    pool.acquire([page])
    free(blocks, [page, counterpart])
    assert pool.by_group(page) == (page, counterpart)
    pool.release([page])
    assert [pool.ref_count(held) for held in (page, counterpart)] == [1, 1]
    pool.release([page])
    assert pool.num_used == 0
