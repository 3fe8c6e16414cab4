"""How much of a pool copies may take: page for page what is asked for when it has just been
reclaimed."""

import numpy as np
import pytest

from kvgraft.core.retention import GraftedBlockRetention
from kvgraft.kv.pages import PagePool


@pytest.fixture
def pool() -> PagePool:
    return PagePool(10, 4)


def keep(pool: PagePool, count: int) -> list[int]:
    """Pages with content that nobody holds any more."""
    pages = pool.allocate(count)
    for page in pages:
        pool.publish(page, page.to_bytes(2) + pool.versions[page].tobytes())
    pool.release(pages)
    return pages


def live(pool: PagePool, pages: list[int]) -> list[bool]:
    return [pool.lookup(page.to_bytes(2) + pool.versions[page].tobytes()) == page for page in pages]


def test_all_may_stay_until_other_text_is_missed(pool: PagePool):
    copies, pages = GraftedBlockRetention(pool), keep(pool, 6)
    copies.add(pages, np.ones(6, bool))
    copies.trim()
    assert live(pool, pages) == [True] * 6
    copies.learn(0, 1)
    assert copies.budget == 4, "twice the loss, since nothing of the other kind has been lost"
    copies.trim()
    assert live(pool, pages) == [True] * 4 + [False] * 2, "the last ones of a request go first"
    assert sorted(pool.allocate(2)) == sorted(pages[4:]), (
        "and are reclaimed before pages that were never used"
    )
    copies.learn(0, 0)
    assert copies.budget == 4
    copies.learn(3, 0)
    assert copies.budget == 10
    copies.learn(0, 100)
    assert copies.budget == 0


def test_what_is_used_again_goes_last_and_what_is_held_stays(pool: PagePool):
    copies, first, second = GraftedBlockRetention(pool), keep(pool, 2), keep(pool, 2)
    copies.add(first, np.ones(2, bool))
    copies.add(second, np.ones(2, bool))
    copies.add(first, np.zeros(2, bool))  # by a request that went on with them
    copies.learn(0, 1)
    pool.acquire(second[:1])
    copies.trim()
    assert live(pool, [*first, *second]) == [True, True, True, False]
    pool.release(second[:1])
    copies.trim()
    assert live(pool, [*first, *second]) == [True, True, False, False]


def test_a_page_that_holds_something_else_by_now_is_no_copy(pool: PagePool):
    copies, pages = GraftedBlockRetention(pool), keep(pool, 10)
    copies.add(pages, np.ones(10, bool))
    again = keep(pool, 10)
    copies.add(again, np.zeros(10, bool))
    copies.learn(0, 100)
    copies.trim()
    assert live(pool, again) == [True] * 10
    assert len(copies) == 0
