"""A prompt finds text of its own scope and of those that are shared with it, and of no other."""

import numpy as np
import pytest

from kvgraft.core.keys import scope_digest
from kvgraft.core.matches import Match, MatchQuery, grafted_tokens
from kvgraft.core.segment_index import SegmentIndex
from kvgraft.core.segmentation import Similarity

SIZE = 8
OWN, WIKI, LAW, HIDDEN = (scope_digest("model", name) for name in ("own", "wiki", "law", "hidden"))


class Library:
    """Pages of many scopes under one index; a text begins at a new page."""

    def __init__(self, block_size: int = SIZE, similarity: Similarity | None = None) -> None:
        self.block_size = block_size
        self.index = SegmentIndex(block_size, lambda pages, _: self.live[pages], similarity)
        self.content = np.empty((0, block_size), np.int32)  # by page
        self.owner = np.empty(0, object)  # the scope of each page
        self.live = np.empty(0, bool)
        self.num_sources = 0

    def read(self, tokens: np.ndarray, scope: bytes) -> np.ndarray:
        """Name the full blocks of a text in a scope; returns their pages."""
        blocks = tokens[: len(tokens) // self.block_size * self.block_size].reshape(
            -1, self.block_size
        )
        pages = len(self.live) + np.arange(len(blocks))
        self.content = np.concatenate((self.content, blocks))
        self.owner = np.append(self.owner, [scope] * len(blocks))
        self.live = np.append(self.live, np.ones(len(blocks), bool))
        self.num_sources += 1
        versions = np.zeros(len(blocks), np.int64)
        self.index.insert(
            blocks.ravel(), pages, versions, source=self.num_sources, source_start=0, scope=scope
        )
        return pages

    def match(self, prompt: np.ndarray, *scopes: bytes, similar: bool = False) -> list[Match]:
        """What a prompt of the first scope finds that may read the others: each match is what it
        says it is."""
        free = np.ones(len(prompt), bool)
        matches = self.index.match(MatchQuery(prompt, scopes, free=free, similar=similar))
        for match in matches:
            span = slice(match.start, match.start + match.length)
            assert free[span].all()
            free[span] = False
            slots = grafted_tokens([match], self.block_size)[1]
            np.testing.assert_array_equal(self.content.ravel()[slots], prompt[span])
            assert {*self.owner[match.pages]} <= {*scopes}, (
                "text of a scope that is neither its own nor shared"
            )
            assert self.live[match.pages].all()
        return matches


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.int32)


def test_text_is_found_in_the_scopes_that_are_shared_and_in_no_other():
    library, text = Library(), words(64, 1)
    library.read(text, WIKI)
    assert (
        library.match(text, OWN)
        == library.match(text, OWN, LAW)
        == library.match(text, HIDDEN, OWN, LAW)
        == []
    )
    for scopes in ((WIKI,), (OWN, WIKI), (OWN, LAW, WIKI)):
        assert [(match.start, match.length) for match in library.match(text, *scopes)] == [(0, 64)]


def test_a_scope_reads_what_is_shared_with_it_and_shares_nothing():
    library, text = Library(), words(64, 1)
    library.read(text, OWN)
    assert library.match(text, OWN, WIKI)
    assert library.match(text, WIKI) == []


@pytest.mark.parametrize("first_read", [OWN, WIKI, LAW], ids=["own", "wiki", "law"])
def test_of_equally_long_text_the_own_one_is_taken_and_then_in_the_order_of_the_grants(
    first_read: bytes,
):
    library, text = Library(), words(64, 1)
    for scope in sorted((OWN, WIKI, LAW), key=lambda scope: scope != first_read):
        library.read(text, scope)
    for scopes in ((OWN, WIKI, LAW), (LAW, WIKI), (HIDDEN, WIKI, LAW), (HIDDEN, LAW, WIKI)):
        [match] = library.match(text, *scopes)
        assert {*library.owner[match.pages]} == {next(scope for scope in scopes if scope != HIDDEN)}


