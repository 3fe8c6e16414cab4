import errno
import json
import logging
import multiprocessing
import os
import sqlite3
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from safetensors.torch import save_file

from chunks import (
    FILE,
    NBYTES,
    SCOPE,
    SIZE,
    file_of,
    holds,
    look,
    make_chunk,
    make_payload,
    put,
    put_many,
    share,
)
from kvgraft.core.matches import MatchQuery
from kvgraft.store import SegmentStore, StoreDirectory, files
from kvgraft.store.catalogue import Catalogue, CatalogueDamaged
from kvgraft.store.files import CATALOGUE

ROOM = 1 << 24
SEEDS = range(6)


def open_store(directory, **options):
    options = {"ram_bytes": 0, "disk_bytes": ROOM, "quota": 1.0} | options
    return SegmentStore(block_size=SIZE, directory=directory, **options)


@pytest.fixture
def directory(tmp_path):
    """Of a store that was closed, with six chunks."""
    with open_store(tmp_path) as store:
        put(store, *map(make_chunk, SEEDS))
    return tmp_path


def check_lost(directory, lost, reason):
    """These chunks, and no others, are refused for that reason, and then gone everywhere."""
    with open_store(directory) as store:
        assert [holds(store, make_chunk(seed)) for seed in SEEDS] == [
            seed not in lost for seed in SEEDS
        ]
        assert store.counts[reason] == len(lost)
        assert sum(store.counts[other] for other in ("missing", "damaged", "foreign")) == len(lost)
        assert all(
            store.match(MatchQuery(make_chunk(seed).tokens, (SCOPE,))) == [] for seed in lost
        )
        store.flush()
        assert not any(file_of(directory, make_chunk(seed)).exists() for seed in lost)
        assert store.disk_nbytes == sum(path.stat().st_size for path in directory.glob("??/*"))
        put(store, *map(make_chunk, lost))
    with open_store(directory) as store:
        assert all(holds(store, make_chunk(seed)) for seed in SEEDS)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 1000, -1000, -1])
def test_a_truncated_file_is_damaged(directory, length):
    path = file_of(directory, make_chunk(2))
    path.write_bytes(path.read_bytes()[:length])
    check_lost(directory, [2], "damaged")


@pytest.mark.parametrize("kind", ["fifo", "fifo_with_a_writer", "device", "directory"])
def test_what_is_no_regular_file_is_damaged_and_nobody_waits_for_it(directory, kind):
    """In a process of its own, as what blocks in `open` does not end."""
    path, writer = file_of(directory, make_chunk(2)), None
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path, 0o600)
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK) if kind == "fifo_with_a_writer" else None
    reader = multiprocessing.get_context("fork").Process(target=_read_damaged, args=(directory,))
    reader.start()
    reader.join(60.0)
    try:
        assert reader.exitcode == 0, "it waits, or found something else"
    finally:
        reader.kill()
        reader.join()
        if writer is not None:
            os.close(writer)


def test_a_disk_that_does_not_answer_is_waited_for_once_and_used_again_when_it_does(
    directory, monkeypatch
):
    read, answers, asked = files.PayloadFiles.read, threading.Event(), []

    def hang(self, *given):
        asked.append(given)
        assert answers.wait(60)
        return read(self, *given)

    monkeypatch.setattr(files.PayloadFiles, "read", hang)
    monkeypatch.setattr(files, "READ_S", 0.2)
    with open_store(directory) as store:
        assert not any(holds(store, make_chunk(seed)) for seed in SEEDS)
        assert store.counts["late"] == len(SEEDS)
        assert len(asked) == 1
        assert store.counts["stored"] == 0  # and nothing else waits for the disk
        answers.set()
        monkeypatch.setattr(files.PayloadFiles, "read", read)
        eventually(lambda: holds(store, make_chunk(0)))
        assert all(holds(store, make_chunk(seed)) for seed in SEEDS)


def eventually(holds_now):
    deadline = time.monotonic() + 60
    while not holds_now():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _read_damaged(directory):
    with open_store(directory) as store:
        assert [holds(store, make_chunk(seed)) for seed in SEEDS] == [seed != 2 for seed in SEEDS]
        assert store.counts["damaged"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_damage(directory, seed):
    rng = np.random.default_rng(seed)
    path = file_of(directory, make_chunk(3))
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data))) if seed else 3  # in the length of the header
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    check_lost(directory, [3], "damaged")


