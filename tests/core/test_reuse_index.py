from dataclasses import dataclass

import numpy as np
import pytest

from kvgraft.core import readings
from kvgraft.core.keys import chain_hashes, scope_digest
from kvgraft.core.matches import MAX_DEPTH, Match, MatchQuery
from kvgraft.core.pages import Pages
from kvgraft.core.provenance import NEVER, BlockProvenance
from kvgraft.core.restore import register_restored, wanted_exact, wanted_grafts
from kvgraft.core.reuse_index import ReuseIndex, wants_similar
from kvgraft.core.segmentation import Similarity
from kvgraft.kv.pages import PagePool
from kvgraft.store import Chunk, ChunkIndex, ChunkRecord

SIZE = 4
SCOPE, OTHER = scope_digest("m", "a"), scope_digest("m", "b")
TOKENS = np.arange(100, 100 + 8 * SIZE)


def registered(
    index: ReuseIndex, provenance: BlockProvenance, num_blocks: int, pages: np.ndarray | None = None
) -> np.ndarray:
    if pages is None:
        pages = np.array(index.pool.allocate(8))
    index.register(
        provenance,
        TOKENS[: num_blocks * SIZE],
        pages[:num_blocks],
        provenance.depths(num_blocks, SIZE),
    )
    return pages


def known(index: ReuseIndex, scope: bytes = SCOPE) -> list[tuple[int, int, int]]:
    free = np.ones(len(TOKENS), bool)
    return [
        (m.start, m.length, m.depth)
        for m in index.match(index.query(TOKENS, (scope,), free, similar=False))
    ]


def test_the_native_pool_satisfies_the_protocol():
    pool: Pages = PagePool(4, SIZE)
    assert pool.num_free == 4


def test_what_a_request_registers_is_found_in_its_namespace_only():
    index = ReuseIndex(PagePool(16, SIZE))
    provenance = BlockProvenance(SCOPE)
    registered(index, provenance, 8)
    assert known(index) == [(0, 8 * SIZE, 0)]
    assert known(index, OTHER) == []
    assert (provenance.num_registered, provenance.num_entries) == (8, 8)


def test_blocks_behind_a_graft_are_registered_up_to_the_greatest_depth():
    for max_depth in (0, 1):
        index = ReuseIndex(PagePool(16, SIZE), max_depth=max_depth)
        provenance = BlockProvenance(SCOPE, first_approximate=3 * SIZE + 1)
        pages = registered(index, provenance, 2)
        registered(index, provenance, 8, pages)
        if max_depth:
            assert known(index) == [(0, 3 * SIZE, 0), (3 * SIZE, 5 * SIZE, 1)]
            assert provenance.approximate_pages == set(pages[3:].tolist())
        else:
            assert known(index) == [(0, 3 * SIZE, 0)]
            assert provenance.approximate_pages == set()
        assert provenance.num_registered == 8


def test_readings_are_remembered_as_long_as_their_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readings, "LEAST_SOURCES", 4)
    index, tokens = ReuseIndex(PagePool(17, SIZE)), iter(np.arange(10**6).reshape(-1, SIZE))
    old = BlockProvenance(SCOPE)
    held = np.array(index.pool.allocate(1))
    old.mark_approximate([(0, 1)], [(old.source - 1, 0, SIZE, 0)])
    index.register(old, next(tokens), held, old.depths(1, SIZE))
    for _ in range(200):
        provenance, pages = BlockProvenance(SCOPE), index.pool.allocate(2)
        provenance.mark_approximate([(0, 1)], [(old.source, 0, 2 * SIZE, 0)])
        text = np.concatenate([next(tokens), next(tokens)])
        index.register(provenance, text, np.array(pages), provenance.depths(2, SIZE))
        index.pool.release(pages)

    assert len(index.readings) <= 2 * 17
    pair = [Match(0, SIZE, 0, held, 1, source) for source in (provenance.source, old.source)]
    first, second = index.readings.label(pair)
    assert first.reading == second.reading, "the last one was read behind the first"
    pair = [Match(0, SIZE, 0, held, 1, source) for source in (old.source, old.source - 1)]
    first, second = index.readings.label(pair)
    assert first.reading == second.reading, "the first one is still held"


