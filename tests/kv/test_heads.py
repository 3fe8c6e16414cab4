"""How heads share pages: streams, page lists, and which local pages belong to a page."""

import numpy as np
import torch

from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadClass, HeadMap, StreamLayout
from kvgraft.kv.lists import LocalPages, PageLists
from kvgraft.kv.pages import PagePool

L, G, R = HeadClass.LOCAL, HeadClass.GLOBAL, HeadClass.RETRIEVAL
MAP = HeadMap("m", 3, 10, ((L, G, L), (L, L, L), (R, L, L)))
BLOCK = 4


def test_without_a_map_all_heads_share_one_list():
    layout = StreamLayout.dense(3, 2)
    assert (layout.width, layout.num_lists, layout.num_local_lists) == (6, 1, 0)
    assert [heads.streams for heads in layout.layers] == [(0, 1), (2, 3), (4, 5)]
    assert layout.streams(0, range(1, 3)) == range(2, 6)


def test_every_stream_has_its_own_place_and_pages_are_as_wide_as_the_first_list():
    layout = StreamLayout.by_class(MAP)
    # 2 heads keep everything; 7 local ones fill 4 lists of 2
    assert (layout.width, layout.num_lists) == (2, 5)
    places = [
        p for heads in layout.layers for p in zip(heads.page_lists, heads.streams, strict=True)
    ]
    assert len(set(places)) == 9
    for index, heads in enumerate(layout.layers):
        assert heads.local == MAP.heads(index, L)
        assert all(
            (page_list > 0) == local
            for page_list, local in zip(heads.page_lists, heads.local, strict=True)
        )
    for page_list in range(5):
        streams = [layout.streams(page_list, range(index, index + 1)) for index in range(3)]
        assert sorted(s for part in streams for s in part) == list(
            layout.streams(page_list, range(3))
        )


def test_what_is_read_is_what_was_written_to_every_list():
    layout = StreamLayout.by_class(MAP)
    cache = KVCache(layout, 40, BLOCK, 8, torch.float32, torch.device("cpu"))
    slots = torch.randperm(160)[: 5 * 7].view(5, 7)
    keys, values = torch.randn(2, 3, 7, 3, 8)
    for layer in range(3):
        cache.write(layer, slots, keys[layer], values[layer])
    for layer in range(3):
        found = cache.read(layer, slots)
        assert torch.equal(found[0], keys[layer])
        assert torch.equal(found[1], values[layer])


def test_a_window_gives_pages_back_and_takes_no_more_than_it_may():
    layout, pool = StreamLayout.by_class(MAP), PagePool(60, BLOCK)
    lists = PageLists(layout, 20, BLOCK, torch.device("cpu"))
    lists.place(slice(0, 1), np.arange(20), np.array([pool.allocate(20)]))
    most = layout.window_blocks(BLOCK)
    assert most == 1 + 3 + 1
    lists.spare = pool.allocate(4 * most)
    for position in range(80):
        if position % BLOCK == 0:
            lists.leave_behind(pool, position)
            lists.add_local(pool, np.array([position // BLOCK]))
        held = np.flatnonzero(lists.pages[1] >= 0)
        seen = {p // BLOCK for p in range(position + 1) if p < 3 or p > position - 10}
        assert seen <= set(held.tolist())
        assert len(held) <= most
        pool.check([lists.held])
        slots = lists.slots[1, : position + 1]
        assert bool(
            (slots[[p for p in range(position + 1) if p < 3 or p > position - 10]] >= 0).all()
        )
    lists.settle(pool, 4 * most)
    assert pool.num_used == 20 + 4 * most
    pool.release(lists.held)
    pool.check([])


def test_local_pages_are_known_while_both_sides_hold_their_content():
    pool = PagePool(12, BLOCK)
    known = LocalPages(pool, 2)
    page, one, other, *_ = pages = pool.allocate(4)
    pool.keep(pages)
    assert known.of(np.array([page])).tolist() == [[-1, -1]]
    known.record(np.array([page]), np.array([[one], [-1]]))
    assert known.of(np.array([page])).tolist() == [[one, -1]]
    assert not known.complete([page])[0]
    known.record(np.array([page]), np.array([[-1], [other]]))
    assert known.complete([page])[0]
    pool.release([other])
    assert known.complete([page])[0]  # free, but still there
    pool._drop([other])
    assert known.of(np.array([page])).tolist() == [[one, -1]]
    pool.release([page])
    pool._drop([page])  # another text will lie there
    assert known.of(np.array([page])).tolist() == [[-1, -1]]


def test_each_rank_has_the_same_number_of_local_heads():
    given = HeadMap("m", 3, 10, ((L, L, L, R), (L, L, L, L), (G, R, L, L)))
    assert given.levelled(1) == given
    assert given.levelled(2).classes == ((L, G, L, R), (L, L, L, L), (G, R, G, G))
    assert given.levelled(4).classes == ((G, G, G, R), (L, L, L, L), (G, R, G, G))
    assert given.levelled(8) == given.levelled(4)  # two ranks have the same head
    assert given.levelled(2).levelled(2) == given.levelled(2)
