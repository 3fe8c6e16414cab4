import pytest

from kvgraft.kv.pages import PagePool
from kvgraft.segments.frozen import FrozenPool


def filled(pool: PagePool, count: int) -> list[int]:
    """Pages with content and no reference."""
    pages = pool.allocate(count)
    pool.keep(pages)
    pool.release(pages)
    return pages


def test_frozen_pages_are_never_reclaimed_until_they_are_deleted():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool)
    pages = filled(pool, 2)
    frozen.insert("manual", "a", pages)
    assert [entry.name for entry in frozen.list()] == ["manual"]
    assert not set(pool.allocate(2)) & set(pages)
    assert pool.num_free == 0
    frozen.delete("manual", "a")
    assert set(pool.allocate(2)) == set(pages)


def test_a_namespace_sees_and_deletes_only_its_own():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool)
    frozen.insert("manual", "a", filled(pool, 1))
    assert frozen.list("b") == []
    with pytest.raises(KeyError, match="no frozen entry 'manual' in namespace 'b'"):
        frozen.delete("manual", "b")


def test_the_least_referenced_pages_are_shed_above_the_watermark():
    pool = PagePool(10, 16)
    frozen = FrozenPool(pool, watermark=0.9)
    pages = filled(pool, 4)
    frozen.insert("manual", "a", pages)
    pool.hit_counts[pages] = [5, 1, 3, 2]
    assert frozen.shed("a", num_needed=5) == 0  # 9 of 10 used: at the watermark
    assert frozen.shed("a", num_needed=7) == 2
    entry = frozen.list()[0]
    assert entry.pages == (pages[0], pages[2])
    assert entry.num_shed == 2


def test_pages_that_a_request_uses_as_well_do_not_count_as_freed():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool, watermark=0.5)
    pages = filled(pool, 2)
    frozen.insert("manual", "a", pages)
    pool.acquire(pages[:1])
    pool.hit_counts[pages] = [0, 9]
    assert frozen.shed("a", num_needed=1) == 2
    assert frozen.list() == []
    assert pool.num_used == 1


def test_sheddable_pages_are_those_that_nobody_else_holds():
    pool = PagePool(8, 16)
    frozen = FrozenPool(pool)
    pages = filled(pool, 3)
    frozen.insert("one", "a", pages)
    frozen.insert("two", "a", pages[:1])  # twice, but by this namespace only
    assert frozen.num_sheddable("a") == 3
    frozen.insert("three", "b", pages[1:2])
    pool.acquire(pages[2:])
    assert (frozen.num_sheddable("a"), frozen.num_sheddable("b")) == (1, 0)


def test_a_tenant_cannot_shed_what_another_froze():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool, watermark=0.5)
    frozen.insert("manual", "a", filled(pool, 2))
    assert frozen.shed("b", num_needed=4) == 0
    assert len(frozen.list("a")[0].pages) == 2


def test_the_capacity_leaves_room_for_requests():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool, capacity=0.5)
    pages = filled(pool, 4)
    frozen.insert("one", "a", pages[:2])
    with pytest.raises(ValueError, match="'two' needs 1 frozen pages, but 2 of at most 2"):
        frozen.insert("two", "b", pages[2:3])
    frozen.insert("again", "b", pages[:2])  # the same pages take no more room


def test_an_owner_takes_its_share_of_the_capacity_in_all_its_namespaces_together():
    pool = PagePool(20, 16)
    frozen = FrozenPool(pool, capacity=0.5)
    pages = filled(pool, 20)
    frozen.insert("one", "a/x", pages[:3], owner="a", quota=0.5)
    frozen.insert("two", "a/y", pages[3:5], owner="a", quota=0.5)
    for namespace in ("a/x", "a/y", "a/z"):
        with pytest.raises(ValueError, match=r"1 frozen pages, but its owner has 5 of at most 5, a share of 0\.5"):
            frozen.insert("more", namespace, pages[5:6], owner="a", quota=0.5)
    assert pool.ref_count(pages[5]) == 0
    frozen.insert("one", "a/x", pages[5:8], owner="a", quota=0.5)  # in the place of the first
    frozen.insert("one", "b", pages[8:13], owner="b", quota=0.5)
    with pytest.raises(ValueError, match="10 of at most 10 are taken"):
        frozen.insert("two", "c", pages[13:14], owner="c", quota=0.5)
    frozen.delete("two", "a/y")
    frozen.insert("again", "a/z", pages[3:5], owner="a", quota=0.5)
    pool.check([entry.pages for entry in frozen.list()])


def test_replacing_an_entry_keeps_the_pages_that_both_hold():
    pool = PagePool(4, 16)
    frozen = FrozenPool(pool)
    pages = filled(pool, 2)
    frozen.insert("manual", "a", pages)
    frozen.insert("manual", "a", pages[:1])
    pool.check([entry.pages for entry in frozen.list()])


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_shares_are_checked(share: float):
    with pytest.raises(ValueError, match="watermark must be in"):
        FrozenPool(PagePool(1, 16), watermark=share)
    with pytest.raises(ValueError, match="capacity must be in"):
        FrozenPool(PagePool(1, 16), capacity=share)


def test_nothing_cannot_be_frozen():
    with pytest.raises(ValueError, match="fills no whole block"):
        FrozenPool(PagePool(1, 16)).insert("short", "a", [])
