"""What a prompt goes on with: the blocks that one earlier text has left, as far as they still are
there."""

import numpy as np
import pytest

from kvgraft.core.approximate_prefix import ApproximatePrefixCache, Continued
from kvgraft.core.keys import chain_hashes, scope_digest

SIZE = 4
WAY, OTHER_WAY = "naive", "epic"


def chains(*blocks: str, namespace: str = "") -> list[bytes]:
    """Of a text whose blocks each repeat one letter."""
    tokens = np.array([ord(block) for block in blocks for _ in range(SIZE)], np.int64)
    return chain_hashes(tokens, SIZE, scope_digest("model", namespace))


@pytest.fixture
def cached() -> set[str]:
    """Keys that the host's cache has."""
    return set()


@pytest.fixture
def known(cached: set[str]) -> ApproximatePrefixCache:
    return ApproximatePrefixCache(cached.__contains__, capacity=100)


def leave(
    known: ApproximatePrefixCache,
    cached: set[str],
    text: str,
    first: int,
    keys: str,
    way: str = WAY,
) -> None:
    cached |= set(keys)
    known.add(way, chains(*text), first, list(keys), [1] * len(keys), [True] * len(keys))


def test_a_prompt_goes_on_behind_its_exact_blocks(known: ApproximatePrefixCache, cached: set[str]):
    leave(known, cached, "abcd", 1, "BCD")
    found = known.find(WAY, chains(*"abcdef"), num_exact=1)
    assert found is not None
    assert (found.first_block, found.keys, found.depths, found.stop_block) == (
        1,
        ("B", "C", "D"),
        (1, 1, 1),
        4,
    )
    assert found.steps(SIZE) == [(4, 1)]
    for prompt in ("abXd", "abXdef"):
        found = known.find(WAY, chains(*prompt), num_exact=1)
        assert found is not None
        assert found.keys == ("B",)


@pytest.mark.parametrize(
    ("prompt", "way"),
    [("xbcd", WAY), ("bcd", WAY), ("aXcd", WAY), ("abcd", OTHER_WAY), ("", WAY), ("a", WAY)],
)
def test_nothing_else_does(known: ApproximatePrefixCache, cached: set[str], prompt: str, way: str):
    leave(known, cached, "abcd", 1, "BCD")
    assert known.find(way, chains(*prompt), num_exact=1) is None
    assert known.find(WAY, chains(*"abcd", namespace="another"), num_exact=1) is None


def test_what_is_exact_is_left_alone_unless_the_other_reaches_further(
    known: ApproximatePrefixCache, cached: set[str]
):
    leave(known, cached, "abcd", 1, "BCD")
    assert known.find(WAY, chains(*"abcd"), num_exact=4) is None
    found = known.find(WAY, chains(*"abcd"), num_exact=3)
    assert found is not None
    assert (found.first_block, found.stop_block) == (1, 4)


def test_it_ends_where_a_block_is_gone_and_forgets_that_block(
    known: ApproximatePrefixCache, cached: set[str]
):
    leave(known, cached, "abcd", 1, "BCD")
    cached.discard("C")
    found = known.find(WAY, chains(*"abcd"), num_exact=1)
    assert found is not None
    assert found.keys == ("B",)
    assert (len(known), known.take_lost(), known.take_lost()) == (1, 2, 0), (
        "nobody goes on with D, either"
    )
    cached.discard("B")
    assert known.find(WAY, chains(*"abcd"), num_exact=1) is None


def test_blocks_of_two_conversations_never_alternate(
    known: ApproximatePrefixCache, cached: set[str]
):
    """Both have the same text; the second one was computed anew, when the first one had lost its
    beginning."""
    leave(known, cached, "abcd", 1, "BCD")
    cached.discard("B")
    leave(known, cached, "abc", 1, "bc")
    found = known.find(WAY, chains(*"abcd"), num_exact=1)
    assert found is not None
    assert found.keys == ("b", "c"), "D was computed behind C"


def test_conversations_part(known: ApproximatePrefixCache, cached: set[str]):
    leave(known, cached, "abc", 1, "BC")
    leave(known, cached, "abcd", 1, "BCD")
    leave(known, cached, "abce", 1, "BCE")
    for prompt, keys in (("abcd", "BCD"), ("abce", "BCE"), ("abcf", "BC")):
        found = known.find(WAY, chains(*prompt), num_exact=1)
        assert found is not None
        assert "".join(map(str, found.keys)) == keys


def test_dead_blocks_are_swept_before_there_are_too_many(cached: set[str]):
    known = ApproximatePrefixCache(cached.__contains__, capacity=4)
    for number in range(100):
        leave(
            known,
            cached,
            f"{chr(200 + number)}bcd",
            0,
            "".join(chr(1000 + 4 * number + i) for i in range(4)),
        )
        cached -= set(sorted(cached)[:-4])
        assert len(known) <= 8
    known.clear()
    assert len(known) == 0


def test_who_comes_second_with_the_same_text_leaves_nothing(
    known: ApproximatePrefixCache, cached: set[str]
):
    leave(known, cached, "abcd", 1, "BCD")
    cached |= set("xyz")
    assert known.add(WAY, chains(*"abcd"), 1, ["x", "y", "z"], [1, 1, 1], [True] * 3) == 0
    assert known.add(WAY, chains(*"abce"), 1, ["B", "C", "e"], [1, 1, 1], [False] * 3) == 3
    found = known.find(WAY, chains(*"abce"), 1)
    assert found is not None
    assert found.grafted_blocks == [1, 2], "what was grafted stays so"
    found = known.find(WAY, chains(*"abcd"), num_exact=1)
    assert found is not None
    assert found.keys == ("B", "C", "D")


def test_exact_blocks_are_not_given_up_for_a_few_tokens(
    known: ApproximatePrefixCache, cached: set[str]
):
    leave(known, cached, "abcdef", 1, "BCDEF")
    assert known.find(WAY, chains(*"abcdef"), num_exact=4, exactness_weight=1.0) is None
    found = known.find(WAY, chains(*"abcdef"), num_exact=3, exactness_weight=1.0)
    assert found is not None
    assert found.stop_block == 6
    behind = known.find(WAY, chains(*"abcdef"), num_exact=1, exactness_weight=1.0)
    assert behind is not None, "nothing exact is given up for it"


def test_steps_are_told_where_the_depth_grows():
    assert Continued(1, ("B", "C", "D", "E"), (1, 1, 3, 2), (True,) * 4).steps(SIZE) == [
        (4, 1),
        (12, 3),
    ]
