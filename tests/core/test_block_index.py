from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.core import block_index as index_module
from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import scope_digest
from kvgraft.core.matches import MAX_DEPTH, Match, MatchQuery, grafted_tokens
from kvgraft.core.table import HashTable
from properties import examples

SCOPE = scope_digest("model", "tenant")
OTHER_SCOPE = scope_digest("model", "other tenant")
fixed = examples(200)


@dataclass
class Pool:
    """Physical pages with their tokens and versions, and an index over them."""

    block_size: int = 4
    max_sources: int = 4
    num_pages: int = 4096
    sources: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        self.content = np.full((self.num_pages, self.block_size), -7, np.int32)
        self.versions = np.zeros(self.num_pages, np.int64)
        self.owner = np.full(self.num_pages, -1)
        self.used = 0
        self.index = VirtualBlockIndex(self.block_size, self.is_live, max_sources=self.max_sources)

    def is_live(self, pages, versions):
        return self.versions[pages] == versions

    def add(self, tokens, source, *, source_start=0, scope=SCOPE, **options):
        """Write tokens to new pages and name the full blocks; returns (pages, entry ids)."""
        tokens = np.asarray(tokens, np.int32)
        blocks = tokens[: len(tokens) // self.block_size * self.block_size].reshape(
            -1, self.block_size
        )
        pages = self.used + np.random.default_rng(self.used).permutation(len(blocks))
        self.used += len(blocks)
        self.content[pages], self.owner[pages] = blocks, source
        self.sources[source] = np.concatenate(
            (self.sources.get(source, tokens[:0])[:source_start], tokens)
        )
        versions = self.versions[pages]
        options |= {"source": source, "source_start": source_start, "scope": scope}
        return pages, self.index.insert(blocks.reshape(-1), pages, versions, **options)

    def recycle(self, pages):
        self.versions[pages] += 1
        self.content[pages] = -7

    def check(self, prompt, matches):
        """Every match reads its own tokens, at the claimed place of one source; none overlap.
        Returns the cover."""
        covered = np.zeros(len(prompt), bool)
        for match in matches:
            span = slice(match.start, match.start + match.length)
            assert not covered[span].any()
            covered[span] = True
            (source,) = set(self.owner[match.pages])
            first, last = match.source_start, match.source_start + match.length
            assert len(match.pages) == (last - 1) // self.block_size - first // self.block_size + 1
            np.testing.assert_array_equal(
                self.content.reshape(-1)[grafted_tokens([match], self.block_size)[1]], prompt[span]
            )
            np.testing.assert_array_equal(self.sources[source][first:last], prompt[span])
        assert [match.start for match in matches] == sorted(match.start for match in matches)
        return covered


def spans(matches: list[Match]) -> list[tuple[int, int, int]]:
    return [(match.start, match.length, match.source_start) for match in matches]


def blocks_only(pool: Pool, prompt: np.ndarray, **options) -> list[Match]:
    """What matches before runs grow beyond their blocks."""
    with patch.object(VirtualBlockIndex, "_extend"):
        return pool.index.match(MatchQuery(prompt, (SCOPE,), **options))


def rng_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.int32)


@fixed
@given(st.data(), st.sampled_from([16, 32]))
def test_any_offset_matching_finds_every_aligned_block(data, block_size):
    pool = Pool(block_size)
    lengths = data.draw(st.lists(st.integers(0, 12 * block_size), min_size=1, max_size=4))
    for source, length in enumerate(lengths):
        pool.add(rng_tokens(length, seed=source), source)
    pieces, aligned = [], []
    for seed in range(data.draw(st.integers(1, 6))):
        pieces.append(rng_tokens(data.draw(st.integers(0, 2 * block_size)), seed=1000 + seed))
        tokens = pool.sources[data.draw(st.integers(0, len(lengths) - 1))]
        first = data.draw(st.integers(0, len(tokens)))
        last = data.draw(st.integers(first, len(tokens)))
        offset = sum(map(len, pieces)) - first
        full = len(tokens) // block_size * block_size
        aligned += [
            offset + at
            for at in range(0, full, block_size)
            if first <= at and at + block_size <= last
        ]
        pieces.append(tokens[first:last])
    prompt = np.concatenate(pieces)
    for matches in (blocks_only(pool, prompt), pool.index.match(MatchQuery(prompt, (SCOPE,)))):
        covered = pool.check(prompt, matches)
        for start in aligned:
            assert covered[start : start + block_size].all()
    assert pool.index.match(MatchQuery(prompt, (OTHER_SCOPE,))) == []


