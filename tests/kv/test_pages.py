import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.kv.pages import PagePool, PoolExhausted
from properties import examples


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_pages_are_handed_out_once_and_counted():
    pool = PagePool(4, 16)
    first, second = pool.allocate(1), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(PoolExhausted, match="1 pages asked for, 0 of 4"):
        pool.allocate(1)


def test_released_content_is_found_until_it_is_reclaimed_oldest_first():
    pool = PagePool(3, 16)
    old, new, third = pool.allocate(3)
    pool.publish(old, key(1))
    pool.publish(new, key(2))
    versions = pool.versions.copy()
    pool.release([old])
    pool.release([new])
    pool.release([third])  # no content: goes first
    assert pool.allocate(1) == [third]
    assert pool.lookup(key(1)) == old
    assert pool.allocate(1) == [old]
    assert pool.lookup(key(1)) is None
    assert pool.lookup(key(2)) == new
    assert pool.is_live(np.array([old, new]), versions[[old, new]]).tolist() == [False, True]


def test_the_tail_of_a_request_is_reclaimed_before_its_head():
    pool = PagePool(3, 16)
    pages = pool.allocate(3)
    for number, page in enumerate(pages):
        pool.publish(page, key(number))
    pool.release(pages)
    assert pool.allocate(2) == [pages[2], pages[1]]


def test_acquired_pages_are_not_reclaimed():
    pool = PagePool(2, 16)
    page, _ = pool.allocate(2)
    pool.publish(page, key(1))
    pool.release([page])
    pool.acquire([page])
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.release([page])
    assert pool.allocate(1) == [page]


def test_listeners_hear_of_every_page_that_loses_its_content():
    dropped: list[int] = []
    pool = PagePool(2, 16, on_drop=dropped.extend)
    kept, unkept = pool.allocate(2)
    pool.publish(kept, key(1))
    pool.release([kept, unkept])
    assert dropped == [unkept]
    pool.clear()
    assert dropped == [unkept, kept]
    assert pool.lookup(key(1)) is None


def test_one_page_stays_canonical_for_a_hash():
    pool = PagePool(2, 16)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    assert pool.lookup(key(1)) == first
    pool.release([second])
    pool.clear()
    assert pool.lookup(key(1)) == first


def test_releasing_too_often_is_an_error():
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(pages)


@pytest.mark.parametrize(("num_pages", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_pages: int, block_size: int):
    with pytest.raises(ValueError, match="must be positive"):
        PagePool(num_pages, block_size)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40))
def test_counts_follow_from_the_tables_whatever_happens(actions: list[tuple[int, int]]):
    pool, tables, published = PagePool(8, 16), [], 0
    for action, number in actions:
        if action == 0 and pool.num_free >= number:
            tables.append(pool.allocate(number))
        elif action == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == 2 and tables:
            pool.publish(tables[-1][0], key(published := published + 1))
        elif action == 3 and published:
            page = pool.lookup(key(published))
            if page is not None:
                pool.acquire([page])
                tables.append([page])
        pool.check(tables)


def test_check_notices_a_lost_reference():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check([])
    pool.check([pages])