def test_two_files_in_each_others_place_are_damage(directory):
    first, second = (file_of(directory, make_chunk(seed)) for seed in (1, 4))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    check_lost(directory, [1, 4], "damaged")


def test_a_foreign_file_is_damage(directory):
    path = file_of(directory, make_chunk(5))
    save_file(make_payload(make_chunk(5)), path)
    check_lost(directory, [5], "damaged")


@pytest.mark.parametrize(
    "content", ["another chunk", "no record", "other tensors", "no safetensors"]
)
def test_a_file_that_the_catalogue_vouches_for_must_still_be_of_the_chunk(directory, content):
    path = file_of(directory, make_chunk(5))
    whole = path.read_bytes()
    if content == "another chunk":
        path.write_bytes(file_of(directory, make_chunk(1)).read_bytes())
    elif content == "no record":
        save_file(make_payload(make_chunk(5)), path)
    elif content == "other tensors":
        metadata = {"kvgraft": metadata_of(whole)}
        save_file(
            {name: tensor.half() for name, tensor in make_payload(make_chunk(5)).items()},
            path,
            metadata,
        )
    else:
        path.write_bytes(b"no safetensors" * 100)
    data = path.read_bytes()
    with closing(sqlite3.connect(directory / CATALOGUE)) as database, database:
        values = (len(data), files.digest_of(data), make_chunk(5).key)
        database.execute("UPDATE chunks SET num_bytes = ?, digest = ? WHERE key = ?", values)
    check_lost(directory, [5], "damaged" if content == "no safetensors" else "foreign")


def metadata_of(data):
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    return json.loads(header)["__metadata__"]["kvgraft"]


def test_a_row_that_says_something_else_is_foreign(directory):
    with closing(sqlite3.connect(directory / CATALOGUE)) as database, database:
        ((record,),) = database.execute(
            "SELECT record FROM chunks WHERE key = ?", (make_chunk(2).key,)
        )
        changed = record.replace(b'"source":2,', b'"source":7,')
        assert changed != record
        database.execute("UPDATE chunks SET record = ? WHERE key = ?", (changed, make_chunk(2).key))
    check_lost(directory, [2], "foreign")


@pytest.mark.parametrize("record", [b"", b"{}", b"\xff\x00", b"other chunk"])
def test_rows_that_are_damaged_are_removed(directory, record):
    with closing(sqlite3.connect(directory / CATALOGUE)) as database, database:
        if record == b"other chunk":
            ((record,),) = database.execute(
                "SELECT record FROM chunks WHERE key = ?", (make_chunk(1).key,)
            )
        database.execute("UPDATE chunks SET record = ? WHERE key = ?", (record, make_chunk(2).key))
    check_lost(directory, [2], "damaged")


def test_files_deleted_while_the_store_is_open_are_missing(directory):
    with open_store(directory) as store:
        for seed in (0, 3):
            file_of(directory, make_chunk(seed)).unlink()
        assert [holds(store, make_chunk(seed)) for seed in SEEDS] == [
            False,
            True,
            True,
            False,
            True,
            True,
        ]
        assert store.counts == {"missing": 2, "disk_hits": 16}
        assert len(store) == 4


def test_files_deleted_before_are_noticed_on_opening(directory):
    file_of(directory, make_chunk(4)).unlink()
    with open_store(directory) as store:
        assert (store.counts["missing"], len(store)) == (1, 5)
        assert not holds(store, make_chunk(4))


def test_what_is_gone_between_match_and_fetch_is_none(directory):
    with open_store(directory) as store:
        chunk = make_chunk(1)
        (match,) = store.match(MatchQuery(chunk.tokens, (SCOPE,)))
        file_of(directory, chunk).unlink()
        assert store.fetch(match.pages.tolist(), SCOPE) == [None] * 4
        assert store.match(MatchQuery(chunk.tokens, (SCOPE,))) == []
        assert store.counts["missing"] == 1