def test_the_longest_known_text_wins_whosever_it_is():
    library, text = Library(), words(96, 1)
    library.read(text[16:64], OWN)
    library.read(text, WIKI)
    [match] = library.match(text, OWN, WIKI)
    assert (match.length, {*library.owner[match.pages]}) == (96, {WIKI})
    library.read(text[: 5 * SIZE], LAW)
    library.live[library.owner == WIKI] = False
    [own, law] = sorted(library.match(text, OWN, WIKI, LAW), key=lambda match: match.pages[0])
    assert (own.length, law.length) == (48, 16), "the longer one first, then what it has left"


def test_a_run_grows_in_its_own_scope_only():
    """The block behind what is known in one scope is known in another one: it is a match of its
    own."""
    library, text = Library(), words(64, 1)
    library.read(text[:32], OWN)
    library.read(text[32:], WIKI)
    prompt = text[4:60]
    assert [match.length for match in library.match(prompt, OWN)] == [28]
    assert [(match.start, match.length) for match in library.match(prompt, OWN, WIKI)] == [
        (0, 28),
        (28, 28),
    ]


def test_near_duplicates_are_shared_like_identical_text():
    library, text = Library(16, Similarity()), words(640, 1)
    library.read(text, WIKI)
    edited = text.copy()
    edited[7::13] = words(len(edited[7::13]), 2)
    assert library.match(edited, OWN, WIKI) == [], "no whole block is left"
    assert library.match(edited, OWN, LAW, similar=True) == []
    found = sum(match.length for match in library.match(edited, OWN, WIKI, similar=True))
    assert found == sum(match.length for match in library.match(edited, WIKI, similar=True)) > 300
    library.read(text[:320], OWN)
    found_in = [
        library.owner[match.pages[0]] for match in library.match(edited, OWN, WIKI, similar=True)
    ]
    assert {*found_in} == {OWN, WIKI}


@pytest.mark.parametrize("scopes", [(OWN, OWN), (OWN, WIKI, WIKI)], ids=["own", "shared"])
def test_a_scope_counts_once(scopes: tuple[bytes, ...]):
    with pytest.raises(ValueError, match="a scope is given twice"):
        Library().match(words(8, 1), *scopes)


def test_no_lookup_of_many_leaves_what_is_its_own_or_shared():
    """Texts that several of many scopes have read, at different offsets; prompts made of pieces of
    them."""
    rng, library = np.random.default_rng(7), Library()
    scopes = [scope_digest("model", str(number)) for number in range(16)]
    texts = [words(rng.integers(24, 120), seed) for seed in range(60)]
    pages = [
        library.read(
            np.concatenate((words(rng.integers(0, 12), 1000 + place), texts[place])), scopes[reader]
        )
        for place in range(len(texts))
        for reader in rng.choice(len(scopes), rng.integers(1, 6), replace=False)
    ]
    num_lookups, num_tokens, num_withheld = 0, {True: 0, False: 0}, 0
    for turn in range(300):
        readable = [scopes[at] for at in rng.choice(len(scopes), rng.integers(1, 7), replace=False)]
        pieces = [words(rng.integers(0, 2 * SIZE), 5000 + turn)]
        for text in rng.choice(len(texts), 6):
            first, stop = sorted(rng.integers(0, len(texts[text]) + 1, 2))
            pieces.append(texts[text][first:stop])
        prompt = np.concatenate(pieces)
        matches = library.match(prompt, *readable)
        num_lookups += len(readable) * max(len(prompt) - SIZE + 1, 0)
        for match in matches:
            num_tokens[library.owner[match.pages[0]] == readable[0]] += match.length
        everything = [*readable, *(scope for scope in scopes if scope not in readable)]
        num_withheld += sum(match.length for match in library.match(prompt, *everything))
        num_withheld -= sum(match.length for match in matches)
        if turn % 10 == 9:
            library.live[pages.pop(int(rng.integers(len(pages))))] = False
    assert num_lookups > 100_000
    assert min(*num_tokens.values(), num_withheld) > 2000, (
        "there was something to find, and something to withhold"
    )
