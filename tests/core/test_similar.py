"""Near-duplicates: what is proposed (against datasketch), what is grafted (against the tokens), and
for whom."""

from collections.abc import Sequence

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH
from datasketch.lsh import _optimal_param

from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import scope_digest, window_hashes
from kvgraft.core.matches import Match, MatchQuery, grafted_tokens
from kvgraft.core.minhash import Permutations, bands, compact, similarity, winnow
from kvgraft.core.segmentation import Segmenter, Similarity, parse_match
from kvgraft.core.similar import SimilarIndex

BLOCK = 16
SCOPE, OTHER = scope_digest("model", "one"), scope_digest("model", "two")
WORDS = 5000


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, length).astype(np.int32)


def edit(tokens: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """A share of the tokens replaced, deleted, or followed by another."""
    rng, out = np.random.default_rng(seed), []
    for token in tokens.tolist():
        kind = rng.choice(("replace", "insert", "delete")) if rng.random() < rate else "keep"
        out += [] if kind in ("delete", "replace") else [token]
        out += [int(rng.integers(0, WORDS))] if kind in ("insert", "replace") else []
    return np.array(out, np.int32)


class Library:
    """Sources in consecutive pages, so that a page number says which tokens it holds."""

    def __init__(
        self, options: Similarity | None = None, anchors: Sequence[Sequence[int]] = ()
    ) -> None:
        self.dead: set[int] = set()
        self.blocks = VirtualBlockIndex(BLOCK, self._is_live)
        self.index = SimilarIndex(self.blocks, options, anchors)
        self.tokens = np.zeros(0, np.int32)
        self.num_sources = 0

    def _is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        return ~np.isin(pages, list(self.dead))

    def read(self, tokens: np.ndarray, scope: bytes = SCOPE, depth: int = 0, parts: int = 1) -> int:
        """Insert a source, in one or several calls; returns how many segments were added."""
        count, added, last = len(tokens) // BLOCK, 0, -1
        first_page = len(self.tokens) // BLOCK
        for part in np.array_split(np.arange(count), parts):
            where = slice(part[0] * BLOCK, (part[-1] + 1) * BLOCK)
            ids = self.blocks.insert(
                tokens[where],
                first_page + part,
                np.ones(len(part), np.int64),
                source=self.num_sources,
                source_start=int(part[0]) * BLOCK,
                scope=scope,
                depth=depth,
                after=last,
            )
            last = int(ids[-1])
            added += self.index.insert(ids, scope)
        self.tokens = np.concatenate((self.tokens, tokens[: count * BLOCK]))
        self.num_sources += 1
        return added

    def check(self, prompt: np.ndarray, matches: list[Match]) -> int:
        """Grafted tokens, after a check that they are disjoint and equal those in their pages."""
        slots = [np.arange(m.start, m.start + m.length) for m in matches]
        together = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        assert len(np.unique(together)) == len(together)
        for match in matches:
            source = self.tokens[grafted_tokens([match], BLOCK)[1]]
            np.testing.assert_array_equal(source, prompt[match.start : match.start + match.length])
        return len(together)


def test_bands_are_those_of_datasketch() -> None:
    for threshold in (0.5, 0.6, 0.7, 0.8):
        assert bands(threshold, 128) == _optimal_param(threshold, 128, 0.5, 0.5)
        assert bands(threshold, 128, 0.9) == _optimal_param(threshold, 128, 0.1, 0.9)


def test_signatures_estimate_jaccard_as_well_as_datasketch() -> None:
    ours, theirs = [], []
    for seed in range(60):
        left = text(seed, 200)
        right = edit(left, 0.002 * (seed % 30), seed + 1000)
        shingles = [window_hashes(tokens, 8, SCOPE) for tokens in (left, right)]
        exact = len(np.intersect1d(*shingles)) / len(np.union1d(*shingles))
        rows = [
            Permutations(128, seed).signatures(h, np.array([0]), np.array([len(h)]))
            for h in shingles
        ]
        ours.append(float(similarity(compact(rows[0]), compact(rows[1]))[0]) - exact)
        oracles = [MinHash(128, seed=seed + 1) for _ in shingles]
        for oracle, hashes in zip(oracles, shingles, strict=True):
            oracle.update_batch([int(value).to_bytes(8, "little") for value in hashes])
        theirs.append(oracles[0].jaccard(oracles[1]) - exact)
    assert np.sqrt(np.mean(np.square(ours))) < 1.5 * np.sqrt(np.mean(np.square(theirs))) < 0.08
    assert abs(np.mean(ours)) < 0.02


def test_signatures_of_many_segments_are_minima_of_each() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 63, 40_000, np.uint64)
    starts = np.sort(np.random.default_rng(1).integers(0, 39_000, 300))
    stops = starts + np.random.default_rng(2).integers(1, 1000, 300)
    permutations = Permutations(7)
    found = permutations.signatures(hashes, starts, stops)
    for row, start, stop in zip(found, starts, stops, strict=True):
        [alone] = permutations.signatures(
            hashes[start:stop], np.array([0]), np.array([stop - start])
        )
        np.testing.assert_array_equal(row, alone)