DAMAGE = {
    "no database": lambda data: b"no database" * 1000,
    "another schema": None,
    "half of it": lambda data: data[: len(data) // 2],
    "a page overwritten": lambda data: data[:4096] + b"\xaa" * 4096 + data[8192:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_catalogue_is_moved_aside(directory, kind, caplog):
    path = directory / CATALOGUE
    if kind == "another schema":
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA user_version = 77")
    else:
        path.write_bytes(DAMAGE[kind](path.read_bytes()))
    (directory / "catalogue.damaged-1").touch()
    with caplog.at_level(logging.WARNING, "kvgraft"), open_store(directory) as store:
        assert store.counts == {"catalogue_damaged": 1, "orphans": 6}
        assert not any(holds(store, make_chunk(seed)) for seed in SEEDS)
        put(store, make_chunk(1))
    assert "catalogue.damaged-2" in caplog.text
    assert (directory / "catalogue.damaged-2").stat().st_size > 0
    with open_store(directory) as store:
        assert [holds(store, make_chunk(seed)) for seed in SEEDS] == [seed == 1 for seed in SEEDS]


def test_a_damaged_catalogue_that_others_use_is_refused(directory):
    with open_store(directory):
        (directory / CATALOGUE).write_bytes(b"no database" * 1000)
        with pytest.raises(CatalogueDamaged, match="not a database"):
            open_store(directory)
        assert not list(directory.glob("catalogue.damaged*"))


def test_without_its_catalogue_the_files_are_orphans(directory):
    for path in directory.glob("catalogue*"):
        path.unlink()
    (directory / "ab").mkdir(exist_ok=True)
    (directory / "ab" / "notes.txt").touch()  # not ours
    (directory / "ab" / "half.tmp").touch()
    with open_store(directory) as store:
        assert store.counts == {"orphans": 6, "temporaries": 1}
        assert len(store) == 0
    assert [path.name for path in directory.glob("??/*")] == ["notes.txt"]


def fail(code):
    def refuse(path, data):
        path.write_bytes(data[:100])
        raise OSError(code, "injected") if code else RuntimeError("a mistake of ours")

    return refuse


@pytest.mark.parametrize("ram_bytes", [0, ROOM])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, None])
def test_a_disk_that_cannot_be_written_costs_only_the_disk(
    tmp_path, monkeypatch, caplog, code, ram_bytes
):
    with open_store(tmp_path, ram_bytes=ram_bytes) as store:
        put(store, make_chunk(0))
        store.flush()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "kvgraft"):
            patch.setattr(files, "write_file", fail(code))
            put(store, make_chunk(1), make_chunk(2))
            store.flush()
        assert store.counts["write_failed"] == 2
        assert caplog.text.count("write_failed") == 2
        assert [holds(store, make_chunk(seed)) for seed in range(3)] == [True] + [ram_bytes > 0] * 2
        assert [path.suffix for path in tmp_path.glob("??/*")] == [".safetensors"]
        assert store.disk_nbytes == file_of(tmp_path, make_chunk(0)).stat().st_size
        # written now, stored or known
        assert store.put(make_chunk(1), make_payload(make_chunk(1))) == (ram_bytes == 0)
        put(store, make_chunk(3))
    with open_store(tmp_path) as store:
        assert [holds(store, make_chunk(seed)) for seed in range(4)] == [True, True, False, True]


def test_a_directory_that_cannot_be_written_is_refused_at_start(tmp_path, monkeypatch):
    def refuse(*given):
        raise PermissionError(errno.EACCES, "injected", str(given[0]))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(PermissionError, match="injected"):
        open_store(tmp_path)


def test_a_catalogue_that_fails_costs_only_the_disk(tmp_path, monkeypatch):
    def refuse(*_):
        raise sqlite3.OperationalError("injected")

    with open_store(tmp_path, ram_bytes=ROOM) as store:
        put(store, make_chunk(0))
        store.flush()
        for name in ("insert", "remove", "set_used", "version"):
            monkeypatch.setattr(Catalogue, name, refuse)
        put(store, make_chunk(1))
        store.drop(make_chunk(0).key)
        store.flush()
        assert [holds(store, make_chunk(seed)) for seed in range(2)] == [False, True]
        assert store.counts["write_failed"] == 1
        assert store.counts["catalogue_failed"] > 0
        monkeypatch.undo()
    assert not list(tmp_path.glob("??/*.tmp"))