def greedy_reference(pool, held, prompt, free):
    """The rule written plainly: again and again, claim the longest run of free known blocks."""
    size, free, claimed = pool.block_size, free.copy(), []
    while True:
        best = None
        for source, diagonal in {(source, at - start) for source, at, _, start, _ in held}:
            line = {
                start: entry
                for s, at, entry, start, _ in held
                if s == source and at - start == diagonal
            }
            line = {
                start: entry for start, entry in line.items() if free[start : start + size].all()
            }
            for start in line:
                if start - size in line:
                    continue
                stop = start
                while stop in line:
                    stop += size
                key = (start - stop, start, line[start], diagonal)
                best = key if best is None else min(best, key)
        if best is None:
            return sorted(claimed)
        length, start, _, diagonal = best
        free[start : start - length] = False
        claimed.append((start, -length, start + diagonal))


@fixed
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_claims_equal_the_plain_greedy_rule_on_repetitive_text(data, block_size, max_sources):
    pool, held = Pool(block_size, max_sources), []
    letters = st.lists(st.integers(0, 2), max_size=24)
    prompt = np.array(data.draw(st.lists(st.integers(0, 2), max_size=40)), np.int32)
    for source in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(letters)
        pages, ids = pool.add(tokens, source)
        for block, (page, entry) in enumerate(zip(pages, ids, strict=True)):
            at = block * block_size
            for start in range(len(prompt) - block_size + 1):
                if (
                    entry >= 0
                    and prompt[start : start + block_size].tolist() == tokens[at : at + block_size]
                ):
                    held.append((source, at, int(entry), start, page))
    free = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(prompt), max_size=len(prompt))), bool
    )
    for mask in (free, np.ones(len(prompt), bool)):
        matches = blocks_only(pool, prompt, free=mask)
        pool.check(prompt, matches)
        assert spans(matches) == greedy_reference(pool, held, prompt, mask)
        grown = pool.index.match(MatchQuery(prompt, (SCOPE,), free=mask))
        covered = pool.check(prompt, grown)
        assert not covered[~mask].any()
        assert len(grown) == len(matches)
        for match in matches:
            assert covered[match.start : match.start + match.length].all()


def test_longest_run_wins_and_the_loser_keeps_its_other_blocks():
    pool = Pool()
    pool.add(range(100, 116), source=1)  # [100, 116) is 4 blocks
    pool.add(range(108, 132), source=2)  # [108, 132) is 6 blocks and shares 2 of them
    matches = pool.index.match(MatchQuery(np.arange(100, 132), (SCOPE,)))
    assert spans(matches) == [(0, 8, 0), (8, 24, 0)]
    assert pool.owner[matches[0].pages].tolist() == [1, 1]


def test_equal_runs_prefer_the_lower_entry_id():
    pool = Pool()
    for source in (1, 2, 3):
        pool.add(range(8), source)
    (match,) = pool.index.match(MatchQuery(np.arange(8), (SCOPE,)))
    assert set(pool.owner[match.pages]) == {1}


def test_a_source_held_twice_is_read_from_its_first_pages():
    pool = Pool()
    pages, _ = pool.add(range(12), source=1)
    pool.add(range(12), source=1)
    (match,) = pool.index.match(MatchQuery(np.arange(12), (SCOPE,)))
    assert match.pages.tolist() == pages.tolist()
    pool.recycle(pages[1:])
    (match,) = pool.index.match(MatchQuery(np.arange(12), (SCOPE,)))
    assert match.length == 12
    pool.check(np.arange(12), [match])


