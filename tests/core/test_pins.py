import pytest

from kvgraft.core.pins import PinnedDocuments
from kvgraft.kv.pages import PagePool


def filled(pool: PagePool, count: int) -> list[int]:
    """Pages with content and no reference."""
    pages = pool.allocate(count)
    pool.keep(pages)
    pool.release(pages)
    return pages


def test_pinned_pages_are_never_reclaimed_until_they_are_deleted():
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool)
    pages = filled(pool, 2)
    pinned.insert("manual", "a", pages)
    assert [entry.name for entry in pinned.list()] == ["manual"]
    assert not set(pool.allocate(2)) & set(pages)
    assert pool.num_free == 0
    pinned.delete("manual", "a")
    assert set(pool.allocate(2)) == set(pages)


def test_a_namespace_sees_and_deletes_only_its_own():
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool)
    pinned.insert("manual", "a", filled(pool, 1))
    assert pinned.list("b") == []
    with pytest.raises(KeyError, match="no pinned entry 'manual' in namespace 'b'"):
        pinned.delete("manual", "b")


def test_the_least_referenced_pages_are_shed_above_the_watermark():
    pool = PagePool(10, 16)
    pinned = PinnedDocuments(pool, watermark=0.9)
    pages = filled(pool, 4)
    pinned.insert("manual", "a", pages)
    pool.hit_counts[pages] = [5, 1, 3, 2]
    assert pinned.shed("a", num_needed=5) == 0  # 9 of 10 used: at the watermark
    assert pinned.shed("a", num_needed=7) == 2
    entry = pinned.list()[0]
    assert entry.pages == (pages[0], pages[2])
    assert entry.num_shed == 2


def test_pages_that_a_request_uses_as_well_are_not_shed():
    """That would free nothing, and the next ones would have to go, too."""
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool, watermark=0.5)
    pages = filled(pool, 2)
    pinned.insert("manual", "a", pages)
    pool.acquire(pages[:1])
    pool.hit_counts[pages] = [0, 9]
    assert pinned.shed("a", num_needed=1) == 1
    assert pinned.list()[0].pages == (pages[0],)
    assert pool.num_used == 1


def test_pages_to_be_spared_are_not_shed():
    pool = PagePool(8, 16)
    pinned = PinnedDocuments(pool, watermark=0.5)
    pages = filled(pool, 3)
    pinned.insert("one", "a", pages)
    pinned.insert("two", "a", pages[1:2])  # given back by both
    pool.hit_counts[pages] = [0, 1, 2]
    assert pinned.num_sheddable("a", spare={pages[0]}) == 2
    assert pinned.shed("a", num_needed=3, spare={pages[0]}) == 2
    assert {entry.name: (entry.pages, entry.num_shed) for entry in pinned.list()} == {
        "one": ((pages[0],), 2)
    }
    pool.check([pages[:1]])


def test_sheddable_pages_are_those_that_nobody_else_holds():
    pool = PagePool(8, 16)
    pinned = PinnedDocuments(pool)
    pages = filled(pool, 3)
    pinned.insert("one", "a", pages)
    pinned.insert("two", "a", pages[:1])  # twice, but by this namespace only
    assert pinned.num_sheddable("a") == 3
    pinned.insert("three", "b", pages[1:2])
    pool.acquire(pages[2:])
    assert (pinned.num_sheddable("a"), pinned.num_sheddable("b")) == (1, 0)


def test_a_tenant_cannot_shed_what_another_pinned():
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool, watermark=0.5)
    pinned.insert("manual", "a", filled(pool, 2))
    assert pinned.shed("b", num_needed=4) == 0
    assert len(pinned.list("a")[0].pages) == 2


def test_the_capacity_leaves_room_for_requests():
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool, capacity=0.5)
    pages = filled(pool, 4)
    pinned.insert("one", "a", pages[:2])
    with pytest.raises(ValueError, match="'two' needs 1 pinned pages, but 2 of at most 2"):
        pinned.insert("two", "b", pages[2:3])
    pinned.insert("again", "b", pages[:2])  # the same pages take no more room


def test_an_owner_takes_its_share_of_the_capacity_in_all_its_namespaces_together():
    pool = PagePool(20, 16)
    pinned = PinnedDocuments(pool, capacity=0.5)
    pages = filled(pool, 20)
    pinned.insert("one", "a/x", pages[:3], owner="a", quota=0.5)
    pinned.insert("two", "a/y", pages[3:5], owner="a", quota=0.5)
    for namespace in ("a/x", "a/y", "a/z"):
        with pytest.raises(
            ValueError, match=r"1 pinned pages, but its owner has 5 of at most 5, a share of 0\.5"
        ):
            pinned.insert("more", namespace, pages[5:6], owner="a", quota=0.5)
    assert pool.ref_count(pages[5]) == 0
    pinned.insert("one", "a/x", pages[5:8], owner="a", quota=0.5)  # in the place of the first
    pinned.insert("one", "b", pages[8:13], owner="b", quota=0.5)
    with pytest.raises(ValueError, match="10 of at most 10 are taken"):
        pinned.insert("two", "c", pages[13:14], owner="c", quota=0.5)
    pinned.delete("two", "a/y")
    pinned.insert("again", "a/z", pages[3:5], owner="a", quota=0.5)
    pool.check([entry.pages for entry in pinned.list()])


def test_replacing_an_entry_keeps_the_pages_that_both_hold():
    pool = PagePool(4, 16)
    pinned = PinnedDocuments(pool)
    pages = filled(pool, 2)
    pinned.insert("manual", "a", pages)
    pinned.insert("manual", "a", pages[:1])
    pool.check([entry.pages for entry in pinned.list()])


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_shares_are_checked(share: float):
    with pytest.raises(ValueError, match="watermark must be a share above 0"):
        PinnedDocuments(PagePool(1, 16), watermark=share)
    with pytest.raises(ValueError, match="capacity must be a share above 0"):
        PinnedDocuments(PagePool(1, 16), capacity=share)


def test_nothing_cannot_be_pinned():
    with pytest.raises(ValueError, match="fills no whole block"):
        PinnedDocuments(PagePool(1, 16)).insert("short", "a", [])