def test_a_commit_that_fails_leaves_no_file(tmp_path):
    with open_store(tmp_path, ram_bytes=ROOM) as store:
        with closing(sqlite3.connect(tmp_path / CATALOGUE, isolation_level=None)) as database:
            database.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
            database.execute(
                "CREATE TABLE children (id REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
            )
            database.execute(
                "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN INSERT INTO children VALUES (5); END"
            )
        store._tiers.disk._catalogue._database.execute("PRAGMA foreign_keys = ON")
        put(store, make_chunk(0))
        store.flush()
        assert store.counts["write_failed"] == 1
        assert holds(store, make_chunk(0))
        assert list(tmp_path.glob("??/*")) == []


# Processes


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvgraft.store"])
    return context


def start(processes, target, *arguments):
    mine, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def check_after_death(directory, seeds, disk_bytes):
    """Whatever the store lists must be whole; nothing else may lie in the directory. Returns what
    it has."""
    with StoreDirectory(directory) as kept:
        listed = {row.key for row in kept.list()}
    with open_store(directory, disk_bytes=disk_bytes) as store:
        rest = store.counts.copy()
        held = [seed for seed in seeds if holds(store, make_chunk(seed))]
        assert {make_chunk(seed).key for seed in held} == {row for row in listed if row in store}
        assert len(store) == len(held) >= len(listed) - 1
        store.flush()
        assert {path.stem for path in directory.glob("??/*")} == {
            make_chunk(seed).key.hex() for seed in held
        }
        assert store.counts["damaged"] == store.counts["foreign"] == 0
        put(store, make_chunk(1000))
        store.flush()
        assert holds(store, make_chunk(1000))
    return held, rest


@pytest.mark.parametrize(
    ("moment", "held", "rest"),
    [
        ("while the file is written", [0], {"temporaries": 1}),
        ("before the rename", [0], {"temporaries": 1}),
        ("before the commit", [0], {"orphans": 1}),
        ("after the commit", [0, 1], {}),
        ("while an evicted one is removed", [1, 2], {"missing": 1}),
        ("after an evicted one was removed", [1, 2], {}),
    ],
)
def test_kill_9_leaves_nothing_but_rubbish_that_is_removed(tmp_path, processes, moment, held, rest):
    process, reports = start(processes, put_many, tmp_path, list(range(8)), 3 * FILE, moment)
    process.join(120)
    assert process.exitcode == -9
    reports.close()
    assert check_after_death(tmp_path, range(8), 3 * FILE) == (held, rest)


@pytest.mark.parametrize("count", [1, 5, 17])
def test_kill_9_at_any_time_loses_no_chunk_that_was_flushed(tmp_path, processes, count):
    process, reports = start(processes, put_many, tmp_path, list(range(400)), ROOM, None)
    assert [reports.recv() for _ in range(count)] == list(range(count))
    process.kill()
    process.join(120)
    held, _ = check_after_death(tmp_path, range(400), ROOM)
    assert held[:count] == list(range(count))
    assert len(held) < 400


def test_two_processes_share_a_directory(tmp_path, processes):
    mine, theirs = list(range(24)), list(range(12, 36))  # some are put by both
    ends = [start(processes, share, tmp_path, a, b) for a, b in ((mine, theirs), (theirs, mine))]
    for turn in range(3):
        assert [reports.recv() for _, reports in ends] == [turn] * 2
        for _, reports in ends:
            reports.send("go on")
    for _, reports in ends:
        found, wrong, counts = reports.recv()
        assert (found, wrong) == (list(range(36)), 0)
        assert counts["disk_hits"] > 0
        assert not counts.keys() & {
            "damaged",
            "foreign",
            "missing",
            "write_failed",
            "catalogue_failed",
        }
    for process, reports in ends:
        reports.send("end")
        process.join(120)
        assert process.exitcode == 0
    with open_store(tmp_path) as store:
        assert all(holds(store, make_chunk(seed)) for seed in range(36))
        assert store.counts == {"disk_hits": 4 * 36}