@pytest.mark.parametrize(("first", "last"), [(4, 20), (1, 23), (3, 21), (5, 12), (0, 24)])
def test_extension_reaches_the_edges_of_the_piece(first, last):
    pool = Pool()
    tokens = rng_tokens(24)
    pages, _ = pool.add(tokens, source=1)
    prompt = np.concatenate(([7, 8, 9], tokens[first:last], [7, 8]))
    (match,) = pool.index.match(MatchQuery(prompt, (SCOPE,)))
    assert spans([match]) == [(3, last - first, first)]
    assert match.pages.tolist() == pages[first // 4 : -(-last // 4)].tolist()
    pool.check(prompt, [match])
    (unextended,) = blocks_only(pool, prompt)
    assert unextended.length == last // 4 * 4 - -(-first // 4) * 4


def test_extension_needs_the_link_between_calls():
    tokens = rng_tokens(16)
    for linked in (True, False):
        pool = Pool()
        _, ids = pool.add(tokens[:8], source=1)
        pool.add(tokens[8:], source=1, source_start=8, after=int(ids[-1]) if linked else -1)
        (match,) = pool.index.match(MatchQuery(tokens[4:11], (SCOPE,)))
        assert match.length == (7 if linked else 4)


def test_runs_and_extension_stay_in_one_source():
    pool = Pool()
    _, ids = pool.add(range(8), source=1)
    pool.add(range(8, 16), source=2, source_start=8, after=int(ids[-1]))
    assert spans(pool.index.match(MatchQuery(np.arange(11), (SCOPE,)))) == [(0, 8, 0)]
    assert spans(pool.index.match(MatchQuery(np.arange(16), (SCOPE,)))) == [(0, 8, 0), (8, 8, 8)]


def test_a_gap_in_the_source_is_not_linked():
    pool = Pool()
    _, ids = pool.add(range(8), source=1)
    pool.add(range(8, 12), source=1, source_start=12, after=int(ids[-1]))
    assert spans(pool.index.match(MatchQuery(np.arange(11), (SCOPE,)))) == [(0, 8, 0)]
    assert spans(pool.index.match(MatchQuery(np.arange(12), (SCOPE,)))) == [(0, 8, 0), (8, 4, 12)]


def test_links_hold_across_insertion_batches(monkeypatch):
    monkeypatch.setattr(index_module, "_INSERT_BATCH", 3)
    pool = Pool()
    tokens = rng_tokens(10 * 4)
    _, ids = pool.add(tokens, source=1)
    assert len(set(ids.tolist())) == 10
    for first in range(1, 31):
        (match,) = pool.index.match(MatchQuery(tokens[first : first + 9], (SCOPE,)))
        assert spans([match]) == [(0, 9, first)]


def test_scopes_are_isolated_and_the_same_scope_hits():
    pool = Pool()
    tokens = rng_tokens(32)
    pool.add(tokens, source=1)
    assert pool.index.match(MatchQuery(tokens, (OTHER_SCOPE,))) == []
    assert [match.length for match in pool.index.match(MatchQuery(tokens, (SCOPE,)))] == [32]
    pool.add(tokens, source=2, scope=OTHER_SCOPE)
    for scope, owner in ((SCOPE, 1), (OTHER_SCOPE, 2)):
        (match,) = pool.index.match(MatchQuery(tokens, (scope,)))
        assert set(pool.owner[match.pages]) == {owner}


def test_one_page_may_be_named_in_two_scopes():
    pool = Pool()
    tokens = rng_tokens(8)
    pages, ids = pool.add(tokens, source=1)
    other = pool.index.insert(
        tokens, pages, pool.versions[pages], source=1, source_start=0, scope=OTHER_SCOPE
    )
    assert not set(ids) & set(other)
    assert pool.index.match(MatchQuery(tokens, (OTHER_SCOPE,)))[0].pages.tolist() == pages.tolist()


def test_extension_never_enters_another_scope_through_a_reused_id():
    pool = Pool()
    tokens = rng_tokens(8)
    pages, ids = pool.add(tokens, source=1)
    pool.recycle(pages[1:])
    assert pool.index.discard_stale() == 1
    _, reused = pool.add(tokens[4:], source=1, source_start=4, scope=OTHER_SCOPE)
    assert reused.tolist() == ids[1:].tolist()  # the link of the first entry names it again
    assert [match.length for match in pool.index.match(MatchQuery(tokens[:7], (SCOPE,)))] == [4]


def test_recycled_pages_never_match_and_are_purged():
    pool = Pool()
    tokens = rng_tokens(48)
    pages, _ = pool.add(tokens, source=1)
    pool.recycle(pages[4:6])
    assert len(pool.index) == 12
    assert spans(pool.index.match(MatchQuery(tokens, (SCOPE,)))) == [(0, 16, 0), (24, 24, 24)]
    assert len(pool.index) == 10
    pool.recycle(pages[:2])
    assert pool.index.discard_stale() == 2
    assert len(pool.index) == 8
    assert pool.index.discard_stale() == 0


def test_extension_skips_a_recycled_neighbour():
    pool = Pool()
    tokens = rng_tokens(8)
    pages, _ = pool.add(tokens, source=1)
    assert pool.index.match(MatchQuery(tokens[:7], (SCOPE,)))[0].length == 7
    pool.recycle(pages[1:])
    assert pool.index.match(MatchQuery(tokens[:7], (SCOPE,)))[0].length == 4


def test_extension_never_enters_a_dropped_entry():
    pool = Pool()
    tokens = rng_tokens(8)
    pages, _ = pool.add(tokens, source=1)
    pool.versions[pages[1]] = 1
    assert pool.index.discard_stale() == 1
    pool.versions[pages[1]] = 0
    assert pool.index.match(MatchQuery(tokens[:7], (SCOPE,)))[0].length == 4


def test_turnover_of_pages_does_not_grow_the_index():
    pool = Pool(num_pages=64)
    for turn in range(200):
        pages = np.arange(16) + 16 * (turn % 4)
        pool.recycle(pages)
        tokens = rng_tokens(64, seed=turn)
        pool.index.insert(
            tokens, pages, pool.versions[pages], source=turn, source_start=0, scope=SCOPE
        )
        assert pool.index.match(MatchQuery(tokens, (SCOPE,)))[0].length == 64
    assert 64 <= len(pool.index) <= 2 * 64
    pool.index.discard_stale()
    assert len(pool.index) == 64


def test_approximate_blocks_are_sources_only_on_request():
    pool = Pool()
    tokens = rng_tokens(24)
    _, ids = pool.add(tokens[:8], source=1)
    _, ids = pool.add(tokens[8:16], 1, source_start=8, after=int(ids[-1]), depth=1)
    pool.add(tokens[16:], 1, source_start=16, after=int(ids[-1]))
    exact = pool.index.match(MatchQuery(tokens, (SCOPE,)))
    # neither a run nor an extension enters the approximate blocks
    assert spans(exact) == [(0, 8, 0), (16, 8, 16)]
    assert {match.depth for match in exact} == {0}
    matches = pool.index.match(MatchQuery(tokens, (SCOPE,), max_depth=1))
    assert [(match.start, match.length, match.depth) for match in matches] == [
        (0, 8, 0),
        (8, 8, 1),
        (16, 8, 0),
    ]
    (edge,) = pool.index.match(MatchQuery(tokens[4:10], (SCOPE,), max_depth=1))
    assert (edge.length, edge.depth) == (4, 0), "not for a part of a block"


def test_clean_context_takes_only_what_its_source_began_with():
    pool = Pool()
    document, hostile = rng_tokens(24, seed=1), rng_tokens(8, seed=2)
    pool.add(np.concatenate([hostile, document]), source=1)
    prompt = np.concatenate([rng_tokens(5, seed=3), document])
    assert spans(pool.index.match(MatchQuery(prompt, (SCOPE,)))) == [(5, 24, 8)]
    assert pool.index.match(MatchQuery(prompt, (SCOPE,), require_clean_context=True)) == []
    pool.add(document[:16], source=2)
    assert spans(pool.index.match(MatchQuery(prompt, (SCOPE,), require_clean_context=True))) == [
        (5, 16, 0)
    ]
    # here the context stands in the prompt as well
    both = np.concatenate([rng_tokens(3, seed=4), hostile, document])
    assert spans(pool.index.match(MatchQuery(both, (SCOPE,), require_clean_context=True))) == [
        (3, 32, 0)
    ]


def test_clean_context_takes_no_piece_whose_beginning_was_lost():
    pool = Pool()
    first, second = rng_tokens(16, seed=1), rng_tokens(8, seed=2)
    pool.add(np.concatenate([first, second[:4]]), source=1)
    pool.add(np.concatenate([first[12:], second]), source=2)
    prompt = np.concatenate([first, second])
    assert spans(pool.index.match(MatchQuery(prompt, (SCOPE,)))) == [(0, 20, 0), (20, 4, 8)]
    assert spans(pool.index.match(MatchQuery(prompt, (SCOPE,), require_clean_context=True))) == [
        (0, 20, 0)
    ]


def test_approximate_blocks_never_keep_an_exact_one_out():
    pool = Pool(max_sources=2)
    for source in range(3):
        pool.add(range(4), source, depth=1)
    assert pool.index.match(MatchQuery(np.arange(4), (SCOPE,))) == []
    _, ids = pool.add(range(4), source=9)
    assert ids[0] >= 0
    assert pool.owner[pool.index.match(MatchQuery(np.arange(4), (SCOPE,)))[0].pages].tolist() == [9]
    assert pool.add(range(4), source=10, depth=1)[1].tolist() == [-1]


def test_a_page_known_again_keeps_its_id_and_the_greater_depth():
    pool = Pool()
    tokens = rng_tokens(8)
    pages, ids = pool.add(tokens, source=1)
    again = {"source": 1, "source_start": 0, "scope": SCOPE}
    for depth in (0, 1, 0):
        same = pool.index.insert(tokens, pages, pool.versions[pages], depth=depth, **again)
        assert same.tolist() == ids.tolist()
    assert len(pool.index) == 2
    assert pool.index.match(MatchQuery(tokens, (SCOPE,))) == []
    assert pool.index.match(MatchQuery(tokens, (SCOPE,), max_depth=1))[0].length == 8


def test_a_page_under_a_new_version_is_another_entry():
    index = VirtualBlockIndex(4, lambda pages, versions: np.ones(len(pages), bool))
    options = {"source": 1, "source_start": 0, "scope": SCOPE}
    assert [
        int(index.insert(np.arange(4), [0], [version], **options)[0]) for version in (0, 1, 0)
    ] == [0, 1, 0]


def test_max_sources_bounds_live_entries_of_one_content():
    pool = Pool(max_sources=3)
    pages = []
    for source in range(5):
        page, ids = pool.add(range(4), source)
        pages.append(page)
        assert (ids[0] >= 0) == (source < 3)
    pool.recycle(pages[0])
    assert pool.add(range(4), source=7)[1][0] >= 0  # a stale entry holds no place
    assert pool.add([5, 6, 7, 8] * 6, source=8)[1].tolist()[3:] == [-1] * 3
    assert pool.add(range(4), source=9, scope=OTHER_SCOPE)[1][0] >= 0


def test_rolling_hash_collisions_change_nothing(monkeypatch):
    def build_and_match():
        pool = Pool(max_sources=2)
        pool.add(rng_tokens(80), source=2, scope=OTHER_SCOPE)
        pool.add(rng_tokens(80), source=1)
        pool.add(rng_tokens(40, seed=1), source=3)
        prompt = np.concatenate((rng_tokens(40, seed=1)[3:], [1, 2, 3], rng_tokens(80)[5:70]))
        matches = pool.index.match(MatchQuery(prompt, (SCOPE,)))
        pool.check(prompt, matches)
        return spans(matches), [set(pool.owner[match.pages]) for match in matches]

    expected = build_and_match()
    assert expected == ([(0, 37, 3), (40, 65, 5)], [{3}, {1}])
    monkeypatch.setattr(
        index_module, "block_hashes", lambda blocks, scope: np.zeros(len(blocks), np.uint64)
    )
    monkeypatch.setattr(
        index_module,
        "window_hashes",
        lambda tokens, size, scope: np.zeros(max(len(tokens) - size + 1, 0), np.uint64),
    )
    assert build_and_match() == expected


@pytest.mark.parametrize("period", [1, 3, 16, 20])
def test_degenerate_repetition_is_matched_in_full(period):
    pool = Pool(block_size=16)
    tokens = np.resize(np.arange(period, dtype=np.int32), 4096)
    _, ids = pool.add(tokens, source=1)
    assert (ids >= 0).sum() == 4 * period // np.gcd(period, 16)
    covered = pool.check(tokens, pool.index.match(MatchQuery(tokens, (SCOPE,))))
    assert covered.all()


def test_free_mask_limits_blocks_and_extension():
    pool = Pool()
    tokens = rng_tokens(24)
    pool.add(tokens, source=1)
    free = np.ones(24, bool)
    free[[1, 10, 21]] = False
    before = free.copy()
    matches = pool.index.match(MatchQuery(tokens, (SCOPE,), free=free))
    assert spans(matches) == [(2, 8, 2), (11, 10, 11)]
    np.testing.assert_array_equal(free, before)
    assert pool.index.match(MatchQuery(tokens, (SCOPE,), free=np.zeros(24, bool))) == []


@pytest.mark.parametrize("length", [0, 3])
def test_prompts_without_a_window_and_an_empty_index(length):
    pool = Pool()
    assert pool.index.match(MatchQuery(np.arange(40), (SCOPE,))) == []
    pool.add(range(8), source=1)
    assert pool.index.match(MatchQuery(np.arange(length), (SCOPE,))) == []
    assert pool.add([], source=2)[1].tolist() == []


def test_memory_stays_below_200_bytes_per_block():
    pool = Pool(block_size=16, num_pages=40_000)
    for source in range(50):
        pool.add(rng_tokens(800 * 16, seed=source), source)
        assert len(pool.index) == 800 * (source + 1)
        assert 137 * len(pool.index) < pool.index.nbytes() <= 200 * len(pool.index)


def insertion(**changes):
    good = {"tokens": np.arange(8), "pages": [0, 1], "versions": [0, 0]}
    return good | {"source": 1, "source_start": 0, "scope": SCOPE} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(7)}, "7 tokens, 2 pages and 2 versions"),
        ({"pages": [0, 1, 2]}, "3 pages"),
        ({"versions": [0]}, "1 versions"),
        ({"tokens": np.arange(8) - 1}, "tokens must be integers"),
        ({"pages": [0, -1]}, "pages must be integers"),
        ({"pages": [3, 3]}, "pages repeat"),
        ({"source_start": 2}, "source_start is 2"),
        ({"source_start": -4}, "source_start is -4"),
        ({"source_start": 2**31 - 4}, "source_start is 2147483644"),
        ({"source": 2**63}, "source is 9223372036854775808"),
        ({"after": 99}, "after is 99"),
        ({"depth": -1}, r"depth is -1, must be in \[0, 16384\]"),
        ({"scope": b"tenant"}, "scope has 6 bytes"),
    ],
)
def test_invalid_insertions_are_refused_and_leave_no_entry(changes, message):
    pool = Pool()
    with pytest.raises(ValueError, match=message):
        pool.index.insert(**insertion(**changes))
    assert len(pool.index) == 0
    assert pool.index.insert(**insertion()).tolist() == [0, 1]