def test_what_is_beyond_the_greatest_depth_is_told_from_what_is_unknown():
    index = ReuseIndex(PagePool(16, SIZE), max_depth=1)
    provenance = BlockProvenance(SCOPE)
    provenance.mark_approximate([(2 * SIZE, 1), (5 * SIZE, 2)])
    registered(index, provenance, 8)
    assert known(index) == [(0, 2 * SIZE, 0), (2 * SIZE, 3 * SIZE, 1)]
    assert index.num_too_deep == 3 * SIZE
    assert (provenance.num_entries, len(provenance.approximate_pages)) == (5, 3)
    assert known(index, OTHER) == []
    assert index.num_too_deep == 0


def test_text_beyond_the_greatest_depth_takes_no_place_among_near_duplicates():
    """A prompt resembles most what was asked last."""
    rng, size = np.random.default_rng(0), 32
    text = rng.integers(0, 5000, 20 * size)
    prompt = text.copy()
    prompt[::30] = rng.integers(0, 5000, len(text[::30]))  # no whole block is left as it was
    index = ReuseIndex(
        PagePool(512, size), max_depth=0, similarity=Similarity(tau=0.3, candidates=1)
    )
    for read, first_approximate in ((text, NEVER), *[(prompt, 0)] * 4):
        provenance = BlockProvenance(SCOPE, first_approximate=first_approximate)
        pages = np.array(index.pool.allocate(20))
        index.register(provenance, read, pages, provenance.depths(20, size))
    matches = index.match(index.query(prompt, (SCOPE,), np.ones(len(prompt), bool), similar=True))
    assert sum(match.length for match in matches) > 300
    assert {match.depth for match in matches} == {0}


def test_any_depth_is_a_source_by_default_and_many_are_registered_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    index, insertions = ReuseIndex(PagePool(16, SIZE)), []
    insert = index.segments.insert
    monkeypatch.setattr(
        index.segments, "insert", lambda *a, **k: insertions.append(1) or insert(*a, **k)
    )
    provenance = BlockProvenance(SCOPE)
    provenance.mark_approximate((block * SIZE, 1000 * block) for block in range(1, 8))
    provenance.mark_approximate([(7 * SIZE, 10**6)])
    registered(index, provenance, 8)
    assert len(insertions) == 1
    assert known(index) == [
        *((block * SIZE, SIZE, 1000 * block) for block in range(7)),
        (7 * SIZE, SIZE, MAX_DEPTH),
    ]
    assert provenance.depth == MAX_DEPTH, "nothing is deeper"
    assert index.num_too_deep == 0


def test_parts_are_one_run_and_a_restart_registers_again():
    index = ReuseIndex(PagePool(32, SIZE))
    provenance = BlockProvenance(SCOPE)
    pages = registered(index, provenance, 3)
    registered(index, provenance, 8, pages)
    assert known(index) == [(0, 8 * SIZE, 0)]
    provenance.restart()
    assert (provenance.num_registered, provenance.last_entry) == (0, -1)
    registered(index, provenance, 8)
    assert provenance.num_entries == 16


def test_sources_have_numbers_of_their_own():
    assert len({BlockProvenance(SCOPE).source for _ in range(50)}) == 50


def test_exact_hits_behind_a_graft_are_exact():
    provenance = BlockProvenance(SCOPE, first_approximate=SIZE)
    assert provenance.depths(4, SIZE).tolist() == [0, 1, 1, 1]
    hits = np.array([False, False, True, False, True])
    assert provenance.depths(4, SIZE, hits).tolist() == [0, 1, 0, 1]
    assert BlockProvenance(SCOPE).first_approximate == NEVER


def test_chunks_hold_exact_blocks_and_are_cut_once():
    provenance = BlockProvenance(SCOPE, source=7)
    is_exact = np.array([True, True, True, False, True, True])
    found = list(provenance.chunks(TOKENS[: 6 * SIZE], is_exact, "a", 1000, 4))
    chains = chain_hashes(TOKENS[: 6 * SIZE], SIZE, SCOPE)
    assert [where for _, where in found] == [slice(0, 3), slice(4, 6)]
    for chunk, where in found:
        assert (chunk.source, chunk.source_start, chunk.namespace) == (
            1007,
            where.start * SIZE,
            "a",
        )
        assert chunk.chains == tuple(chains[where])
        assert chunk.tokens.tolist() == TOKENS[where.start * SIZE : where.stop * SIZE].tolist()
    assert list(provenance.chunks(TOKENS[: 6 * SIZE], is_exact, "a", 1000, 4)) == []
    [(rest, where)] = provenance.chunks(TOKENS, np.array([*is_exact, True, True]), "a", 1000, 4)
    assert (where, rest.source_start) == (slice(6, 8), 6 * SIZE)


