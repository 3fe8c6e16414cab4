import json
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chunks import (
    OTHER_SCOPE,
    SIZE,
    file_of,
    holds,
    make_chunk,
    make_chunks,
    make_payload,
    make_tokens,
    put,
)
from kvgraft.cli import app, run
from kvgraft.core.keys import scope_digest
from kvgraft.store import SegmentStore, StoreOptions
from kvgraft.store.files import CATALOGUE
from models import VOCAB_SIZE

HOSTILE = "team [red]\x1b[2J" + "x" * 70
DOCUMENT = (
    "the code of lamp is 42 . the old river slept . x5 = 66 . the home of greta is turin . now "
    "dina came ."
)
QUESTION = f"question : {DOCUMENT} question : code of lamp ? answer :"
Kvgraft = Callable[..., tuple[int, str, str]]


def open_store(directory: Path) -> SegmentStore:
    return SegmentStore(
        block_size=SIZE, ram_bytes=0, directory=directory, disk_bytes=1 << 24, quota=1.0
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three segments of one tenant, in two sequences, and two of another one with a hostile
    name."""
    with open_store(tmp_path / "store") as store:
        put(store, *make_chunks(make_tokens(6, 1), source=1), make_chunk(2))
        put(store, *make_chunks(make_tokens(8, 3), source=3, scope=OTHER_SCOPE, namespace=HOSTILE))
    return tmp_path / "store"


@pytest.fixture
def kvgraft(capsys: pytest.CaptureFixture[str]) -> Iterator[Kvgraft]:
    """Runs a command line: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(app, [*map(str, arguments)])
        return (code, *capsys.readouterr())

    return call


def listed(kvgraft: Kvgraft, directory: Path) -> dict[str, dict[str, Any]]:
    code, printed, _ = kvgraft("store", "list", "--dir", directory, "--json")
    assert code == 0
    return {entry["key"]: entry for entry in json.loads(printed)["chunks"]}


def test_list_tells_whose_segments_there_are(kvgraft: Kvgraft, directory: Path):
    code, printed, _ = kvgraft("store", "list", "--dir", directory, "--json")
    printed_json = json.loads(printed)
    assert code == 0
    assert [entry["used"] for entry in printed_json["chunks"]] == sorted(
        entry["used"] for entry in printed_json["chunks"]
    )
    assert {(e["namespace"], e["tokens"], e["start"]) for e in printed_json["chunks"]} == {
        ("tenant", 16, 0), ("tenant", 8, 16), (HOSTILE, 16, 0), (HOSTILE, 16, 16),
    }  # fmt: skip
    assert {name: (sums["chunks"], sums["tokens"]) for name,
    sums in printed_json["namespaces"].items()} == {
        "tenant": (3, 40), HOSTILE: (2, 32),
    }  # fmt: skip
    assert printed_json["total"]["bytes"] == sum(
        path.stat().st_size for path in directory.rglob("*.safetensors")
    )
    code, printed, _ = kvgraft(
        "store", "list", "--dir", directory, "--namespace", "tenant", "--json"
    )
    assert (len(json.loads(printed)["chunks"]), [*json.loads(printed)["namespaces"]]) == (
        3,
        ["tenant"],
    )


def test_what_is_printed_fits_80_columns_and_commands_no_terminal(
    kvgraft: Kvgraft, directory: Path
):
    key = make_chunk(2).key.hex()
    kvgraft("store", "pin", key, "--dir", directory)
    for command in (["list"], ["show", key], ["show", next(iter(listed(kvgraft, directory)))]):
        code, printed, _ = kvgraft("store", *command, "--dir", directory)
        assert code == 0
        assert max(map(len, printed.splitlines())) <= 80
        assert "\x1b" not in printed
    _, printed, _ = kvgraft("store", "list", "--dir", directory)
    assert "[red]" in printed
    assert re.search(rf"{key[:12]} +tenant +16 +0 +0\.00 +yes +\d+ s ago +\d+ s ago", printed)
    assert re.search(r"total +5 +72 +0\.0\d +1", printed)


def test_show_tells_everything(kvgraft: Kvgraft, directory: Path):
    chunk = make_chunk(2)
    code, printed, _ = kvgraft("store", "show", chunk.key.hex()[:16], "--dir", directory, "--json")
    printed_json = json.loads(printed)
    assert code == 0
    assert (
        printed_json["key"],
        printed_json["source"],
        printed_json["blocks"],
        printed_json["block_size"],
    ) == (
        chunk.key.hex(),
        2,
        4,
        SIZE,
    )
    assert printed_json["tensors"]["residual"] == "float32 [1, 16, 10]"
    assert (printed_json["scope"], printed_json["int8"], printed_json["token_ids"]) == (
        chunk.scope.hex(),
        False,
        chunk.tokens.tolist(),
    )
    assert "text" not in printed_json


def test_show_prints_the_text_if_the_model_is_named(
    kvgraft: Kvgraft, directory: Path, model_dirs: dict[str, Path]
):
    [chunk] = make_chunks(
        make_tokens(1, 9) % (VOCAB_SIZE - 3) + 3, source=9, scope=scope_digest("tiny", "words")
    )
    with open_store(directory) as store:
        put(store, chunk)
    words = " ".join(f"w{token}" for token in chunk.tokens)
    show = ("store", "show", chunk.key.hex(), "--dir", directory, "--model", model_dirs["qwen3"])
    assert json.loads(kvgraft(*show, "--json")[1])["text"] == words
    assert kvgraft(*show)[1].splitlines()[-1] == words
    code, printed, error = kvgraft("store", "show", make_chunk(2).key.hex(), *show[3:])
    assert (code, printed) == (2, "")
    assert f"is none of the {VOCAB_SIZE} of {model_dirs['qwen3']}" in error


def test_pin_unpin_and_drop_take_several_keys(kvgraft: Kvgraft, directory: Path):
    one, two, *_ = keys = [*listed(kvgraft, directory)]
    code, printed, _ = kvgraft("store", "pin", one[:10], two, one, "--dir", directory)
    assert (code, printed.count(" pinned: ")) == (0, 2)
    assert {key for key, entry in listed(kvgraft, directory).items() if entry["pinned"]} == {
        one,
        two,
    }
    code, printed, _ = kvgraft("store", "unpin", two, "--dir", directory, "--json")
    assert [(entry["key"], entry["pinned"]) for entry in json.loads(printed)] == [(two, False)]
    assert {key for key, entry in listed(kvgraft, directory).items() if entry["pinned"]} == {one}
    assert kvgraft("store", "drop", two, "nothing", "--dir", directory)[0] == 2
    assert [*listed(kvgraft, directory)] == keys
    assert kvgraft("store", "drop", one, two, "--dir", directory)[0] == 0
    assert [*listed(kvgraft, directory)] == keys[2:]


@pytest.mark.parametrize("rank", [None, 1])
def test_drop_removes_from_a_shared_tier_and_all_who_share_it(
    kvgraft: Kvgraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None
):
    monkeypatch.setattr("kvgraft.store.shared.PERIOD_S", 0.1)
    base, url = tmp_path / "store", f"file://{tmp_path / 'shared'}"
    directory = base if rank is None else base / f"rank-{rank}"
    with StoreOptions(base, ram_gib=0, disk_gib=0.1, shared_url=url, rank=rank).open(SIZE) as store:
        put(store, make_chunk(1), make_chunk(2))
        store.flush()
        for url_of_nothing in ("nothing://host", "redis://localhost:1/0"):
            code = kvgraft(
                "store",
                "drop",
                make_chunk(1).key.hex(),
                "--dir",
                directory,
                "--shared",
                url_of_nothing,
            )[0]
            assert (code, len(listed(kvgraft, directory))) == (2, 2)
        assert (
            kvgraft("store", "drop", make_chunk(1).key.hex(), "--dir", directory, "--shared", url)[
                0
            ]
            == 0
        )
        deadline = time.monotonic() + 60.0
        while -1 not in store.prefix(make_chunk(1).chains, make_chunk(1).scope):
            assert time.monotonic() < deadline
    assert [*listed(kvgraft, directory)] == [make_chunk(2).key.hex()]
    for path in directory.glob("catalogue*"):  # all but the secret
        path.unlink()
    with StoreOptions(base, ram_gib=0, disk_gib=0.1, shared_url=url, rank=rank).open(SIZE) as store:
        assert [holds(store, make_chunk(seed)) for seed in (1, 2)] == [False, True]


def test_verify_fails_once_if_something_was_bad(kvgraft: Kvgraft, directory: Path):
    assert kvgraft("store", "verify", "--dir", directory)[:2] == (0, "5 whole\n")
    file_of(directory, make_chunk(2)).write_bytes(b"nonsense")
    code, printed, _ = kvgraft("store", "verify", "--dir", directory)
    assert (code, printed) == (1, "4 whole, 1 damaged: 1 removed\n")
    code, printed, _ = kvgraft("store", "verify", "--dir", directory, "--json")
    assert (code, json.loads(printed)) == (
        0,
        {"whole": 4, "missing": 0, "damaged": 0, "foreign": 0},
    )


def test_gc_removes_what_is_left_over_or_too_much(kvgraft: Kvgraft, directory: Path):
    pinned, *_ = keys = [*listed(kvgraft, directory)]
    kvgraft("store", "pin", pinned, "--dir", directory)
    (file_of(directory, make_chunk(2)).parent / "half.tmp").touch()
    assert kvgraft("store", "gc", "--dir", directory)[:2] == (0, "removed: 1 temporaries\n")
    assert kvgraft("store", "gc", "--dir", directory)[:2] == (0, "nothing to remove\n")
    assert [*listed(kvgraft, directory)] == keys
    code, printed, _ = kvgraft("store", "gc", "--dir", directory, "--disk-gib", 0, "--json")
    assert (code, json.loads(printed)["evicted"]) == (0, 4)
    assert [*listed(kvgraft, directory)] == [pinned]


def test_gc_of_a_quota(kvgraft: Kvgraft, directory: Path):
    total = json.loads(kvgraft("store", "list", "--dir", directory, "--json")[1])["total"]["bytes"]
    assert (
        kvgraft("store", "gc", "--dir", directory, "--disk-gib", 2 * total / 2**30)[1]
        == "nothing to remove\n"
    )
    kvgraft("store", "gc", "--dir", directory, "--disk-gib", 2 * total / 2**30, "--quota", 0.2)
    printed_json = json.loads(kvgraft("store", "list", "--dir", directory, "--json")[1])
    assert all(0 < sums["bytes"] <= 0.4 * total for sums in printed_json["namespaces"].values())
    assert len(printed_json["namespaces"]) == 2


def test_a_store_in_use_takes_notice_but_is_not_cleaned(kvgraft: Kvgraft, directory: Path):
    chunk = make_chunk(2)
    with open_store(directory) as store:
        assert kvgraft("store", "drop", chunk.key.hex(), "--dir", directory)[0] == 0
        code, printed, error = kvgraft("store", "gc", "--dir", directory)
        assert (code, printed) == (2, "")
        assert error == f"kvgraft: {directory} is in use by another process: stop it first\n"
        assert store.fetch(store.prefix(chunk.chains, chunk.scope), chunk.scope) == [None] * 4
        assert store.put(chunk, make_payload(chunk))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "zzz"], "no stored chunk has a key that begins with 'zzz'"),
        (["pin", ""], "a key must have at least one digit"),
        (["unpin"], "Missing argument 'KEY...'"),
        (["gc", "--quota", "0.5"], "--quota 0.5 is a share of --disk-gib: give that, too"),
        (["gc", "--disk-gib", "-1"], "--disk-gib must be a number of at least 0, got -1.0"),
        (["gc", "--disk-gib", "nan"], "--disk-gib must be a number of at least 0, got nan"),
        (["gc", "--disk-gib", "1", "--quota", "2"], "quota must be in (0, 1], got 2.0"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(
    kvgraft: Kvgraft, directory: Path, arguments: list[str], message: str
):
    before = listed(kvgraft, directory)
    code, printed, error = kvgraft("store", *arguments, "--dir", directory)
    assert (code, printed) == (2, "")
    assert error.startswith("kvgraft: ")
    assert message in error
    assert error.count("\n") == 1
    assert listed(kvgraft, directory) == before


def test_an_ambiguous_key_is_refused(kvgraft: Kvgraft, tmp_path: Path):
    with open_store(tmp_path / "store") as store:
        put(store, *(make_chunk(seed) for seed in range(17)))  # so two begin with the same digit
    digits = [key[0] for key in listed(kvgraft, tmp_path / "store")]
    digit = next(digit for digit in digits if digits.count(digit) > 1)
    code, _, error = kvgraft("store", "drop", digit, "--dir", tmp_path / "store")
    assert code == 2
    assert f"'{digit}' begins {digits.count(digit)} keys" in error
    assert len(listed(kvgraft, tmp_path / "store")) == 17


def test_a_directory_without_a_store_is_refused(kvgraft: Kvgraft, tmp_path: Path):
    for command in (
        ["list"],
        ["show", "a"],
        ["pin", "a"],
        ["unpin", "a"],
        ["drop", "a"],
        ["verify"],
        ["gc"],
    ):
        error = kvgraft("store", *command, "--dir", tmp_path / "nowhere")[2]
        assert error == f"kvgraft: {tmp_path / 'nowhere'} is not a directory\n"
        error = kvgraft("store", *command, "--dir", tmp_path)[2]
        assert error == f"kvgraft: no chunks are stored in {tmp_path}: it has no {CATALOGUE}\n"
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_cannot_be_used_is_refused(kvgraft: Kvgraft, directory: Path):
    directory.chmod(0o755)
    assert "is open to others" in kvgraft("store", "list", "--dir", directory)[2]
    directory.chmod(0o700)
    database = sqlite3.connect(directory / CATALOGUE)
    database.execute("PRAGMA user_version = 9")
    database.close()
    code, _, error = kvgraft("store", "list", "--dir", directory)
    assert (code, error) == (
        2,
        f"kvgraft: the catalogue of {directory} cannot be used: schema 9, expected 1\n",
    )
    (directory / CATALOGUE).write_bytes(b"nonsense" * 1000)
    assert "file is not a database" in kvgraft("store", "list", "--dir", directory)[2]


def test_a_directory_of_something_else_stays_as_it_is(kvgraft: Kvgraft, tmp_path: Path):
    tmp_path.chmod(0o700)
    database = sqlite3.connect(tmp_path / CATALOGUE)
    database.execute("CREATE TABLE theirs (x)")
    database.commit()
    database.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for command in (["list"], ["show", "ab"], ["gc"], ["verify"], ["pin", "ab"]):
        code, _, error = kvgraft("store", *command, "--dir", tmp_path)
        assert (code, error) == (
            2,
            f"kvgraft: the catalogue of {tmp_path} cannot be used: schema 0, expected 1\n",
        )
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_generate_finds_what_an_earlier_call_has_read(kvgraft: Kvgraft, tmp_path: Path):
    document, store = tmp_path / "document.txt", tmp_path / "store"
    document.write_text(DOCUMENT)
    ask = ("generate", QUESTION, "--max-tokens", 1, "--store", store)
    first = json.loads(kvgraft(*ask, "--read", document, "--json")[1])
    assert (first["restored_blocks"], first["text"]) == (0, "42")
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    again = json.loads(kvgraft(*ask, "--json")[1])
    assert (again["restored_blocks"], again["text"]) == (
        again["report"]["grafted_tokens"] // 16,
        "42",
    )
    assert again["report"]["grafted_tokens"] == first["report"]["grafted_tokens"] >= 16
    code, printed, _ = kvgraft(*ask, "--read", document)  # comes back when the document is read
    assert code == 0
    assert f"; {again['restored_blocks']} blocks restored" in " ".join(printed.split())
    nobody = json.loads(kvgraft(*ask, "--namespace", "nobody", "--json")[1])
    assert (nobody["restored_blocks"], nobody["report"]["grafted_tokens"]) == (0, 0)
    assert {entry["namespace"] for entry in listed(kvgraft, store).values()} == {
        "default",
        "nobody",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store-gib", "2"], "--store-gib 2.0 is the size of --store: give that, too"),
        (
            ["--store", "x", "--store-gib", "-2"],
            "disk_gib must be a number above 0, got -2.0",
        ),
        (["--store", "x", "--store-gib", "0"], "disk_gib must be a number above 0, got 0.0"),
    ],
)
def test_what_generate_refuses_of_a_store(
    kvgraft: Kvgraft,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    code, printed, error = kvgraft("generate", "the code", *arguments)
    assert (code, printed) == (2, "")
    assert message in error
    assert [*tmp_path.iterdir()] == []