def test_invalid_queries_and_settings_are_refused():
    pool = Pool()
    with pytest.raises(ValueError, match="free is"):
        pool.index.match(MatchQuery(np.arange(8), (SCOPE,), free=np.ones(7, bool)))
    with pytest.raises(ValueError, match="free is"):
        pool.index.match(MatchQuery(np.arange(8), (SCOPE,), free=np.ones(8)))
    with pytest.raises(ValueError, match="scope has"):
        pool.index.match(MatchQuery(np.arange(8), (b"tenant",)))
    with pytest.raises(ValueError, match="block_size is 0"):
        VirtualBlockIndex(0, pool.is_live)
    with pytest.raises(ValueError, match="max_sources is 0"):
        VirtualBlockIndex(4, pool.is_live, max_sources=0)


@fixed
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 60)), max_size=30))
def test_hash_table_equals_a_dict_through_growth_and_removal(operations):
    table, oracle, rng, next_id = HashTable(), {}, np.random.default_rng(0), 0
    table.grow(30 * 40)
    for adds, count, num_keys in operations:
        if adds:
            ids = np.arange(next_id, next_id + count, dtype=np.int32)
            keys = rng.integers(0, num_keys, count, dtype=np.uint64) << np.uint64(
                rng.integers(0, 50)
            )
            next_id += count
            table.insert(keys, ids)
            oracle |= dict(zip(ids.tolist(), keys.tolist(), strict=True))
        else:
            ids = rng.permutation(np.array(list(oracle), np.int32))[:count]
            table.remove(ids)
            for entry in ids.tolist():
                del oracle[entry]
        assert len(table) == len(oracle)
    keys = np.unique(np.array([*oracle.values(), 2**63], np.uint64))
    rows, ids = table.find(keys)
    assert sorted(zip(ids.tolist(), keys[rows].tolist(), strict=True)) == sorted(oracle.items())


