import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from chunks import (
    FILE,
    NBYTES,
    OTHER_SCOPE,
    SCOPE,
    SIZE,
    file_of,
    holds,
    make_chunk,
    make_chunks,
    make_payload,
    make_tokens,
    put,
)
from kvgraft.core.keys import chain_hashes, scope_digest
from kvgraft.core.matches import MatchQuery, grafted_tokens
from kvgraft.store import Chunk, ChunkIndex, SegmentStore, chunk_index, files
from kvgraft.store.tiers import MemoryTier

ROOM = 1 << 24


def open_store(directory=None, **options):
    options = {"ram_bytes": ROOM, "disk_bytes": ROOM if directory else 0, "quota": 1.0} | options
    return SegmentStore(block_size=SIZE, directory=directory, **options)


TIERS = {
    "ram": lambda path, capacity=ROOM, **options: open_store(ram_bytes=capacity, **options),
    "disk": lambda path, capacity=ROOM, **options: open_store(
        path, ram_bytes=0, disk_bytes=capacity, **options
    ),
}
each_tier = pytest.mark.parametrize("tier", TIERS)


def room_for(tier, count):
    """Bytes in which this many chunks of four blocks find room, but not one more."""
    return count * (NBYTES if tier == "ram" else FILE)


@each_tier
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_is_fetched_to_the_last_bit(tmp_path, tier, dtype):
    chunks = make_chunks(make_tokens(11), source=-(2**62))
    with TIERS[tier](tmp_path / "store") as store:
        put(store, *chunks, dtype=dtype)
        # from memory, or as they wait to be written
        assert all(holds(store, chunk, dtype) for chunk in chunks)
        store.flush()
        assert all(holds(store, chunk, dtype) for chunk in chunks)
        assert len(store) == store.counts["stored"] == 3
        assert (store.counts["disk_hits"] == 0) == (tier == "ram")
        assert (store.ram_nbytes == 0) == (tier == "disk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_store_on_the_directory_has_everything(tmp_path, dtype):
    chunks = make_chunks(make_tokens(11), source=1)
    with open_store(tmp_path) as store:
        put(store, *chunks, dtype=dtype)
    with open_store(tmp_path) as store:
        assert len(store) == 3
        for _ in range(2):
            assert all(holds(store, chunk, dtype) for chunk in chunks)
        assert (store.counts["disk_hits"], store.counts["ram_hits"]) == (11, 11)
        assert not store.put(chunks[0], make_payload(chunks[0], dtype))


def test_payload_and_tokens_are_copied_when_they_are_put():
    given, store = make_chunk(1), open_store()
    chunk, payload = replace(given), make_payload(given)
    store.put(chunk, payload)
    for tensor in payload.values():
        tensor.fill_(torch.nan)
    tokens = given.tokens.copy()
    given.tokens[:] = 0
    assert holds(store, replace(given, tokens=tokens))


def test_what_is_in_memory_is_fetched_before_it_is_pushed_out(tmp_path):
    chunks = [make_chunk(seed) for seed in range(2)]
    with open_store(tmp_path, ram_bytes=NBYTES) as store:
        put(store, *chunks)
        store.flush()
        blocks = store.prefix([*chunks[0].chains, *chunks[1].chains], SCOPE)
        assert None not in store.fetch(blocks, SCOPE)
        assert (store.counts["ram_hits"], store.counts["disk_hits"]) == (4, 4)
        assert None not in store.fetch(blocks, SCOPE)
        assert (store.counts["ram_hits"], store.counts["disk_hits"]) == (8, 8)


def check_matches(store, prompt, matches, source_tokens, payload):
    """Every matched token must be fetched with the payload that it had in its source."""
    for match in matches:
        blocks = store.fetch(match.pages.tolist(), SCOPE)
        slots = grafted_tokens([match], SIZE)[1]
        numbers = match.pages.tolist()
        for token, slot in enumerate(slots.tolist()):
            block = blocks[numbers.index(slot // SIZE)]
            position = match.source_start + token
            assert (
                block.tokens[slot % SIZE] == prompt[match.start + token] == source_tokens[position]
            )
            for name, values in payload.items():
                assert torch.equal(block.payload[name][:, slot % SIZE], values[:, position])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
@pytest.mark.parametrize("restart", [False, True])
def test_a_prompt_is_matched_at_any_offset_across_chunks(tmp_path, order, restart):
    tokens = make_tokens(12)
    chunks = make_chunks(tokens, source=5)
    payloads = [make_payload(chunk) for chunk in chunks]
    payload = {name: torch.cat([each[name] for each in payloads], dim=1) for name in payloads[0]}
    store = open_store(tmp_path)
    put(store, *(chunks[number] for number in order))
    if restart:
        store.close()
        store = open_store(tmp_path)
    for first, last in ((0, 48), (1, 47), (14, 18), (5, 33), (19, 48)):
        prompt = np.concatenate(
            (make_tokens(2, seed=9)[:7], tokens[first:last], make_tokens(1, seed=8))
        )
        matches = store.match(MatchQuery(prompt, (SCOPE,)))
        if last - first >= 2 * SIZE:
            assert [(match.start, match.length, match.source_start) for match in matches] == [
                (7, last - first, first)
            ]
        check_matches(store, prompt, matches, tokens, payload)
    store.close()


def test_match_passes_on_what_it_is_asked():
    tokens, store = make_tokens(8), open_store()
    put(store, *make_chunks(tokens, source=1))
    free = np.arange(32) >= 8
    assert [match.start for match in store.match(MatchQuery(tokens, (SCOPE,), free=free))] == [8]
    middle = tokens[16:]
    assert len(store.match(MatchQuery(middle, (SCOPE,)))) == 1
    assert store.match(MatchQuery(middle, (SCOPE,), require_clean_context=True)) == []


@each_tier
def test_a_known_chunk_is_not_stored_again_but_counts_as_used(tmp_path, tier):
    with TIERS[tier](tmp_path, room_for(tier, 2)) as store:
        old, middle, new = (make_chunk(seed) for seed in range(3))
        put(store, old, middle)
        store.flush()
        before = (store.ram_nbytes, store.disk_nbytes)
        assert not store.put(old, make_payload(old))
        assert (store.counts["known"], len(store)) == (1, 2)
        store.flush()
        assert (store.ram_nbytes, store.disk_nbytes) == before
        put(store, new)
        store.flush()
        assert [holds(store, chunk) for chunk in (old, middle, new)] == [True, False, True]


@each_tier
def test_the_least_recently_fetched_goes_first(tmp_path, tier):
    with TIERS[tier](tmp_path, room_for(tier, 3)) as store:
        chunks = [make_chunk(seed) for seed in range(4)]
        put(store, *chunks[:3])
        store.flush()
        assert holds(store, chunks[0])
        put(store, chunks[3])
        store.flush()
        assert [chunk.key in store for chunk in chunks] == [True, False, True, True]
        assert store.counts["evicted"] == 1
        assert store.match(MatchQuery(chunks[1].tokens, (SCOPE,))) == []


def test_use_is_remembered_by_the_directory(tmp_path):
    chunks = [make_chunk(seed) for seed in range(3)]
    with open_store(tmp_path) as store:
        put(store, *chunks)
        store.flush()
        assert holds(store, chunks[0])
    with open_store(tmp_path, disk_bytes=2 * FILE) as store:
        assert [chunk.key in store for chunk in chunks] == [True, False, True]
        store.flush()
        assert [file_of(tmp_path, chunk).exists() for chunk in chunks] == [True, False, True]


@each_tier
@pytest.mark.parametrize("same_scope", [False, True])
def test_a_flood_evicts_its_own_scope_only(tmp_path, tier, same_scope):
    with TIERS[tier](tmp_path, room_for(tier, 8), quota=0.5) as store:
        ours = [make_chunk(seed) for seed in range(4)]
        put(store, *ours)
        scope = SCOPE if same_scope else OTHER_SCOPE
        put(store, *(make_chunk(seed, scope=scope) for seed in range(100, 120)))
        store.flush()
        assert [holds(store, chunk) for chunk in ours] == [not same_scope] * 4
        last = [make_chunk(seed, scope=scope) for seed in range(116, 120)]
        assert [holds(store, chunk) for chunk in last] == [True] * 4
        assert len(store) == (4 if same_scope else 8)


@each_tier
def test_without_quotas_a_flood_takes_no_more_than_an_equal_share(tmp_path, tier):
    with TIERS[tier](tmp_path, room_for(tier, 6)) as store:
        small = make_chunk(0, scope=scope_digest("model", "small"))
        large = [make_chunk(seed, scope=scope_digest("model", "large")) for seed in range(5)]
        put(store, small, *large, *(make_chunk(seed) for seed in range(100, 120)))
        store.flush()
        assert holds(store, small)
        # 1 + 3 + 2
        assert [holds(store, chunk) for chunk in large] == [False, False, True, True, True]


@each_tier
def test_what_does_not_fit_is_refused(tmp_path, tier):
    with TIERS[tier](tmp_path, 2 * NBYTES - 2, quota=0.5) as store:
        assert not store.put(make_chunk(1), make_payload(make_chunk(1)))
        assert (store.counts["too_large"], len(store)) == (1, 0)
    with TIERS[tier](tmp_path, room_for(tier, 2), quota=0.5) as store:
        put(store, make_chunk(1))
        store.flush()
        assert holds(store, make_chunk(1))


def test_a_file_that_turns_out_too_large_is_not_written(tmp_path):
    for ram_bytes in (0, ROOM):
        with open_store(tmp_path, ram_bytes=ram_bytes, disk_bytes=NBYTES + 1) as store:
            put(store, make_chunk(1))
            store.flush()
            assert (store.counts["too_large"], store.disk_nbytes) == (1, 0)
            assert holds(store, make_chunk(1)) == bool(ram_bytes)
            assert len(store) == bool(ram_bytes)


@pytest.mark.parametrize("tier", ["ram", "disk", "restart"])
def test_namespaces_never_meet(tmp_path, tier):
    tokens = make_tokens(8)
    store = TIERS["ram" if tier == "ram" else "disk"](tmp_path)
    put(store, *make_chunks(tokens, source=1))
    store.flush()
    if tier == "restart":
        store.close()
        store = open_store(tmp_path)
    chains = chain_hashes(tokens, SIZE, SCOPE)
    blocks = store.prefix(chains, SCOPE)
    assert [match.length for match in store.match(MatchQuery(tokens, (SCOPE,)))] == [32]
    assert min(blocks) >= 0
    assert None not in store.fetch(blocks, SCOPE)
    hits = store.counts["ram_hits"] + store.counts["disk_hits"]
    assert hits == 8
    assert store.match(MatchQuery(tokens, (OTHER_SCOPE,))) == []
    assert (
        store.prefix(chains, OTHER_SCOPE)
        == store.prefix(chain_hashes(tokens, SIZE, OTHER_SCOPE), SCOPE)
        == [-1] * 8
    )
    assert store.fetch(blocks, OTHER_SCOPE) == [None] * 8
    assert store.counts["ram_hits"] + store.counts["disk_hits"] == hits
    store.close()


def test_a_prefix_is_found_behind_a_gap_and_in_any_chunk_that_is_left(tmp_path):
    tokens, store = make_tokens(8), open_store(tmp_path)
    first, second = make_chunks(tokens, source=1)
    (short,) = make_chunks(tokens[: 2 * SIZE], source=2)
    put(store, first, second, short)
    chains = [*first.chains, *second.chains]
    assert all(block >= 0 for block in store.prefix(chains, SCOPE))
    store.drop(short.key)
    fetched = store.fetch(store.prefix(chains, SCOPE), SCOPE)
    assert [block.source for block in fetched] == [1] * 8
    store.drop(first.key)
    assert [block >= 0 for block in store.prefix(chains, SCOPE)] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("restart", [False, True])
def test_int8_is_within_half_a_scale_and_never_a_prefix(tmp_path, restart):
    chunk = make_chunk(1)
    payload = make_payload(chunk, torch.bfloat16)
    payload["keys"][:, :, 0] *= 1000
    payload["values"][0] = 0
    store = open_store(tmp_path, int8=True)
    assert store.put(chunk, payload)
    assert not store.put(chunk, payload)
    if restart:
        store.close()
        store = open_store(tmp_path)
    assert store.prefix(chunk.chains, SCOPE) == [-1] * 4
    (match,) = store.match(MatchQuery(chunk.tokens, (SCOPE,)))
    blocks = store.fetch(match.pages.tolist(), SCOPE)
    assert [block.exact for block in blocks] == [False] * 4
    for name, tensor in payload.items():
        got = torch.cat([block.payload[name] for block in blocks], dim=1)
        assert got.dtype == torch.bfloat16
        half_scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127 / 2
        rounding = tensor.float().abs().amax(dim=1, keepdim=True) / 256  # of bfloat16, after all
        error = (got.float() - tensor.float()).abs()
        assert (error <= half_scale + rounding).all()
        assert error.max() > 0
    assert not blocks[0].payload["values"][0].any()
    store.close()


def test_an_exact_chunk_takes_the_place_of_its_int8_and_not_the_other_way(tmp_path):
    chunk = make_chunk(1)
    for int8, stored in ((True, True), (False, True), (True, False)):
        with open_store(tmp_path, int8=int8) as store:
            assert store.put(chunk, make_payload(chunk)) == stored
            store.flush()
            assert len(store) == 1
            assert store.disk_nbytes == file_of(tmp_path, chunk).stat().st_size
    with open_store(tmp_path) as store:
        assert holds(store, chunk)


def test_int8_takes_a_quarter_of_the_memory_and_refuses_what_is_not_finite():
    exact, small = open_store(), open_store(int8=True)
    chunk = make_chunk(1, num_blocks=16)
    for store in (exact, small):
        put(store, chunk)
    assert small.ram_nbytes < 0.35 * exact.ram_nbytes
    payload = make_payload(make_chunk(2))
    payload["values"][1, 2, 3] = torch.inf
    assert not small.put(make_chunk(2), payload)
    assert (small.counts["non_finite"], len(small)) == (1, 1)


@pytest.mark.parametrize("tier", ["ram", "disk", "restart"])
@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_chunks_stay(tmp_path, tier, pinned):
    tier, restart = ("disk", True) if tier == "restart" else (tier, False)
    chunks = [make_chunk(seed) for seed in range(12)]
    store = TIERS[tier](tmp_path, room_for(tier, 4))
    put(store, *chunks[:2])
    store.pin(chunks[0].key)
    store.pin(chunks[1].key)
    store.pin(chunks[1].key, False)
    if not pinned:
        store.pin(chunks[0].key, False)
    if restart:
        store.close()
        store = TIERS[tier](tmp_path, room_for(tier, 4))
    put(store, *chunks[2:])
    store.flush()
    assert [holds(store, chunk) for chunk in chunks[:2]] == [pinned, False]
    assert len(store) == 4
    with pytest.raises(KeyError, match="no stored chunk"):
        store.pin(chunks[1].key)
    store.close()


def test_pinned_chunks_are_not_evicted_for_one_that_would_need_their_room():
    store = open_store(ram_bytes=2 * NBYTES)
    put(store, make_chunk(1), make_chunk(2))
    store.pin(make_chunk(1).key)
    store.pin(make_chunk(2).key)
    assert not store.put(make_chunk(3), make_payload(make_chunk(3)))
    assert store.counts["too_large"] == 1
    store.pin(make_chunk(1).key, False)
    put(store, make_chunk(3))
    assert [holds(store, make_chunk(seed)) for seed in (1, 2, 3)] == [False, True, True]


def check_accounts(store, directory):
    """What is accounted must be what is there, within the limits."""
    held = store._tiers.memory._payloads
    assert store.ram_nbytes == sum(
        tensor.nbytes for payload in held.values() for tensor in payload.values()
    )
    sizes = {path.stem: path.stat().st_size for path in directory.glob("??/*")}
    assert store.disk_nbytes == sum(sizes.values())
    assert set(sizes) == {key.hex() for key in store._tiers.disk.rows}
    assert len(store) == len({*held, *store._tiers.disk.rows})
    for budget in (store._tiers.memory.budget, store._tiers.disk.budget):
        assert budget.nbytes <= budget.capacity
        assert sum(budget.held(scope) for scope in (SCOPE, OTHER_SCOPE)) == budget.nbytes
        assert all(budget.held(scope) <= budget.share for scope in (SCOPE, OTHER_SCOPE))


@pytest.mark.parametrize("seed", range(3))
def test_accounts_are_right_after_any_sequence_of_operations(tmp_path, seed):
    rng = np.random.default_rng(seed)
    limits = {"ram_bytes": 5 * NBYTES, "disk_bytes": 9 * FILE, "quota": 0.6}
    store, pinned, num_held = open_store(tmp_path, **limits), set(), 0
    pool = [
        make_chunk(n, scope=(SCOPE, OTHER_SCOPE)[n % 2], num_blocks=1 + n % 5) for n in range(24)
    ]
    for step in range(150):
        chunk, action = pool[rng.integers(len(pool))], rng.random()
        if action < 0.6:
            store.put(chunk, make_payload(chunk))
        elif action < 0.8:
            num_held += holds(store, chunk)
        elif action < 0.9:
            store.flush()  # what waits to be written evicts others
            if chunk.key in store and action < 0.86:
                store.drop(chunk.key)
                pinned.discard(chunk.key)
            elif chunk.key in store._tiers.disk and len(pinned) < 3:
                store.pin(chunk.key)
                pinned.add(chunk.key)
        elif action > 0.97:
            store.close()
            store = open_store(tmp_path, **limits)
        if step % 10 == 0:
            store.flush()
            check_accounts(store, tmp_path)
        assert all(key in store for key in pinned)
    assert num_held > 5
    store.flush()
    assert all(holds(store, chunk) for chunk in pool if chunk.key in store)
    store.close()


def test_accounts_are_right_after_threads_have_used_a_store_together(tmp_path):
    pool = [
        make_chunk(n, scope=(SCOPE, OTHER_SCOPE)[n % 2], num_blocks=1 + n % 5) for n in range(24)
    ]
    store = open_store(tmp_path, ram_bytes=5 * NBYTES, disk_bytes=9 * FILE, quota=0.6)

    def use(seed):
        rng, num_held = np.random.default_rng(seed), 0
        for _ in range(100):
            chunk, action = pool[rng.integers(len(pool))], rng.random()
            if action < 0.6:
                store.put(chunk, make_payload(chunk))
            elif action < 0.9:
                num_held += holds(store, chunk)
            else:
                with suppress(KeyError):
                    store.drop(chunk.key)
        return num_held

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(use, range(4))) > 20
    store.flush()
    check_accounts(store, tmp_path)
    assert all(holds(store, chunk) for chunk in pool if chunk.key in store)
    assert not store.counts.keys() & {
        "missing",
        "damaged",
        "foreign",
        "write_failed",
        "catalogue_failed",
    }
    store.close()


def test_the_number_of_a_block_that_is_gone_names_no_other(monkeypatch):
    monkeypatch.setattr(chunk_index, "_RESTING", 1)
    store, first = open_store(), make_chunk(0)
    put(store, first)
    (match,) = store.match(MatchQuery(first.tokens, (SCOPE,)))
    for seed in range(1, 6):
        store.drop(make_chunk(seed - 1).key)
        put(store, make_chunk(seed))
        assert store.match(MatchQuery(first.tokens, (SCOPE,))) == []
        assert store.match(MatchQuery(make_chunk(seed).tokens, (SCOPE,)))[0].length == 16
        if seed == 1:
            assert store.fetch(match.pages.tolist(), SCOPE) == [None] * 4
    assert len(store._index._versions) == 8  # numbers are given out again


def test_unknown_numbers_are_nothing():
    store = open_store()
    put(store, make_chunk(1, num_blocks=2))
    assert [block is None for block in store.fetch([0, 1, 2, 15, 16, -1, 2**31 - 1], SCOPE)] == [
        False
    ] * 2 + [True] * 5
    assert store.fetch([], SCOPE) == []


@pytest.fixture
def held_up(monkeypatch):
    """Nothing is written to disk until the event is set; the writer says when it has come to it."""
    reached, go, write = threading.Event(), threading.Event(), files.write_file

    def wait(path, data):
        reached.set()
        go.wait(60)
        write(path, data)

    monkeypatch.setattr(files, "write_file", wait)
    yield reached, go
    go.set()


def test_put_does_not_wait_for_the_disk_and_what_waits_can_be_fetched(tmp_path, held_up):
    store, chunks = open_store(tmp_path, ram_bytes=0), [make_chunk(seed) for seed in range(3)]
    put(store, *chunks)
    assert [holds(store, chunk) for chunk in chunks] == [True] * 3
    assert not list(tmp_path.glob("??/*.safetensors"))
    held_up[1].set()
    store.flush()
    assert len(list(tmp_path.glob("??/*.safetensors"))) == 3
    store.close()


def is_held(lock):
    """Whether a thread other than a new one would wait for a lock."""
    with ThreadPoolExecutor(1) as other:
        free = other.submit(
            lambda: lock.acquire(blocking=False) and (lock.release() or True)
        ).result()
    return not free


def test_put_and_fetch_hold_the_locks_that_guard_what_they_use(tmp_path, monkeypatch):
    store, held = open_store(tmp_path), {}

    def note(owner, name):
        original = getattr(owner, name)

        def noted(*given):
            held.setdefault(f"{owner.__name__}.{name}", set()).add(
                (is_held(store._lock), is_held(store._tiers.disk._lock))
            )
            return original(*given)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (ChunkIndex, "add"),
        (ChunkIndex, "find"),
        (MemoryTier, "put"),
        (files.PayloadFiles, "read"),
    ):
        note(owner, name)
    put(store, make_chunk(1))
    store.flush()
    store._tiers.memory.remove(make_chunk(1).key)
    assert holds(store, make_chunk(1))
    assert set(held) == {"ChunkIndex.add", "ChunkIndex.find", "MemoryTier.put", "PayloadFiles.read"}
    assert all(by_store for found in held.values() for by_store, _ in found)
    # elsewhere the thread that writes may hold the disk's
    assert held["PayloadFiles.read"] == {(True, True)}
    store.close()


def test_nobody_waits_while_a_file_is_written_and_the_writer_needs_nothing_of_the_store(
    tmp_path, held_up
):
    reached, go = held_up
    store = open_store(tmp_path, disk_bytes=2 * FILE)
    put(store, *map(make_chunk, range(4)))
    assert reached.wait(60)
    assert not is_held(store._lock)
    assert not is_held(store._tiers.disk._lock)
    with store._lock:
        go.set()
        flush = threading.Thread(target=store._tiers.disk.flush, daemon=True)  # which evicts, too
        flush.start()
        flush.join(60)
        assert not flush.is_alive()
    store.close()


def test_a_full_backlog_leaves_chunks_in_memory_only(tmp_path, held_up):
    store, chunks = (
        open_store(tmp_path, max_backlog_bytes=2 * NBYTES),
        [make_chunk(seed) for seed in range(4)],
    )
    put(store, *chunks)
    assert store.counts["backlog"] == 2
    held_up[1].set()
    store.flush()
    assert all(holds(store, chunk) for chunk in chunks)
    assert [file_of(tmp_path, chunk).exists() for chunk in chunks] == [True, True, False, False]
    store.close()


def test_a_chunk_dropped_while_it_is_written_is_gone(tmp_path, held_up):
    reached, go = held_up
    store, chunk = open_store(tmp_path), make_chunk(1)
    put(store, chunk)
    assert reached.wait(60)
    store.drop(chunk.key)
    assert not holds(store, chunk)
    go.set()
    store.flush()
    assert (len(store), store.disk_nbytes, list(tmp_path.glob("??/*"))) == (0, 0, [])
    put(store, chunk)
    store.flush()
    assert file_of(tmp_path, chunk).exists()
    store.close()


def test_a_chunk_that_was_dropped_does_not_come_back_before_its_row_is_removed(tmp_path):
    store, chunk, go = open_store(tmp_path), make_chunk(1), threading.Event()
    put(store, chunk)
    store.flush()
    store._tiers.disk._writer.submit(lambda: go.wait(60))
    store.drop(chunk.key)
    assert store.match(MatchQuery(chunk.tokens, (SCOPE,))) == []
    assert len(store) == 0
    go.set()
    store.close()
    assert store.counts == {"stored": 1}


def test_only_the_user_can_read_the_directory(tmp_path):
    directory = tmp_path / "made" / "store"
    with open_store(directory) as store:
        put(store, make_chunk(1))
        store.flush()
        paths = list(directory.rglob("*"))
        assert {path.name.partition(".")[0] for path in paths} >= {
            "lock",
            "catalogue",
            make_chunk(1).key.hex(),
        }
        for path in (directory, *paths):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_directories_of_others_and_open_ones_are_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        open_store(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        open_store(tmp_path / "file")
    monkeypatch.setattr(files.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        open_store(tmp_path)


def test_a_closed_store_refuses_and_can_be_closed_again(tmp_path):
    store, chunk = open_store(tmp_path), make_chunk(1)
    put(store, chunk)
    store.close()
    store.close()
    store.flush()
    for use in (
        lambda: store.put(chunk, make_payload(chunk)),
        lambda: store.match(MatchQuery(chunk.tokens, (SCOPE,))),
        lambda: store.prefix(chunk.chains, SCOPE),
        lambda: store.fetch([0], SCOPE),
        lambda: store.drop(chunk.key),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ram_bytes": -1}, "at least 0 bytes"),
        ({"disk_bytes": 5}, "both or neither"),
        ({"quota": 0.0}, "quota must be"),
        ({"quota": 1.5}, "quota must be"),
        ({"chunk_blocks": 0}, "chunk_blocks is 0"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        open_store(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scope": b"tenant"}, "scope has 6 bytes"),
        ({"chains": ()}, "16 tokens and 0 chains"),
        ({"chains": (b"x" * 32,) * 3}, "16 tokens and 3 chains"),
        ({"chains": (b"x" * 31,) * 4}, r"chains of \[31\] bytes"),
        ({"tokens": np.arange(16) - 1}, "tokens must be integers"),
        ({"source": 2**63}, "source is 9223372036854775808"),
        ({"source_start": 2}, "source_start is 2"),
        ({"source_start": 2**31 - 16}, "source_start is 2147483632"),
    ],
)
def test_invalid_chunks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Chunk(**(vars(make_chunk(1)) | changes))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "no tensors"),
        ({"keys": torch.zeros(2, 15, 6)}, r"\[2, 15, 6\], expected \[streams, 16, d\]"),
        ({"keys": torch.zeros(16, 6)}, "expected"),
        ({"keys": torch.zeros(2, 16, 0)}, "expected"),
        ({"keys": torch.zeros(2, 16, 6, dtype=torch.int32)}, "is int32: allowed are"),
        ({"keys.scale": torch.zeros(2, 16, 6)}, "must not end"),
        ({"keys": torch.zeros(2, 16, 6, device="meta")}, "not in host memory"),
    ],
)
def test_invalid_payloads_are_refused(payload, message):
    store = open_store()
    with pytest.raises(ValueError, match=message):
        store.put(make_chunk(1), payload)
    assert len(store) == 0


def test_chunks_that_are_cut_otherwise_are_refused():
    with pytest.raises(ValueError, match="a chunk of 5 blocks of 4 tokens: allowed are 4 of 4"):
        open_store(chunk_blocks=4).put(make_chunk(1, num_blocks=5), {})
    with pytest.raises(ValueError, match="a chunk of 4 blocks of 4 tokens: allowed are 16 of 8"):
        SegmentStore(block_size=8, ram_bytes=ROOM).put(make_chunk(1), {})


def test_a_key_names_scope_chain_and_length():
    tokens = make_tokens(4)
    (whole,) = make_chunks(tokens, source=1)
    (same,) = make_chunks(tokens, source=2)
    _, half = make_chunks(tokens, source=1, chunk_blocks=2)
    (other,) = make_chunks(tokens, source=1, scope=OTHER_SCOPE)
    assert len(whole.key) == 32
    assert whole.key == same.key
    assert len({whole.key, half.key, other.key}) == 3