def test_who_lets_go_of_a_directory_leaves_it_to_those_who_have_it(tmp_path, processes):
    """SQLite's own files, too, which the last one to leave removes: locks must tell that it is not
    the last."""
    with open_store(tmp_path) as store:
        for seed in range(4):
            put(store, make_chunk(seed))
            store.flush()
            process, reports = start(processes, look, tmp_path)
            assert reports.recv() == seed + 1
            process.join(120)
            assert process.exitcode == 0
        assert store.counts == {"stored": 4}


# Two stores in one process do as two processes do.


def test_what_one_process_adds_drops_or_pins_the_other_notices(tmp_path):
    first, second = open_store(tmp_path, ram_bytes=ROOM), open_store(tmp_path, disk_bytes=3 * FILE)
    put(first, make_chunk(0), make_chunk(1))
    first.flush()
    assert holds(second, make_chunk(0))
    assert not second.put(make_chunk(1), make_payload(make_chunk(1)))
    assert holds(first, make_chunk(1))
    second.drop(make_chunk(1).key)
    second.flush()
    # looks around, and has the rest looked up
    assert first.match(MatchQuery(make_chunk(7).tokens, (SCOPE,))) == []
    first.flush()
    assert not holds(first, make_chunk(1))  # nor from memory
    first.pin(make_chunk(0).key)
    put(second, *map(make_chunk, range(10, 16)))
    second.flush()
    assert [holds(second, make_chunk(seed)) for seed in (0, 13, 14, 15)] == [
        True,
        False,
        True,
        True,
    ]
    assert holds(first, make_chunk(15))
    first.close()
    second.close()


def test_what_others_have_put_is_told_once_while_it_can_be_found(tmp_path):
    zero, one, two, three, four = map(make_chunk, range(5))
    first = open_store(tmp_path)
    put(first, zero, one)
    first.flush()
    second = open_store(tmp_path)
    assert {record.key for record in second.take_appeared()} == {zero.key, one.key}
    assert second.take_appeared() == []
    put(second, two)
    second.flush()
    put(first, three, four)
    first.flush()
    assert holds(second, four)
    second.drop(four.key)
    assert [record.key for record in second.take_appeared()] == [three.key]
    assert [record.key for record in first.take_appeared()] == [two.key]
    first.close()
    second.close()