def test_hash_table_refuses_to_remove_what_it_does_not_hold():
    table = HashTable()
    table.grow(4)
    table.insert(np.array([5, 5], np.uint64), np.array([0, 1], np.int32))
    table.remove(np.array([0], np.int32))
    with pytest.raises(KeyError, match="id 0"):
        table.remove(np.array([0], np.int32))
    assert table.find(np.array([5], np.uint64))[1].tolist() == [1]


def test_blocks_of_a_lesser_depth_come_first_however_short_their_runs_are():
    pool = Pool()
    tokens = rng_tokens(24)
    pool.add(tokens, source=1, depth=2)
    pool.add(tokens[4:12], source=2)
    pool.add(tokens[8:20], source=3, depth=1)
    assert spans(pool.index.match(MatchQuery(tokens, (SCOPE,)))) == [(4, 8, 0)]
    matches = pool.index.match(MatchQuery(tokens, (SCOPE,), max_depth=1))
    assert [(match.start, match.length, match.depth) for match in matches] == [
        (4, 8, 0),
        (12, 8, 1),
    ]
    matches = pool.index.match(MatchQuery(tokens, (SCOPE,), max_depth=2))
    assert [(m.start, m.length, m.depth) for m in matches] == [
        (0, 4, 2),
        (4, 8, 0),
        (12, 8, 1),
        (20, 4, 2),
    ]