@dataclass
class Block:
    tokens: np.ndarray
    source: int
    source_start: int
    scope: bytes = SCOPE


def register_with(num_blocks: int) -> ChunkIndex:
    register = ChunkIndex(SIZE, 8)
    tokens = TOKENS[: num_blocks * SIZE]
    chunk = Chunk(SCOPE, "a", tuple(chain_hashes(tokens, SIZE, SCOPE)), tokens, 1, 0)
    register.add(ChunkRecord(chunk, {"keys": ("float32", (1, len(tokens), 1))}, int8=False))
    return register


def test_exact_blocks_are_wanted_as_far_as_the_host_can_use_them():
    register, chains = register_with(5), chain_hashes(TOKENS, SIZE, SCOPE)
    assert list(wanted_exact(register, chains, range(8), SCOPE, contiguous=True).values()) == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert list(wanted_exact(register, chains, [1, 4, 7], SCOPE, contiguous=False).values()) == [
        1,
        4,
    ]
    gap = [chains[0], b"x" * 32, chains[2]]
    assert list(wanted_exact(register, gap, range(3), SCOPE, contiguous=True).values()) == [0]
    assert list(wanted_exact(register, gap, range(3), SCOPE, contiguous=False).values()) == [0, 2]
    assert wanted_exact(register, chains, range(8), OTHER, contiguous=False) == {}


def test_grafts_are_wanted_longest_run_first_and_only_where_nothing_is_known():
    register = register_with(6)
    prompt = np.concatenate((TOKENS[SIZE : 2 * SIZE], [5], TOKENS[2 * SIZE : 6 * SIZE]))
    free = np.ones(len(prompt), bool)
    wanted = wanted_grafts(register, MatchQuery(prompt, (SCOPE,), free))
    assert [number % 8 for number in wanted] == [2, 3, 4, 5, 1]
    assert wanted_grafts(register, MatchQuery(prompt, (OTHER,), free)) == []
    free[SIZE:] = False
    wanted = wanted_grafts(register, MatchQuery(prompt, (SCOPE,), free))
    assert [number % 8 for number in wanted] == [1]


def test_what_came_back_is_found_again_unless_it_is_known_often_enough():
    index = ReuseIndex(PagePool(64, SIZE))
    blocks = [Block(TOKENS[at * SIZE : (at + 1) * SIZE], 9, at * SIZE) for at in (2, 0, 1)]
    assert register_restored(index, blocks, index.pool.allocate(3)) == [True] * 3
    assert known(index) == [(0, 3 * SIZE, 0)]
    for source in range(10, 14):
        for block in blocks:
            block.source = source
        found = register_restored(index, blocks, index.pool.allocate(3))
    assert found == [False] * 3


def test_what_came_back_together_stays_apart_by_scope():
    index = ReuseIndex(PagePool(64, SIZE))
    blocks = [
        Block(TOKENS[at * SIZE : (at + 1) * SIZE], 9, at * SIZE, OTHER if at else SCOPE)
        for at in range(3)
    ]
    assert register_restored(index, blocks, index.pool.allocate(3)) == [True] * 3
    assert known(index) == [(0, SIZE, 0)]
    assert known(index, OTHER) == [(SIZE, 2 * SIZE, 0)]


@pytest.mark.parametrize(
    ("match", "offered", "wanted"),
    [
        (None, True, True),
        ("similar", True, True),
        ("exact", True, False),
        (None, False, False),
        ("exact", False, False),
    ],
)
def test_who_gets_near_duplicates(match: str | None, offered: bool, wanted: bool):
    assert wants_similar(match, offered=offered, how="ask for it") is wanted


def test_what_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="only identical text is known here, start it so"):
        wants_similar("similar", offered=False, how="start it so")
    with pytest.raises(ValueError, match="match must be one of exact, similar, got 'fuzzy'"):
        wants_similar("fuzzy", offered=True, how="")