def test_windows_do_not_depend_on_where_text_stands() -> None:
    tokens = text(0, 600)
    alone = winnow(window_hashes(tokens, 8, SCOPE), 32)
    behind = winnow(window_hashes(np.concatenate((text(1, 77), tokens)), 8, SCOPE), 32) - 77
    assert set(alone[(alone > 40) & (alone < 500)]) == set(behind[(behind > 40) & (behind < 500)])
    assert np.diff(alone).max() <= 32
    assert len(winnow(np.zeros(0, np.uint64), 32)) == 0


@pytest.mark.parametrize("rate", [0.005, 0.01])
def test_proposals_reach_what_an_lsh_of_datasketch_proposes(rate: float) -> None:
    library = Library(Similarity(tau=0.8))
    count, rows = bands(0.8, 128, 0.9)
    oracle = MinHashLSH(num_perm=128, params=(count, rows))
    sources = [text(seed, 256) for seed in range(40)]
    for number, source in enumerate(sources):
        library.read(source)
        oracle.insert(number, minhash(source))
    edited = [edit(source, rate, 100 + number) for number, source in enumerate(sources)]
    proposed = [
        {source for _, source, _ in library.index.propose(tokens, SCOPE)} for tokens in edited
    ]
    theirs = sum(number in oracle.query(minhash(tokens)) for number, tokens in enumerate(edited))
    assert sum(number in found for number, found in enumerate(proposed)) >= theirs
    assert all(found <= {number} for number, found in enumerate(proposed))


def minhash(tokens: np.ndarray) -> MinHash:
    found = MinHash(128, seed=3)
    found.update_batch(
        [int(value).to_bytes(8, "little") for value in window_hashes(tokens, 8, SCOPE)]
    )
    return found


@pytest.mark.parametrize("rate", [0.0, 0.005, 0.01, 0.05, 0.1])
@pytest.mark.parametrize("parts", [1, 3])
def test_grafts_are_identical_tokens_and_more_than_exact_matching_finds(
    rate: float, parts: int
) -> None:
    library = Library(Similarity(tau=0.3))
    sources = [text(seed, 640) for seed in range(4)]
    for source in sources:
        library.read(source, parts=parts)
    prompt = np.concatenate(
        [edit(source, rate, 7 + number) for number, source in enumerate(sources)]
    )
    exact = library.check(prompt, library.blocks.match(MatchQuery(prompt, (SCOPE,))))
    found = library.check(prompt, library.index.match(MatchQuery(prompt, (SCOPE,))))
    assert found >= exact if rate else found == exact == len(prompt)
    if rate >= 0.05:
        assert found >= exact + 0.15 * len(prompt)


def test_moved_text_is_found() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source)
    pieces = np.split(source, [160, 330, 500])
    prompt = np.concatenate([edit(pieces[number], 0.03, number) for number in (2, 0, 3, 1)])
    assert library.check(prompt, library.index.match(MatchQuery(prompt, (SCOPE,)))) > 0.8 * len(
        prompt
    )


def test_namespaces() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source)
    prompt = edit(source, 0.05, 1)
    assert library.index.match(MatchQuery(prompt, (OTHER,))) == []
    assert library.index.propose(prompt, OTHER) == []
    assert library.check(prompt, library.index.match(MatchQuery(prompt, (SCOPE,)))) > 400
    assert library.index.propose(prompt, SCOPE)


def test_occupied_positions_are_left_alone() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source)
    prompt, free = edit(source, 0.05, 1), np.zeros(0, bool)
    free = np.arange(len(prompt)) % 100 < 60
    matches = library.index.match(MatchQuery(prompt, (SCOPE,), free=free))
    assert library.check(prompt, matches)
    assert all(free[m.start : m.start + m.length].all() for m in matches)


def test_recycled_pages_are_never_a_source() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source)
    prompt = edit(source, 0.05, 1)
    library.dead = set(range(10, 20))
    matches = library.index.match(MatchQuery(prompt, (SCOPE,)))
    assert library.check(prompt, matches)
    assert not library.dead & {page for match in matches for page in match.pages.tolist()}
    library.dead = set(range(40))
    assert library.index.match(MatchQuery(prompt, (SCOPE,))) == []
    # what is stale is dropped when it is met
    assert len(library.index) < library.read(text(1, 640)) + 40