def test_prompts_cost_as_much_however_many_depths_there_are():
    pool, text = Pool(), rng_tokens(4 * 300)
    pool.add(text, source=1, depth=np.arange(300))
    with patch.object(pool.index, "_claim", wraps=pool.index._claim) as claims:
        matches = pool.index.match(MatchQuery(text, (SCOPE,), max_depth=MAX_DEPTH))
    assert claims.call_count == 8
    assert [(match.start, match.depth) for match in matches] == [
        *((4 * depth, depth) for depth in range(7)),
        (28, 299),
    ]
    assert pool.check(text, matches).all()


def test_blocks_of_one_insertion_have_depths_of_their_own():
    pool, text = Pool(max_sources=1), rng_tokens(4)
    _, ids = pool.add(np.tile(text, 3), source=1, depth=np.array([2, 0, 1]))
    assert (ids >= 0).tolist() == [False, True, False], (
        "a lesser depth is not kept out by a greater one"
    )
    pool.add(text, source=2, depth=MAX_DEPTH)
    assert pool.index.match(MatchQuery(text, (SCOPE,)))[0].depth == 0
    with pytest.raises(ValueError, match="depth is"):
        pool.add(text, source=3, depth=np.array([MAX_DEPTH + 1]))


def test_text_that_is_known_too_deep_only_is_counted_and_not_lost():
    pool, text = Pool(), rng_tokens(24)
    deep, _ = pool.add(text[:16], source=1, depth=3)
    pool.add(text[8:12], source=2)
    for max_depth, hidden in ((0, 12), (2, 12), (3, 0), (MAX_DEPTH, 0), (10 * MAX_DEPTH, 0)):
        covered = pool.check(
            text, pool.index.match(MatchQuery(text, (SCOPE,), max_depth=max_depth))
        )
        assert pool.index.num_too_deep == hidden == 16 - covered.sum()
    pool.index.match(MatchQuery(text[16:], (SCOPE,)))
    assert pool.index.num_too_deep == 0, "it is of the last prompt"
    pool.index.match(MatchQuery(text, (OTHER_SCOPE,)))
    assert pool.index.num_too_deep == 0
    pool.index.match(MatchQuery(text, (SCOPE,), free=np.arange(24) >= 12))
    assert pool.index.num_too_deep == 4
    pool.recycle(deep)
    pool.index.match(MatchQuery(text, (SCOPE,)))
    assert (pool.index.num_too_deep, pool.index.num_lost) == (0, 0), "nobody would have had it"


