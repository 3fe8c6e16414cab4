"""What a router knows of what servers hold, and what a server says of it."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.core.fingerprints import SPACING, Fingerprints
from kvgraft.fleet.replica_contents import ReplicaContents
from kvgraft.fleet.router_view import GRACE, ROWS, RouterView, pack, unpack

VALUES = st.lists(st.integers(0, 2**64 - 1), max_size=60).map(
    lambda values: np.array(values, np.uint64)
)


def prints(*values: int) -> Fingerprints:
    return Fingerprints(
        np.arange(len(values)) * SPACING, np.array(values, np.uint64), SPACING * len(values)
    )


@given(VALUES)
def test_a_sketch_holds_the_rows(values: np.ndarray):
    assert unpack(pack(values)).tolist() == sorted({int(value) % ROWS for value in values.tolist()})


def test_a_sketch_is_small():
    values = np.random.default_rng(0).integers(0, 2**63, 3000).astype(np.uint64)
    assert len(pack(values)) < 2.2 * 3000


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"nothing of the kind",
        zlib.compress(b"abc"),
        zlib.compress(np.array([ROWS], "<u4").view(np.uint8).reshape(-1, 4).T.tobytes()),
    ],
)
def test_what_is_no_sketch_changes_nothing(bad: bytes):
    known = RouterView[str]()
    known.update("a", pack(np.array([1, 2], np.uint64)))
    with pytest.raises(ValueError, match="no sketch"):
        known.update("a", bad)
    assert known.where(np.array([1, 2, 3], np.uint64), ["a"]).tolist() == [[True, True, False]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_knows_what_was_said_and_what_was_sent_lately(data: st.DataObject):
    """Against sets, for servers that come and go."""
    clock = Clock()
    known, said, sent = (
        RouterView[int](clock),
        dict[int, set[int]](),
        dict[int, list[tuple[float, set[int]]]](),
    )
    some = st.sets(st.integers(0, 40), max_size=8)
    for _ in range(data.draw(st.integers(1, 25))):
        server, action = (
            data.draw(st.integers(0, 20)),
            data.draw(st.sampled_from(["say", "send", "remove", "wait"])),
        )
        values = data.draw(some)
        array = np.array(sorted(values), np.uint64)
        if action == "say":
            known.update(server, pack(array))
            said[server] = values
            sent[server] = [one for one in sent.get(server, []) if one[0] >= clock.now]
        elif action == "send" and server in said:
            known.sent(server, array)
            sent[server].append((clock.now + GRACE, values))
        elif action == "remove":
            known.remove_server(server)
            said.pop(server, None)
            sent.pop(server, None)
        else:
            clock.now += data.draw(st.floats(0, GRACE))
        servers = list(said)
        found = known.where(np.arange(41, dtype=np.uint64), servers)
        expected = [
            said[server].union(*(values for _, values in sent[server])) for server in servers
        ]
        assert [set(np.flatnonzero(row).tolist()) for row in found] == expected


# ---------------------------------------------------------------------------------------------------------- held text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=6, unique=True), max_size=12),
    st.integers(1, 12),
)
def test_the_last_that_fits_is_held_and_of_a_prompt_its_beginning(
    texts: list[list[int]], capacity: int
):
    held, order = ReplicaContents(capacity * SPACING), list[int]()
    for text in texts:
        held.add(prints(*text))
        order = [value for value in order if value not in text] + text[::-1]
        order = order[-capacity:]
        known, begun = held.holds(prints(*text))
        there = known & begun
        assert there.tolist() == sorted(there, reverse=True), "no hole in a beginning"
        assert there.sum() == min(len(text), capacity)
    assert len(held) == len(order)
    known, _ = held.holds(prints(*range(26)))
    assert set(np.flatnonzero(known).tolist()) == set(order)
    text, _ = held.sketches()
    assert set(unpack(text).tolist()) == set(order)


def test_sketches_change_with_what_is_held():
    held = ReplicaContents(3 * SPACING)
    empty = held.sketches()
    held.add(prints(1, 2, 3))
    first = held.sketches()
    assert held.sketches() is first != empty
    held.add(prints(4, 2))
    assert unpack(held.sketches()[0]).tolist() == [1, 2, 4]
    assert len(unpack(held.sketches()[1])) == 3, "1; 4; 4 2"
    held.resize(SPACING)
    assert unpack(held.sketches()[0]).tolist() == [4]
    held.clear()
    assert held.sketches() == empty


def test_text_in_another_place_is_held_and_no_beginning():
    held = ReplicaContents(100 * SPACING)
    held.add(prints(1, 2, 3))
    known, begun = held.holds(prints(2, 3, 9))
    assert (known.tolist(), begun.tolist()) == ([True, True, False], [False] * 3)
    _, begun = held.holds(prints(1, 2, 9))
    assert begun.tolist() == [True, True, False]


def test_hot_text_behind_many_beginnings_takes_no_more_room_than_the_pool():
    held = ReplicaContents(10 * SPACING)
    for number in range(200):
        held.add(prints(1000 + number, 1, 2))
    assert [len(unpack(sketch)) for sketch in held.sketches()] == [10, 10]