def test_approximate_sources_are_used_only_on_request() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source, depth=1)
    prompt = edit(source, 0.05, 1)
    assert library.index.match(MatchQuery(prompt, (SCOPE,))) == []
    matches = library.index.match(MatchQuery(prompt, (SCOPE,), max_depth=1))
    assert {match.depth for match in matches} == {1}


def test_clean_context_takes_beginnings_only() -> None:
    library = Library(Similarity(tau=0.5))
    source = text(0, 640)
    library.read(source)
    prompt = np.concatenate((text(9, 50), edit(source, 0.05, 1)))
    matches = library.index.match(MatchQuery(prompt, (SCOPE,), require_clean_context=True))
    assert [match.source_start for match in matches] == [0]


def test_left_context() -> None:
    body, before = text(0, 320), text(1, 96)
    library = Library(Similarity(tau=0.6, context_tau=0.5))
    library.read(np.concatenate((before, body)))
    same, other = (np.concatenate((part, edit(body, 0.01, 4))) for part in (before, text(2, 96)))
    near = [
        where.start for where, _, _ in library.index.propose(same, SCOPE) if 90 <= where.start < 130
    ]
    assert near
    assert not [
        where.start
        for where, _, _ in library.index.propose(other, SCOPE)
        if 90 <= where.start < 130
    ]


def test_anchors_begin_segments() -> None:
    anchor = [7001, 7002]
    parts = [
        np.concatenate((anchor, text(seed, length)))
        for seed, length in enumerate((90, 10, 90, 400))
    ]
    tokens = np.concatenate(parts).astype(np.int32)
    segments = Segmenter(Similarity(window_tokens=128), [anchor, [9999] * 5]).cut(tokens, SCOPE)
    spans = set(zip(segments.starts.tolist(), segments.stops.tolist(), strict=True))
    # the second one was too short alone, the last is cut at 256
    assert {(0, 92), (92, 196), (196, 452)} <= spans


def test_segments_without_enough_wanted_tokens_are_left_out() -> None:
    tokens, wanted = text(0, 2000), np.zeros(2000, bool)
    # the second stretch is shorter than a run that is worth a graft
    wanted[700:900] = wanted[1500:1507] = True
    segmenter = Segmenter(Similarity())
    every, some = segmenter.cut(tokens, SCOPE), segmenter.cut(tokens, SCOPE, wanted)
    kept = (np.minimum(every.stops, 900) - np.maximum(every.starts, 700)) >= 8
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_array_equal(some.starts, every.starts[kept])
    np.testing.assert_array_equal(some.stops, every.stops[kept])
    np.testing.assert_array_equal(some.signatures, every.signatures[kept])


def test_text_read_again_adds_nothing_and_buckets_are_bounded() -> None:
    library = Library()
    first = library.read(text(0, 640))
    assert first > 20
    assert [library.read(text(0, 640)) for _ in range(30)][-1] == 0
    assert library.read(np.full(3200, 5, np.int32)) <= 16
    assert library.index.match(MatchQuery(np.full(500, 5, np.int32), (SCOPE,)))


def test_prompts_too_short_for_a_segment() -> None:
    library = Library()
    assert library.read(text(0, 32)) == 0
    for length in (0, 1, 7, 8, 40):
        prompt = text(0, 640)[:length]
        assert (
            library.check(prompt, library.index.match(MatchQuery(prompt, (SCOPE,))))
            == length // 32 * 32
        )


def test_options() -> None:
    assert parse_match("exact") is None
    assert parse_match("similar") == Similarity()
    assert parse_match("similar:tau=0.6,window_tokens=64") == Similarity(tau=0.6, window_tokens=64)
    for wrong in (
        "exact:tau=1",
        "close",
        "similar:tau=2",
        "similar:wide=1",
        "similar:window_tokens=3",
        "similar:min_run_tokens=0",
    ):
        with pytest.raises(ValueError, match=r"match|tau|window|min_run"):
            parse_match(wrong)


@pytest.mark.parametrize("seed", range(4))
def test_all_of_eight_chunks_are_found_after_half_a_percent_of_edits(seed: int) -> None:
    """Caches that match whole chunks of 256 tokens find none of these that was edited, nor any that
    was shifted."""
    library = Library()
    chunks = [text(100 * seed + number, 256) for number in range(8)]
    for chunk in chunks:
        library.read(chunk)
    edited = [edit(chunk, 0.005, seed + number) for number, chunk in enumerate(chunks)]
    prompt = np.concatenate([text(9, 7), *edited[::-1]])
    covered = np.zeros(len(prompt), bool)
    for match in library.index.match(MatchQuery(prompt, (SCOPE,))):
        covered[match.start : match.start + match.length] = True
    parts = np.split(covered[7:], np.cumsum([len(part) for part in edited[::-1]])[:-1])
    assert min(float(part.mean()) for part in parts) > 0.9
