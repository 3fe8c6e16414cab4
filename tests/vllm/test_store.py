"""The segment store inside vLLM: blocks that were evicted, or computed by an earlier server, come
back."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from engines import EVERYTHING, NAIVE, OFF
from families import make_family
from jobs import KNOWN, MOVED
from jobs import graft as run

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.server.tenancy import Salts, Tenant
from kvgraft.store import StoreDirectory, StoreOptions
from kvgraft.vllm.connector.metadata import Load, StoreOrders, StoreReport
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.connector.store_scheduler import StoreScheduler
from kvgraft.vllm.connector.store_worker import StoreWorker
from kvgraft.vllm.options import Control
from kvgraft_lab.testbed import MODEL_DIR
from models import make_adapter

if TYPE_CHECKING:
    from kvgraft.core.admission import Admission
    from kvgraft.vllm.compat.model import ModelHost
    from kvgraft.vllm.pool import SharedPool


def flood(seed: int) -> list[list[int]]:
    """Texts that push all others out of the pool."""
    return [np.random.default_rng(seed + n).integers(10, 470, 900).tolist() for n in range(2)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What is answered to both prompts without any reuse."""
    return [answers[0]["tokens"] for answers in run([KNOWN, MOVED], [OFF], [])]


@pytest.mark.slow
def test_evicted_blocks_come_back_from_host_memory(plain: list[list[int]]):
    read = [KNOWN, *flood(5)]
    moved, known = run([MOVED, KNOWN], [NAIVE, EVERYTHING, OFF], read, store_ram_gib=1)
    assert moved[0]["report"]["grafted_tokens"] == moved[1]["report"]["grafted_tokens"] >= 544
    assert known[-1]["report"]["prefix_tokens"] == 576
    assert [known[-1]["tokens"], moved[1]["tokens"]] == plain


@pytest.mark.slow
def test_without_a_store_they_are_gone():
    [[without]] = run([MOVED], [NAIVE], [KNOWN, *flood(5)])
    assert without["report"]["grafted_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("int8", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_second_server_goes_on_with_what_the_first_one_read(
    plain: list[list[int]], tmp_path: Path, int8: bool
):
    settings = {
        "store_dir": str(tmp_path / "store"),
        "store_int8": int8,
        "match": "similar:tau=0.4",
        "residual_layers": [3],
    }
    run([], [], [KNOWN], **settings)
    with StoreDirectory(tmp_path / "store") as stored:
        assert sum(len(row.record.chunk.tokens) for row in stored.list()) == 608  # with the answer
    edited = [(token + 1) % 470 if place % 30 == 29 else token for place, token in enumerate(MOVED)]
    options = [{"policy": "similar:reused_layers=3,probe_tokens=0"}, EVERYTHING, OFF]
    similar, moved, known = run([edited, MOVED, KNOWN], options, [], **settings)
    assert similar[0]["report"]["grafted_tokens"] > 450
    assert moved[0]["report"]["grafted_tokens"] >= 544
    assert moved[1]["tokens"] == plain[1]
    assert known[-1]["report"]["prefix_tokens"] == (0 if int8 else 576)
    assert int8 or known[-1]["tokens"] == plain[0]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_adapter_has_read_is_found_again_by_that_adapter(tmp_path: Path, ranks: int):
    store, paths = (
        str(tmp_path / "store"),
        [make_adapter(tmp_path / name, MODEL_DIR, seed=ord(name)) for name in "ab"],
    )
    run([], [], [KNOWN], ranks, paths[:1], store_dir=store)
    for path in paths:
        path.rename(path.with_name(f"{path.name} elsewhere"))
    a, b = (path.with_name(f"{path.name} elsewhere") for path in paths)
    [moved] = run([MOVED], [EVERYTHING, OFF], [], ranks, [a, b, None], store_dir=store)
    assert [answer["report"]["grafted_tokens"] >= 544 for answer in moved] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert moved[0]["tokens"] == moved[1]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", pytest.param("Gemma 3", marks=pytest.mark.soak)])
