import numpy as np
import pytest

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.refresh import (
    LEAST_TOKENS,
    LEAST_USES,
    NAMESPACES,
    Allowance,
    Refresh,
    TextToRead,
)
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.kv.pages import PagePool

SIZE = 16
SCOPE, OTHER = scope_digest("m", "a"), scope_digest("m", "b")
BLOCKS = 12
TOKENS = np.arange(1000, 1000 + BLOCKS * SIZE)
LONGEST = 10_000


@pytest.fixture
def index() -> ReuseIndex:
    return ReuseIndex(PagePool(200, SIZE))


@pytest.fixture
def refresh(index: ReuseIndex) -> Refresh:
    return Refresh(index)


def known(
    index: ReuseIndex,
    *,
    first_approximate: int = 0,
    tokens: np.ndarray = TOKENS,
    scope: bytes = SCOPE,
) -> list[int]:
    """Pages of a prompt that is approximate from this block on, and has ended."""
    provenance, count = BlockProvenance(scope), len(tokens) // SIZE
    if first_approximate < count:
        provenance.mark_approximate([(first_approximate * SIZE, 1)])
    pages = index.pool.allocate(count)
    index.register(provenance, tokens, np.array(pages), provenance.depths(count, SIZE))
    index.pool.release(pages)
    return pages


def use(
    refresh: Refresh,
    pages: list[int],
    times: int = LEAST_USES,
    scope: bytes = SCOPE,
    namespace: str = "a",
) -> None:
    for _ in range(times):
        refresh.note(scope, namespace, pages)


def chosen(
    refresh: Refresh, most_tokens: int = LONGEST, longest: int = LONGEST
) -> tuple[str, list[int]] | None:
    text = refresh.choose(most_tokens, longest)
    assert text is None or isinstance(text, TextToRead)
    return text and (text.namespace, text.tokens.tolist())


def blocks(first: int, stop: int) -> list[int]:
    return TOKENS[first * SIZE : stop * SIZE].tolist()


def test_what_is_grafted_again_and_approximate_is_chosen_whole(index: ReuseIndex, refresh: Refresh):
    pages = known(index, first_approximate=3)
    assert chosen(refresh) is None, "nobody has used it"
    use(refresh, pages[2:10])
    assert chosen(refresh) == ("a", blocks(3, 10)), (
        "block 2 is exact, those from 10 on are not used"
    )


def test_it_is_not_chosen_for_ever(index: ReuseIndex, refresh: Refresh):
    pages = known(index)
    use(refresh, pages)
    assert chosen(refresh) is not None
    assert chosen(refresh) is None
    use(refresh, pages)
    assert chosen(refresh) is not None


def test_what_is_known_exactly_is_left(index: ReuseIndex, refresh: Refresh):
    pages = known(index)
    exact = known(index, first_approximate=BLOCKS, tokens=TOKENS[: 5 * SIZE])
    use(refresh, pages)
    assert chosen(refresh) == ("a", blocks(5, BLOCKS))
    use(refresh, pages)
    index.pool.forget(exact[:1])
    assert chosen(refresh) == ("a", blocks(0, BLOCKS)), "and what lies between"
    known(index, first_approximate=BLOCKS)
    use(refresh, pages)
    assert chosen(refresh) is None


def test_exact_text_of_another_namespace_does_not_count(index: ReuseIndex, refresh: Refresh):
    pages = known(index)
    known(index, first_approximate=BLOCKS, scope=OTHER)
    use(refresh, pages)
    assert chosen(refresh) == ("a", TOKENS.tolist())


def test_a_text_is_of_the_namespace_that_it_was_read_in_whoever_uses_it(
    index: ReuseIndex, refresh: Refresh
):
    theirs = known(index, scope=OTHER)
    use(refresh, theirs)
    assert chosen(refresh) is None, "nobody has said whose it is"
    use(refresh, theirs)
    refresh.note(OTHER, "b", [])
    refresh.note(SCOPE, "a", [])
    assert chosen(refresh) == ("b", TOKENS.tolist())


def test_the_most_used_comes_first_and_then_the_next(index: ReuseIndex, refresh: Refresh):
    often, rarely = TOKENS[: 6 * SIZE], TOKENS[6 * SIZE :]
    use(refresh, known(index, tokens=rarely), 2)
    use(refresh, known(index, tokens=often), 3)
    assert [chosen(refresh), chosen(refresh)] == [("a", often.tolist()), ("a", rarely.tolist())]


def test_a_text_that_is_too_long_waits_and_one_that_fits_no_prompt_is_cut(
    index: ReuseIndex, refresh: Refresh
):
    pages = known(index)
    use(refresh, pages)
    assert chosen(refresh, most_tokens=BLOCKS * SIZE - 1) is None
    assert chosen(refresh, longest=6 * SIZE + 15) == ("a", blocks(0, 6)), "it has waited"
    assert chosen(refresh) == ("a", blocks(6, BLOCKS))


def test_pieces_are_left(index: ReuseIndex, refresh: Refresh):
    least = LEAST_TOKENS // SIZE
    pages = known(index)
    use(refresh, pages[: least - 1])
    assert chosen(refresh) is None
    use(refresh, pages[:least])
    assert chosen(refresh) == ("a", blocks(0, least))


def test_what_is_gone_is_not_chosen_and_uses_of_a_page_are_uses_of_its_content(
    index: ReuseIndex, refresh: Refresh
):
    pages = known(index)
    use(refresh, pages, 5)
    index.pool.forget(pages)
    assert chosen(refresh) is None
    again = index.pool.allocate(BLOCKS)
    assert set(again) == set(pages), "the same pages"
    index.pool.release(again)
    assert set(known(index)) == set(pages)
    assert chosen(refresh) is None, "their new content was never used"


def test_two_texts_of_one_prompt_are_two(index: ReuseIndex, refresh: Refresh):
    pages = known(index)
    use(refresh, [*pages[:4], *pages[6:]])
    assert {str(chosen(refresh)), str(chosen(refresh))} == {
        str(("a", blocks(0, 4))),
        str(("a", blocks(6, BLOCKS))),
    }


def test_namespaces_that_have_not_grafted_for_long_are_forgotten(
    index: ReuseIndex, refresh: Refresh
):
    pages = known(index)
    use(refresh, pages)
    for number in range(NAMESPACES):
        refresh.note(scope_digest("m", f"other {number}"), f"other {number}", [])
    assert chosen(refresh) is None


def test_the_allowance_is_a_share_of_what_was_brought():
    allowance = Allowance(0.1)
    assert allowance.left == 0
    allowance.num_brought += 1009
    assert allowance.left == 100
    allowance.num_read += 130
    assert allowance.left == -30
    for share in (-0.1, 1.5):
        with pytest.raises(ValueError, match="idle_refresh"):
            Allowance(share)
