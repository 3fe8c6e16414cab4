"""Stores that share a place, as servers on several machines do: what they find, and what becomes of
every failure."""

import logging
import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from chunks import NBYTES, OTHER_SCOPE, SCOPE, SIZE, holds, make_chunk, make_payload, put, same
from kvgraft.core.chunk import DTYPES, ChunkRecord
from kvgraft.core.matches import MatchQuery
from kvgraft.store import SegmentStore, StoreDirectory, StoreOptions
from kvgraft.store.file_backend import FileBackend
from kvgraft.store.files import encode, most_bytes
from kvgraft.store.redis_backend import RedisBackend
from kvgraft.store.secret import CACHE_SECRET, find_secret
from kvgraft.store.shared import PAUSE_S, CircuitBreaker, Sharing, open_backend
from kvgraft.store.signer import without_source
from redis_server import needs_redis, redis_server

ROOM = 1 << 24
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
PATIENCE_S = 60.0  # for what takes a second, unless the machine is busy
MISSES = ("gone", "late", "failed", "damaged", "foreign", "paused", "forged")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let stores look often, and not wait long when they end."""
    monkeypatch.setattr("kvgraft.store.shared.PERIOD_S", 0.1)
    monkeypatch.setattr("kvgraft.store.shared.FLUSH_S", 5.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "file", "memory"])
def url(request, tmp_path):
    """Of an empty place."""
    if request.param == "redis":
        started = request.getfixturevalue("server")
        started.client.flushall()
        return started.url
    return f"file://{tmp_path / 'shared'}" if request.param == "file" else f"memory://{tmp_path}"


def share(
    url,
    *,
    secret=SECRET,
    directory=None,
    ram_bytes=ROOM,
    timeout_s=20.0,
    rank=None,
    int8=False,
    **place,
):
    """A store that shares a place, on a machine of its own; it waits long, as this machine may be
    busy."""
    tier = Sharing(
        url, secret, rank, timeout_s, **({"capacity": ROOM, "quota": 1.0} | place)
    ).open()
    disk_bytes = ROOM if directory else 0
    return SegmentStore(
        block_size=SIZE,
        ram_bytes=ram_bytes,
        directory=directory,
        disk_bytes=disk_bytes,
        int8=int8,
        shared=tier,
    )


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def knows(store, chunk):
    return -1 not in store.prefix(chunk.chains, chunk.scope)


def look(store):
    """Have a store look at the place twice from now on: what was there has been noticed then."""
    seen = []
    place, original = store._tiers.shared._backend, store._tiers.shared._backend.read_log
    place.read_log = lambda *given: (seen.append(1), original(*given))[1]
    wait_for(lambda: len(seen) > 2)
    place.read_log = original


def misses(store):
    return {
        reason: store.counts[f"shared_{reason}"]
        for reason in MISSES
        if store.counts[f"shared_{reason}"]
    }


def test_what_one_store_puts_another_one_finds(url):
    early, late = make_chunk(1), make_chunk(2)
    with share(url) as one:
        put(one, early)
        one.flush()
        with share(url) as other:
            assert holds(other, early)  # what was there when it was opened needs no second look
            put(one, late)
            one.flush()
            wait_for(lambda: knows(other, late))
            assert holds(other, late)
            assert holds(other, late)
            assert (other.counts["shared_hits"], other.counts["ram_hits"]) == (8, 4)
            assert [record.key for record in other.take_appeared()] == [early.key, late.key]
            assert (one.counts["shared_written"], one.counts["ram_hits"], misses(one)) == (2, 0, {})


def test_a_scope_never_finds_what_another_one_has_put(url):
    chunks = [make_chunk(1, scope=scope) for scope in (SCOPE, OTHER_SCOPE)]
    with share(url) as one, share(url) as other:
        for mine, theirs in (chunks, chunks[::-1]):
            put(one, mine)
            one.flush()
            wait_for(lambda mine=mine: knows(other, mine))
            if mine.scope == SCOPE:
                assert other.match(MatchQuery(theirs.tokens, (theirs.scope,))) == []
                assert not holds(other, theirs)
            blocks = other.prefix(mine.chains, mine.scope)
            assert other.fetch(blocks, theirs.scope) == [None] * 4
            assert holds(other, mine)
            assert [
                match.length for match in other.match(MatchQuery(mine.tokens, (mine.scope,)))
            ] == [len(mine.tokens)]


def test_the_secret_of_another_fleet_neither_verifies_nor_finds(url):
    with share(url) as one, share(url, secret=OTHER_SECRET) as stranger, share(url) as friend:
        put(one, make_chunk(1))
        one.flush()
        wait_for(lambda: knows(friend, make_chunk(1)))
        wait_for(lambda: stranger.counts["shared_forged"] == 1)
        assert not holds(stranger, make_chunk(1))
        assert len(stranger) == 0
        put(stranger, make_chunk(1))  # under another name, so that the friend still has its own
        stranger.flush()
        assert holds(friend, make_chunk(1))
        assert friend.counts["shared_hits"] == 4


def test_what_leaves_memory_and_disk_is_still_found(url, tmp_path):
    chunks = [make_chunk(seed) for seed in range(3)]
    with share(url, ram_bytes=NBYTES, directory=tmp_path / "one") as one:
        put(one, *chunks)
        one.flush()
        for chunk in chunks:
            one._tiers.disk.remove(chunk.key)
        assert all(holds(one, chunk) for chunk in chunks)
        assert one.counts["shared_hits"] == 12
        assert one.counts["evicted"] == 0
    with share(url, ram_bytes=0) as alone:  # nothing but the place
        assert all(holds(alone, chunk) for chunk in chunks)
        assert alone.counts["shared_hits"] == 12


def test_what_waits_to_be_written_is_found(url):
    with share(url, ram_bytes=0) as store:
        writer = store._tiers.shared._writer
        held = threading.Event()
        writer.submit(held.wait)
        put(store, make_chunk(1))
        assert holds(store, make_chunk(1))
        held.set()
        store.flush()
        assert holds(store, make_chunk(1))
        assert store.counts["shared_hits"] == 8


def test_a_chunk_that_is_dropped_is_gone_for_all(url, tmp_path):
    with share(url) as one, share(url, directory=tmp_path / "other") as other:
        put(one, make_chunk(1), make_chunk(2))
        one.flush()
        wait_for(lambda: knows(other, make_chunk(1)) and knows(other, make_chunk(2)))
        assert holds(other, make_chunk(1))
        assert (
            other._tiers.disk.put(other.record(make_chunk(1).key), make_payload(make_chunk(1)))
            == []
        )
        other.flush()
        one.drop(make_chunk(1).key)
        one.flush()
        assert not holds(one, make_chunk(1))
        wait_for(lambda: not knows(other, make_chunk(1)))
        other.flush()
        with StoreDirectory(tmp_path / "other") as directory:
            assert directory.list() == []
        with share(url) as third:
            assert [holds(third, make_chunk(seed)) for seed in (1, 2)] == [False, True]
        put(one, make_chunk(1))
        one.flush()
        wait_for(lambda: knows(other, make_chunk(1)))
        look(one)
        assert holds(one, make_chunk(1))
        assert one.counts["ram_hits"] == 4


def test_two_who_have_read_the_same_text_do_not_harm_each_other(url):
    """Each has it from a source of its own, and both have written it."""
    first = make_chunk(1)
    second = type(first)(SCOPE, "tenant", first.chains, first.tokens, 77, first.source_start)
    assert first.key == second.key
    with share(url, ram_bytes=0) as one, share(url, ram_bytes=0) as other:
        for store, chunk in ((one, first), (other, second)):
            store.put(chunk, make_payload(chunk))
        one.flush()
        other.flush()
        for store, chunk in ((one, first), (other, second)):
            blocks = store.fetch(store.prefix(chunk.chains, SCOPE), SCOPE)
            assert all(same(block, chunk, place) for place, block in enumerate(blocks))
            assert misses(store) == {}


def test_exact_and_int8_payloads_of_one_text_do_not_mix(url):
    with share(url, int8=True) as small:
        put(small, make_chunk(1))
        with share(url) as exact:
            put(exact, make_chunk(1))
            exact.flush()
            assert holds(exact, make_chunk(1))
        assert small.counts["shared_written"] == 1


def test_ranks_have_parts_of_their_own(url):
    with share(url, rank=0) as zero, share(url, rank=1) as one, share(url, rank=0) as again:
        put(zero, make_chunk(1))
        zero.flush()
        wait_for(lambda: knows(again, make_chunk(1)))
        look(one)
        assert not knows(one, make_chunk(1))
        assert misses(one) == {}


def test_what_one_rank_has_put_is_not_signed_for_another(url, request):
    """Of one text ranks have other heads, of the same shape: whoever reaches the place must not
    swap them."""
    server = request.getfixturevalue("server") if url.startswith("unix") else None
    with share(url, rank=0) as zero:
        put(zero, make_chunk(1))
    with share(url, rank=0) as again, share(url, rank=1) as one:
        assert holds(again, make_chunk(1))  # the pair: in its own part it is found
        if server is not None:
            for key in server.client.keys("kvgraft:rank-0:*/*"):
                server.client.set(key.replace(b"rank-0", b"rank-1"), server.client.get(key))
            server.client.copy("kvgraft:rank-0:records", "kvgraft:rank-1:records")
        else:
            files = FileBackend(url, "", ROOM, 1.0)._files
            root = files._strip_protocol(url)
            files.copy(f"{root}/rank-0", f"{root}/rank-1", recursive=True)
        wait_for(lambda: misses(one) == {"forged": 1})
        assert not knows(one, make_chunk(1))


def test_no_more_is_known_than_the_bound(url, monkeypatch):
    monkeypatch.setattr("kvgraft.store.shared.MAX_RECORDS", 2)
    chunks = [make_chunk(seed) for seed in range(4)]
    with share(url, ram_bytes=0) as one, share(url, ram_bytes=0) as other:
        for chunk in chunks:
            put(one, chunk)
            one.flush()
            wait_for(lambda chunk=chunk: knows(other, chunk))
        for store in (one, other):
            wait_for(
                lambda store=store: (
                    [knows(store, chunk) for chunk in chunks] == [False, False, True, True]
                )
            )
            assert len(store) == 2
            assert all(holds(store, chunk) for chunk in chunks[2:])
    with share(url) as third:
        monkeypatch.undo()
        assert third.counts["shared_hits"] == 0
        assert holds(third, chunks[3])


def test_what_is_computed_again_though_only_the_place_has_it_is_kept_here(url):
    with share(url) as one:
        put(one, make_chunk(1))
    with share(url) as other:
        put(other, make_chunk(1))
        assert holds(other, make_chunk(1))
        assert (other.counts["ram_hits"], other.counts["shared_hits"]) == (4, 0)
        assert not other.put(make_chunk(1), make_payload(make_chunk(1)))


def test_neither_names_nor_log_tell_whose_text_it_is(url, caplog):
    chunk = make_chunk(1)
    with caplog.at_level(logging.DEBUG), share(url) as store:
        put(store, chunk)
        store.flush()
        record = store.record(chunk.key)
        name = store._tiers.shared._signer.name(record)
    for secret in (chunk.key.hex(), SCOPE.hex(), SECRET.hex(), "tenant"):
        assert secret not in name + caplog.text


# Failures


def put_and_share(stack, url, **options):
    """A store that knows two chunks of another one by the place alone."""
    with share(url) as one:
        put(one, make_chunk(1), make_chunk(2))
    other = stack.enter_context(share(url, **options))
    assert knows(other, make_chunk(1))
    assert knows(other, make_chunk(2))
    return other


def change(url, server, how):
    """Change all data of chunks at a place."""
    if url.startswith("unix"):
        for key in server.client.keys("kvgraft:*/*"):
            server.client.set(key, how(server.client.get(key)))
        return
    files = FileBackend(url, "", ROOM, 1.0)._files
    for path in files.find(f"{files._strip_protocol(url)}/chunks"):
        files.pipe_file(path, how(files.cat_file(path)))


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]


DAMAGE = {
    "flipped": flipped,
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "foreign bytes": lambda data: os.urandom(len(data)),
    "grown": lambda data: data + bytes(1 << 20),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_data_is_a_miss(url, request, how):
    server = request.getfixturevalue("server") if url.startswith("unix") else None
    with ExitStack() as stack:
        store = put_and_share(stack, url)
        change(url, server, DAMAGE[how])
        assert not holds(store, make_chunk(1))
        # Redis knows no empty value
        assert misses(store) == {"gone" if how == "empty" and server else "damaged": 1}
        assert not knows(store, make_chunk(1))
        put(store, make_chunk(1))  # computed again, and written again
        store.flush()
    with share(url) as third:
        assert holds(third, make_chunk(1))
        assert not holds(third, make_chunk(2))


def test_no_more_is_loaded_than_a_chunk_can_have(url):
    """Paired: what has just so much."""
    with closing(open_backend(url, "", 5.0, ROOM, 1.0)) as place:
        place.put("one/large", b"record", bytes(1 << 20))
        assert len(place.get("one/large", 1000)) == 1000
        assert len(place.get("one/large", 1 << 20)) == 1 << 20
        assert place.get("one/other", 1000) is None


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_of_a_chunk_is_close(dtype, int8):
    payload = make_payload(make_chunk(1), getattr(torch, dtype))
    record = without_source(ChunkRecord.of(make_chunk(1), payload, int8=int8))
    length = len(encode(record, record.pack(payload)))
    assert length <= most_bytes(record) < length + 4096


@needs_redis
def test_data_of_other_chunks_and_forged_records_are_misses(server):
    server.client.flushall()
    with ExitStack() as stack:
        store = put_and_share(stack, server.url)
        first, second = sorted(server.client.keys("kvgraft:*/*"))
        server.client.set(first, server.client.get(second))  # signed, but for another name
        assert [holds(store, make_chunk(seed)) for seed in (1, 2)].count(True) == 1
        assert misses(store) == {"damaged": 1}
        read = server.client.xrange("kvgraft:records")[0][1]
        for forged in (
            b"",
            b"x",
            read[b"record"][:-1],
            flipped(read[b"record"]),
            bytes(32) + b"-" + bytes(40),
        ):
            server.client.xadd("kvgraft:records", {"record": forged})
        server.client.xadd("kvgraft:records", {"other": b"x"})
        put(share_and_close := stack.enter_context(share(server.url)), make_chunk(3))
        share_and_close.flush()
        wait_for(lambda: knows(store, make_chunk(3)))  # what comes behind them is still found
        assert misses(store) == {"damaged": 1, "forged": 6}
        server.client.delete(first, second)
        assert not holds(
            store,
            make_chunk(2)
            if store._tiers.memory.get(store.record(make_chunk(1).key))
            else make_chunk(1),
        )


@needs_redis
def test_what_the_place_has_evicted_is_a_miss(server):
    server.client.flushall()
    with ExitStack() as stack:
        store = put_and_share(stack, server.url)
        server.client.delete(*server.client.keys("kvgraft:*/*"))
        assert not holds(store, make_chunk(1))
        assert misses(store) == {"gone": 1}
        assert not knows(store, make_chunk(1))


@needs_redis
def test_a_server_that_is_down_costs_misses_and_nothing_else(tmp_path, caplog):
    with redis_server(tmp_path) as own, ExitStack() as stack:
        store = put_and_share(stack, own.url)
        own.stop()
        assert not holds(store, make_chunk(1))
        assert misses(store)["failed"] >= 1
        wait_for(lambda: store._tiers.shared._breaker.is_open)
        assert not holds(store, make_chunk(2))
        assert misses(store)["paused"] == 1
        put(store, make_chunk(3))
        assert holds(store, make_chunk(3))
        assert misses(store)["paused"] == 2
        assert len([record for record in caplog.records if "looking" in record.message]) == 1
        own.start()  # empty, and its clock goes on
        store._tiers.shared._breaker._paused_until = 0.0
        # it has noticed that nothing is left there
        wait_for(lambda: not knows(store, make_chunk(2)))
        put(store, make_chunk(4))
        store.flush()
        with share(own.url) as other:
            assert holds(other, make_chunk(4))


@needs_redis
def test_a_server_that_is_not_there_yet_is_no_error(tmp_path, caplog):
    with redis_server(tmp_path) as own:
        own.stop()
        with share(own.url) as store:
            assert misses(store)["failed"] >= 1
            put(store, make_chunk(1))
            assert holds(store, make_chunk(1))
            store.flush()
            own.start()
            store._tiers.shared._breaker._paused_until = 0.0
            put(store, make_chunk(2))
            # known, and written now
            assert not store.put(make_chunk(1), make_payload(make_chunk(1)))
            store.flush()
            with share(own.url) as other:
                assert holds(other, make_chunk(1))
                assert holds(other, make_chunk(2))
    assert [r.levelname for r in caplog.records if "looking" in r.message][:1] == ["WARNING"]


@needs_redis
def test_a_prompt_waits_for_a_slow_server_once_however_much_it_asks_for(server):
    """The server answers nobody for two seconds; the answers would come, but too late."""
    server.client.flushall()
    chunks = [make_chunk(seed) for seed in range(30)]
    with share(server.url) as one:
        put(one, *chunks)
    with share(server.url, timeout_s=0.2) as store:
        server.client.execute_command("CLIENT", "PAUSE", 2000, "ALL")
        places = [(chunk.key, 0) for chunk in chunks]
        assert store.fetch_from(places) == [None] * 30
        assert sum(misses(store).values()) - misses(store).get("failed", 0) <= 30
        assert store.counts["shared_late"] + store.counts["shared_failed"] >= 30
        assert store._tiers.shared._breaker._failures["reading"] == 1
        # has waited before
        assert store.fetch_from(places, asked_at=time.monotonic() - 1.0) == [None] * 30
        assert store._tiers.shared._breaker._failures["reading"] == 1
        assert all(knows(store, chunk) for chunk in chunks)
        server.client.ping()  # it answers again
        store._tiers.shared._breaker._paused_until = 0.0
        assert all(store.fetch_from(places, time.monotonic() + PATIENCE_S))
        assert store.counts["shared_hits"] == 30


def test_a_place_that_hangs_holds_up_nothing(tmp_path, monkeypatch):
    """As a network file system does whose server is gone: whoever opens a file waits."""
    with ExitStack() as stack:
        held = threading.Event()
        stack.callback(held.set)
        store = put_and_share(stack, f"file://{tmp_path / 'shared'}", timeout_s=0.2)
        monkeypatch.setattr("kvgraft.store.file_backend.open_regular", lambda _: held.wait())
        asked_at = time.monotonic() + 3.0  # so that it waits for three seconds
        waiting = threading.Thread(
            target=store.fetch_from, args=([(make_chunk(1).key, 0)], asked_at)
        )
        waiting.start()
        time.sleep(0.5)  # it waits by now, or else this test tells less
        assert store.take_appeared() != []
        put(store, make_chunk(3))
        assert store.touch(make_chunk(1).key)
        assert misses(store) == {}  # all that while it was asked for
        waiting.join()
        assert misses(store) == {"late": 1}
        assert not holds(store, make_chunk(2))
        monkeypatch.setattr("kvgraft.store.shared.FLUSH_S", 1.0)
        store._tiers.shared._backend.put = lambda *_: held.wait()  # a write that hangs
        put(store, make_chunk(4))
        closing_it = threading.Thread(target=store.close)
        closing_it.start()
        closing_it.join(PATIENCE_S)
        assert not closing_it.is_alive()


def test_after_three_failures_in_a_row_it_is_left_alone():
    now = [0.0]
    health = CircuitBreaker("a place", lambda: now[0])
    for kind in ("reading", "writing", "reading", "looking", "writing"):
        health.failed(kind, "why")
    assert not health.is_open  # no kind three times
    health.worked("writing")
    health.failed("writing", "why")
    assert not health.is_open
    health.failed("reading", "why")
    assert health.is_open
    now[0] += PAUSE_S
    assert not health.is_open
    health.failed("reading", "why")
    assert health.is_open
    now[0] += PAUSE_S
    health.worked("reading")
    health.failed("reading", "why")
    assert not health.is_open


# Places


def sizes(folder):
    return sum(path.stat().st_size for path in (folder / "chunks").rglob("*") if path.is_file())


def test_a_directory_keeps_the_newest_within_its_capacity_and_quota(tmp_path):
    with closing(FileBackend(f"file://{tmp_path / 'a'}", "", 10_000, 0.5)) as place:
        for number in range(12):
            assert place.put(f"one/{number:02d}", b"record", bytes(1000))
            assert place.put("two/first", b"record", bytes(1000)) if number == 0 else True
        assert sizes(tmp_path / "a") <= 10_000
        assert [place.get(f"one/{number:02d}", 5000) is not None for number in range(12)] == [
            False
        ] * 7 + [True] * 5
        assert place.get("two/first", 5000) is not None  # the other scope loses nothing for it
        assert not place.put("one/large", b"record", bytes(5001))
        for number in range(10):
            place.put(f"three/{number}", b"record", bytes(1000))
        assert sizes(tmp_path / "a") <= 10_000
        read, mark = place.read_log("", 100)
        assert len(read) == 23
        assert place.read_log(mark, 100)[0] == []


def test_a_sweep_removes_records_without_a_chunk_and_what_was_left_half_written(
    tmp_path, monkeypatch
):
    root = tmp_path / "shared"
    with closing(FileBackend(f"file://{root}", "", 10_000, 1.0)) as place:
        old = time.time_ns() - 4000 * 10**9
        monkeypatch.setattr("kvgraft.store.file_backend.time.time_ns", lambda: old)
        place.put("one/gone", b"record", b"data")
        (root / "chunks" / "one" / f"x.{old}.tmp").write_bytes(b"half")
        (root / "chunks" / "one" / "of-somebody-else.tmp").write_bytes(b"half")
        monkeypatch.undo()
        place.remove("one/gone", b"removed")
    with closing(FileBackend(f"file://{root}", "", 10_000, 1.0)) as place:
        place.put("one/new", b"new record", b"data")
        # that of the removal is young
        assert place.read_log("", 100)[0] == [b"removed", b"new record"]
        assert [
            path.name
            for path in (root / "chunks").rglob("*")
            if path.is_file() and path.suffix != ".tmp"
        ] == ["new"]
        assert [path.name for path in root.rglob("*.tmp")] == ["of-somebody-else.tmp"]


def test_a_directory_tells_what_comes_in_pages_and_late_ones_of_other_clocks(tmp_path, monkeypatch):
    url = f"file://{tmp_path / 'shared'}"
    with (
        closing(FileBackend(url, "", ROOM, 1.0)) as place,
        closing(FileBackend(url, "", ROOM, 1.0)) as other,
    ):
        now = time.time_ns()
        for number in range(7):
            clock = now - (7 - number) * 1000 * 10**9
            monkeypatch.setattr(
                "kvgraft.store.file_backend.time.time_ns", lambda clock=clock: clock
            )
            place.put(f"one/{number}", b"%d" % number, b"data")
        monkeypatch.undo()
        read, mark = [], ""
        while True:
            found, mark = other.read_log(mark, 3)
            read += found
            if not found:
                break
        assert read == [b"%d" % number for number in range(7)]
        monkeypatch.setattr("kvgraft.store.file_backend.time.time_ns", lambda: now - 50 * 10**9)
        place.put("one/late", b"late", b"data")
        monkeypatch.undo()
        assert other.read_log(mark, 3)[0] == [b"late"]
        assert other.read_log(mark, 3)[0] == []


def test_what_a_clock_far_ahead_has_dated_hides_nothing(tmp_path, monkeypatch):
    url = f"file://{tmp_path / 'shared'}"
    with (
        closing(FileBackend(url, "", ROOM, 1.0)) as place,
        closing(FileBackend(url, "", ROOM, 1.0)) as other,
    ):
        ahead = time.time_ns() + 10**4 * 10**9
        monkeypatch.setattr("kvgraft.store.file_backend.time.time_ns", lambda: ahead)
        place.put("one/ahead", b"ahead", b"data")
        monkeypatch.undo()
        read, mark = other.read_log("", 100)
        assert read == [b"ahead"]
        place.put("one/now", b"now", b"data")
        read, mark = other.read_log(mark, 100)
        assert read == [b"now"]
        assert other.read_log(mark, 100)[0] == []


def test_a_directory_that_others_may_read_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="is open to others"):
        FileBackend(f"file://{tmp_path / 'open'}", "", ROOM, 1.0)


@needs_redis
def test_a_stream_is_followed_in_pages_where_it_is_trimmed_and_where_it_begins_anew(server):
    server.client.flushall()
    with closing(RedisBackend(server.url, "", 5.0)) as place:
        for number in range(5):
            place.put(f"one/{number}", b"%d" % number, b"data")
        read, mark = place.read_log("", 3)
        assert read == [b"0", b"1", b"2"]
        server.client.xtrim("kvgraft:records", maxlen=1, approximate=False)
        assert place.read_log(mark, 3)[0] == [b"4"]  # 3 was missed, and the mark is no longer there
        _, mark = place.read_log(mark, 3)
        assert place.read_log(mark, 3) == ([], mark)
        server.client.flushall()
        assert place.read_log(mark, 3) == ([], "")
        # by a clock that is behind
        server.client.xadd("kvgraft:records", {"record": b"early"}, id="5-0")
        assert place.read_log(mark, 3) == ([], "")
        assert place.read_log("", 3)[0] == [b"early"]


# Options


def test_options_open_a_store_that_shares(url, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_SECRET, "ab" * 32)
    options = StoreOptions(ram_gib=0, shared_url=url, shared_timeout_s=20)
    with options.open(SIZE) as one:
        put(one, make_chunk(1))
    with options.open(SIZE) as other:
        assert holds(other, make_chunk(1))
    monkeypatch.delenv(CACHE_SECRET)
    beside = StoreOptions(tmp_path / "store", shared_url=url, shared_timeout_s=20, rank=1)
    with beside.open(SIZE) as third:
        put(third, make_chunk(1))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["rank-1", "secret"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_url": "/some/dir"}, "'/some/dir': no URL: give redis://HOST:6379/0"),
        ({"shared_url": "file://dir"}, "file://dir.*three slashes"),
        ({"shared_url": "nothing://host"}, "nothing://host.*allowed are redis://"),
        ({"shared_url": "redis://host:port/0"}, "redis://host:port/0.*allowed are redis://"),
        ({"shared_url": "dropbox://path"}, "dropbox://path.*missing"),
        ({"shared_url": 5}, "shared_url must be a URL, got 5"),
        (
            {"shared_url": "redis://host", "shared_timeout_s": 0},
            "shared_timeout_s must be a number above 0, got 0",
        ),
        (
            {"shared_url": "redis://host", "shared_timeout_s": -1},
            "shared_timeout_s must be a number above 0, got -1",
        ),
        ({"shared_url": "redis://host", "shared_gib": 5}, "a server's maxmemory bounds it"),
        (
            {"shared_url": "file:///dir", "shared_gib": 0},
            "shared_gib must be a number above 0, got 0",
        ),
        ({"shared_gib": 5}, "shared_gib 5 is the size of shared_url"),
    ],
)
def test_options_that_cannot_be_are_refused(monkeypatch, options, message):
    monkeypatch.setenv(CACHE_SECRET, "ab" * 32)
    with pytest.raises(ValueError, match=message):
        StoreOptions(**options)


@pytest.mark.parametrize("url", ["redis://:hunter2@host/0", "rediss://host/0?password=hunter2"])
def test_a_password_in_a_url_is_refused_and_not_shown(monkeypatch, url):
    monkeypatch.setenv(CACHE_SECRET, "ab" * 32)
    with pytest.raises(ValueError, match="set KVGRAFT_SHARED_PASSWORD") as refused:
        StoreOptions(shared_url=url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("secret", ["", "ab" * 31, "ab" * 33, "xy" * 32, "ab " * 32])
def test_a_secret_that_is_none_is_refused_and_not_shown(monkeypatch, secret):
    monkeypatch.setenv(CACHE_SECRET, secret)
    with pytest.raises(
        ValueError, match=f"{CACHE_SECRET} must be 64 hexadecimal digits"
    ) as refused:
        StoreOptions(shared_url="redis://host")
    assert not secret or secret not in str(refused.value)


def test_a_shared_tier_without_a_secret_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_SECRET, raising=False)
    with pytest.raises(ValueError, match=f"needs a secret.*{CACHE_SECRET}"):
        StoreOptions(shared_url="redis://host")
    StoreOptions(tmp_path / "store", shared_url="redis://host")  # has one of its own


def test_a_directory_that_cannot_be_opened_ends_the_shared_tier(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_SECRET, "ab" * 32)
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(NotADirectoryError):
        StoreOptions(tmp_path / "store", shared_url=f"memory://{tmp_path}").open(SIZE)
    wait_for(
        lambda: (
            not [thread for thread in threading.enumerate() if thread.name == "kvgraft-shared-news"]
        )
    )


def _read_beside_pipes(root: Path) -> None:
    with closing(FileBackend(f"file://{root}", "", ROOM, 1.0)) as place:
        found, _ = place.read_log("", 10)
        assert found == [b"whole"]
        assert place.get("s/good", 100) == b"data"
        with pytest.raises(OSError, match="is no regular file"):
            place.get("s/pipe", 100)
        assert place.put("s/new", b"more", b"data"), "a scan of the place passes them by"
    with pytest.raises(OSError, match="is no regular file"):
        find_secret(root)


def test_nobody_waits_for_a_pipe_in_a_shared_directory(tmp_path):
    """As a chunk, a record or the secret; in a process of its own, since `open` may block."""
    root = tmp_path / "shared"
    with closing(FileBackend(f"file://{root}", "", ROOM, 1.0)) as place:
        place.put("s/good", b"whole", b"data")
    [record] = root.glob("records/*/*")
    for path in ("chunks/s/pipe", f"{record.parent.relative_to(root)}/0{record.name[:19]}-s-pipe"):
        os.mkfifo(root / path, 0o600)
    os.mkfifo(root / "secret", 0o600)
    reader = multiprocessing.get_context("fork").Process(target=_read_beside_pipes, args=(root,))
    reader.start()
    reader.join(PATIENCE_S)
    try:
        assert reader.exitcode == 0, "it waits, or found something else"
    finally:
        reader.kill()
        reader.join()