def test_a_model_with_windows_gets_all_its_layers_back(tmp_path: Path, family: str):
    engine = {
        "model": str(make_family(family, tmp_path / "model")),
        "prefix_cache_retention_interval": None,
        "num_gpu_blocks_override": 41 * 4,  # at most four groups of layers share them
    }
    plain = [answers[0]["tokens"] for answers in run([KNOWN, MOVED], [OFF], [], engine=engine)]
    store = str(tmp_path / "store")
    run([], [], [KNOWN], engine=engine, store_dir=store)
    options = [NAIVE, EVERYTHING, OFF]
    moved, known = run([MOVED, KNOWN], options, [], engine=engine, store_dir=store)
    assert moved[0]["report"]["grafted_tokens"] == moved[1]["report"]["grafted_tokens"] >= 544
    assert known[-1]["report"]["prefix_tokens"] == 576
    assert [known[-1]["tokens"], moved[1]["tokens"]] == plain


@pytest.mark.slow
def test_damaged_and_vanished_payloads_are_computed_again(plain: list[list[int]], tmp_path: Path):
    run([], [], [KNOWN], store_dir=str(tmp_path / "store"))
    for number, path in enumerate(sorted((tmp_path / "store").rglob("*.safetensors"))):
        if number % 2:
            path.unlink()
            continue
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    moved, known = run([MOVED, KNOWN], [EVERYTHING, OFF], [], store_dir=str(tmp_path / "store"))
    assert [known[-1]["tokens"], moved[0]["tokens"]] == plain
    assert moved[0]["report"]["grafted_tokens"] == 0


def test_what_is_stored_says_whose_it_is():
    salt = Salts().of(Tenant.of("key"), "wiki")
    request = SimpleNamespace(cache_salt=salt, all_token_ids=list(range(32)))
    state = RequestState(request, Control("list"), BlockProvenance(scope_digest("model", salt)))
    state.provenance.num_registered = 2
    index = SimpleNamespace(cuts=(None, []))
    pool = SimpleNamespace(
        block_size=16,
        acquire=lambda pages: None,
        tables_of=lambda pages: np.array([pages]),
        complete=lambda pages: np.ones(len(pages), bool),
    )
    known = SimpleNamespace(index=index, pool=pool)
    stored = StoreScheduler(cast("Admission[SharedPool]", known), num_ranks=1)
    stored.keep(state, [5, 6], ended=True)
    [keep] = stored.take_orders().keeps
    assert keep.chunk.namespace == f"{Tenant.of('key').label}/wiki"


def test_a_load_that_fails_is_a_miss():
    """Of the one and of no other."""
    side = StoreWorker(
        cast("ModelHost", SimpleNamespace(block_size=16)), StoreOptions(ram_gib=1), 0, 1
    )
    places = [(b"unknown", 0), (b"unknown", 1)]
    unreadable = Load(1, [("no bytes", 0, 0)], np.array([[5]]))  # type: ignore[list-item]
    for number, load in enumerate((unreadable, Load(2, places, np.array([[6, 7]])))):
        side.step(StoreOrders(loads=[load]))
        loaded: list[tuple[int, list[bool]]] = []
        while not loaded:
            side.step(StoreOrders())
            loaded = (side.take_report() or StoreReport()).loaded
        assert loaded == [(number + 1, [False] * (number + 1))]
    side.close()


@pytest.mark.soak
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank")
def test_each_of_two_ranks_has_a_store_of_its_own(plain: list[list[int]], tmp_path: Path):
    store = str(tmp_path / "store")
    run([], [], [KNOWN], ranks=2, store_dir=store)
    assert sorted(path.name for path in (tmp_path / "store").glob("rank-*")) == ["rank-0", "rank-1"]
    moved, known = run([MOVED, KNOWN], [EVERYTHING, OFF], [], ranks=2, store_dir=store)
    assert moved[0]["report"]["grafted_tokens"] >= 544
    assert known[-1]["report"]["prefix_tokens"] == 576
    assert [known[-1]["tokens"], moved[0]["tokens"]] == plain