def test_a_chunk_replaced_by_another_process_is_missing_not_damaged(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    chunk = make_chunk(1)
    put(first, chunk)
    first.flush()
    number = first.prefix(chunk.chains, SCOPE)
    assert holds(second, chunk)
    second.drop(chunk.key)
    second.flush()
    # as if computed in another batch
    payload = {name: tensor + 1 for name, tensor in make_payload(chunk).items()}
    assert second.put(chunk, payload)
    second.flush()
    assert first.fetch(number, SCOPE) == [None] * 4
    assert first.counts["missing"] == 1
    assert first.counts["damaged"] == 0
    (block, *_) = first.fetch(first.prefix(chunk.chains, SCOPE), SCOPE)
    assert (block.payload["keys"] == payload["keys"][:, :SIZE]).all()
    assert file_of(tmp_path, chunk).exists()
    first.close()
    second.close()


def test_the_first_of_two_processes_with_the_same_chunk_wins(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    chunk = make_chunk(1)
    theirs = {name: tensor + 1 for name, tensor in make_payload(chunk).items()}
    with second._tiers.disk._lock:  # so that its writer waits
        assert second.put(chunk, theirs)
        blocks = second.prefix(chunk.chains, SCOPE)
        put(first, chunk)
        first.flush()
    second.flush()
    assert second.fetch(blocks, SCOPE) == [None] * 4  # they were of a chunk that is not there
    assert second.counts["missing"] == 0
    assert all(holds(store, chunk) for store in (first, second))
    assert second.disk_nbytes == first.disk_nbytes == file_of(tmp_path, chunk).stat().st_size
    assert not list(tmp_path.glob("??/*.tmp"))
    first.close()
    second.close()


def test_nobody_cleans_while_others_write(tmp_path):
    with open_store(tmp_path) as store:
        put(store, make_chunk(1))
        store.flush()
        temporary = file_of(tmp_path, make_chunk(2)).with_suffix(".1.tmp")
        temporary.parent.mkdir(exist_ok=True)
        temporary.touch()
        with open_store(tmp_path) as other:
            assert other.counts == {}
        with (
            StoreDirectory(tmp_path) as kept,
            pytest.raises(RuntimeError, match="in use by another process"),
        ):
            kept.gc()
        assert temporary.exists()
    with open_store(tmp_path) as store:
        assert store.counts == {"temporaries": 1}


# For the operator


def test_an_operator_lists_shows_pins_and_drops(directory):
    with StoreDirectory(directory) as kept:
        rows = kept.list()
        assert {row.key for row in rows} == {make_chunk(seed).key for seed in SEEDS}
        assert kept.list("tenant") != kept.list("nobody") == []
        row = kept.show(make_chunk(3).key.hex()[:20].upper())
        assert row.key == make_chunk(3).key
        assert (row.record.chunk.namespace, row.pinned) == ("tenant", False)
        assert (row.record.chunk.tokens == make_chunk(3).tokens).all()
        assert row.num_bytes == file_of(directory, make_chunk(3)).stat().st_size
        assert row.created <= row.used
        with pytest.raises(KeyError, match="begins with 'xyz'"):
            kept.show("xyz")
        with pytest.raises(ValueError, match="begins 6 keys"):
            kept.show("")
        kept.pin(row.key.hex())
        assert kept.show(row.key.hex()).pinned
        kept.drop(make_chunk(0).key.hex())
        assert not file_of(directory, make_chunk(0)).exists()
        assert kept.verify() == {"whole": 5}
    with open_store(directory, disk_bytes=2 * FILE) as store:
        assert [make_chunk(seed).key in store for seed in SEEDS] == [
            False,
            False,
            False,
            True,
            False,
            True,
        ]


def test_an_operator_finds_and_removes_what_is_bad(directory):
    file_of(directory, make_chunk(1)).unlink()
    file_of(directory, make_chunk(2)).write_bytes(b"rubbish")
    with closing(sqlite3.connect(directory / CATALOGUE)) as database, database:
        database.execute("UPDATE chunks SET record = 'rubbish' WHERE key = ?", (make_chunk(4).key,))
    told = []
    with StoreDirectory(directory) as kept:
        assert kept.verify(lambda *progress: told.append(progress)) == {
            "whole": 3,
            "missing": 1,
            "damaged": 2,
        }
        assert told == [(done, 5) for done in range(1, 6)]
        assert kept.verify() == {"whole": 3}
        assert len(list(directory.glob("??/*"))) == 3


def test_an_operator_collects_rubbish_and_keeps_to_a_budget(directory):
    orphan = file_of(directory, make_chunk(77))
    orphan.parent.mkdir(exist_ok=True)
    orphan.touch()
    with StoreDirectory(directory) as kept:
        kept.pin(make_chunk(0).key.hex())
        assert kept.gc() == {"orphans": 1}
        assert kept.gc(3 * FILE) == {"evicted": 3}
        assert {row.key for row in kept.list()} == {make_chunk(seed).key for seed in (0, 4, 5)}
        assert kept.gc(3 * FILE) == {}
    with open_store(directory) as store:
        assert len(store) == 3


def test_an_operator_is_told_where_nothing_is_stored(tmp_path):
    with pytest.raises(FileNotFoundError, match="no chunks are stored"):
        StoreDirectory(tmp_path)


def test_rows_of_other_blocks_are_passed_by_but_accounted_for(directory):
    with SegmentStore(
        block_size=8, ram_bytes=0, directory=directory, disk_bytes=ROOM, quota=1.0
    ) as store:
        assert (len(store), store.counts) == (0, {"unusable": 6})
        assert store.disk_nbytes > 6 * NBYTES
    with open_store(directory, chunk_blocks=3) as store:
        assert store.counts == {"unusable": 6}
    with SegmentStore(
        block_size=8, ram_bytes=0, directory=directory, disk_bytes=2 * FILE, quota=1.0
    ) as store:
        store.flush()
        assert store.counts == {"unusable": 2, "evicted": 4}
    with open_store(directory) as store:
        assert [holds(store, make_chunk(seed)) for seed in SEEDS] == [False] * 4 + [True] * 2
