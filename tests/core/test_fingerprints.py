"""Fingerprints of text: equal wherever it stands, and nothing to those of another scope."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.core.fingerprints import FARTHEST, SPACING, WINDOW, Fingerprints
from kvgraft.core.keys import scope_digest

SCOPE, OTHER = scope_digest("model", ""), scope_digest("model", "other")
LONG = np.random.default_rng(0).integers(0, 256, 40_000).astype(np.uint8).tobytes()
TEXTS = st.builds(
    lambda start, size: LONG[start : start + size], st.integers(0, 35_000), st.integers(0, 4000)
)


@settings(max_examples=50, deadline=None)
@given(before=TEXTS, text=TEXTS, behind=TEXTS)
def test_equal_text_has_equal_fingerprints_wherever_it_stands(
    before: bytes, text: bytes, behind: bytes
):
    alone, inside = Fingerprints.of(text, SCOPE), Fingerprints.of(before + text + behind, SCOPE)
    here = (inside.places >= len(before)) & (inside.places + WINDOW <= len(before) + len(text))
    assert np.array_equal(inside.values[here], alone.values)
    assert np.array_equal(inside.places[here] - len(before), alone.places)
    assert inside.num_bytes == len(before) + len(text) + len(behind)


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_joined_texts_are_each_as_on_their_own(texts: list[bytes]):
    parts = [Fingerprints.of(text, SCOPE) for text in texts]
    joined, whole = Fingerprints.joined(parts), Fingerprints.of(b"".join(texts), SCOPE)
    assert joined.num_bytes == whole.num_bytes
    assert np.isin(joined.places, whole.places).all(), (
        "of the whole there may be more, across borders"
    )
    assert np.array_equal(joined.values, whole.values[np.isin(whole.places, joined.places)])


def test_scopes_share_none():
    one, other = Fingerprints.of(LONG, SCOPE), Fingerprints.of(LONG, OTHER)
    assert not np.isin(one.values, other.values).any()
    with pytest.raises(ValueError, match="scope has 3 bytes"):
        Fingerprints.of(LONG, b"abc")


def test_there_is_one_in_about_so_many_bytes():
    assert len(Fingerprints.of(LONG, SCOPE).values) == pytest.approx(len(LONG) / SPACING, rel=0.2)
    assert len(Fingerprints.of(LONG[: WINDOW - 1], SCOPE).values) == 0


@settings(max_examples=30, deadline=None)
@given(shared=TEXTS, one=TEXTS, other=TEXTS)
def test_a_chain_names_what_is_before(shared: bytes, one: bytes, other: bytes):
    base, a, b = (Fingerprints.of(text, SCOPE) for text in (shared, one, other))
    ab, ba = Fingerprints.joined([base, a]), Fingerprints.joined([base, b])
    count = len(base.values)
    assert np.array_equal(ab.chain()[:count], base.chain())
    same = count + sum(
        np.cumprod([x == y for x, y in zip(a.values, b.values, strict=False)]).tolist()
    )
    assert np.array_equal(np.isin(ab.chain(), ba.chain()), np.arange(len(ab.values)) < same)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.data())
def test_more_that_is_known_is_more_text(text: bytes, data: st.DataObject):
    prints = Fingerprints.of(text, SCOPE)
    count = len(prints.values)
    known = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    fewer = known & np.array(
        data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool
    )
    none, some, more, every = prints.known_bytes(
        np.array([known & False, fewer, known, known | True])
    ).tolist()
    assert 0 == none <= some <= more <= every <= len(text)


def test_neighbours_that_are_too_far_from_each_other_say_nothing_of_what_lies_between():
    prints = Fingerprints(
        np.array([0, FARTHEST, 3 * FARTHEST]), np.arange(3, dtype=np.uint64), 4 * FARTHEST
    )
    assert prints.known_bytes(np.ones(3, bool)) == FARTHEST + 2 * WINDOW


def test_text_that_repeats_itself_has_few():
    """Of a run of one letter all windows are equal: of 250 such runs the scope would choose all of
    about two."""
    runs = [bytes([first, second]) * 5000 for first in range(65, 90) for second in range(65, 75)]
    runs += [bytes([letter]) * 10_000 for letter in range(250)]
    assert sum(len(Fingerprints.of(run, SCOPE).values) for run in runs) > 0, "none is in danger"
    assert max(len(Fingerprints.of(run, SCOPE).values) for run in runs) <= 2