def test_text_that_has_been_reclaimed_is_lost_once_however_many_blocks_held_it():
    pool, text = Pool(), rng_tokens(24)
    first, _ = pool.add(text, 0)  # blocks at offsets 0, 4, ...
    second, _ = pool.add(text[1:], 1)  # at 1, 5, ...: known in another alignment
    third, _ = pool.add(text[2:14], 2)
    pool.recycle(first)
    pool.recycle(second)
    assert pool.index.match(MatchQuery(text, (SCOPE,)))[0].start == 2
    assert pool.index.num_lost == (24 - 12) // 4, "what the third one still holds is not lost"
    pool.recycle(third)
    assert pool.index.match(MatchQuery(text, (SCOPE,))) == []
    assert pool.index.num_lost == 3 + 12 // 4
    assert pool.index.match(MatchQuery(text, (SCOPE,))) == []
    assert pool.index.num_lost == 6, "what nobody knows any more cannot be lost again"


def test_what_has_lost_a_part_of_its_kv_is_no_source_and_keeps_nobody_out():
    pool, text = Pool(max_sources=1), rng_tokens(16)
    first, _ = pool.add(text, 0)

    def is_whole(pages: np.ndarray) -> np.ndarray:
        return ~np.isin(pages, first[1:3])

    assert pool.index.match(MatchQuery(text, (SCOPE,)))[0].length == 16
    assert spans(pool.index.match(MatchQuery(text[:14], (SCOPE,), is_whole=is_whole))) == [
        (0, 4, 0)
    ], "nor is a part of its block"
    assert spans(pool.index.match(MatchQuery(text, (SCOPE,), is_whole=is_whole))) == [
        (0, 4, 0),
        (12, 4, 12),
    ]
    _, ids = pool.add(text, 1, is_whole=is_whole)
    assert (ids >= 0).tolist() == [False, True, True, False]
    assert spans(pool.index.match(MatchQuery(text, (SCOPE,), is_whole=is_whole))) == [
        (0, 4, 0),
        (4, 8, 4),
        (12, 4, 12),
    ]
