"""Tenants and the segment store, through HTTP: what one has sent is no hit for the other in any
tier; for itself it is.

The same server is started twice on one directory; what is in the pool, in host memory and on disk
is asked for in turn."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from running import ADMIN, ALICE, BOB, RunningServer, running

from kvgraft.engine.text import load_tokenizer
from kvgraft.server.tenancy import Tenant
from kvgraft.store import StoreDirectory
from kvgraft_lab.testbed import MODEL_DIR

pytestmark = pytest.mark.slow
BLOCKS = 128  # of 32 tokens in the pool: two texts of 2000 tokens fill it


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "store"


def start(directory: Path, log: Path) -> Any:
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--max-model-len", "3072"]
    arguments += ["--num-gpu-blocks-override", str(BLOCKS), "--kvgraft-match", "similar:tau=0.3"]
    arguments += ["--kvgraft-store-dir", str(directory), "--kvgraft-store-ram-gib", "1"]
    return running(arguments, log, {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN})


@pytest.fixture(scope="module")
def first(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start(directory, tmp_path_factory.mktemp("first") / "log") as server:
        yield server


def reused(server: RunningServer, key: str, prompt: str) -> int:
    """Tokens of a prompt that came from any cache, as vLLM and our report say."""
    answer = server.openai(key).completions.create(
        model="bundled", prompt=prompt, max_tokens=1, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    report = (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]
    assert (
        report["prefix_tokens"] + report["grafted_tokens"]
        == answer.usage.prompt_tokens_details.cached_tokens
    )
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def events(server: RunningServer) -> dict[str, float]:
    """What the store has counted."""
    with server.http(None) as client:
        lines = client.get("/metrics").text
    found = re.findall(r'kvgraft:store_total\{.*event="(\w+)".*\} ([\d.e+]+)', lines)
    return {event: float(count) for event, count in found}


def wait_until_stored(directory: Path, documents: list[str]) -> None:
    """Files are written behind the answers."""
    deadline = time.monotonic() + 60.0
    wanted = {tuple(tokens[:256]) for tokens in map(load_tokenizer(MODEL_DIR).encode, documents)}
    while time.monotonic() < deadline:
        with StoreDirectory(directory) as stored:
            if wanted <= {tuple(row.record.chunk.tokens[:256].tolist()) for row in stored.list()}:
                return
        time.sleep(0.1)
    raise AssertionError("the documents were not written")


def moved(document: str) -> str:
    return f"note grey means 51 . the old river slept . {document}"


def edited(document: str) -> str:
    """Every 25th word replaced: no block of 32 tokens is left."""
    return " ".join(
        "river" if place % 25 == 24 else word for place, word in enumerate(document.split())
    )


def test_the_pool(first: RunningServer, texts: Any):
    for change in (moved, edited):
        document = texts.document()
        assert reused(first, ALICE, document) == 0
        assert reused(first, BOB, change(document)) == 0
        assert reused(first, ALICE, change(document)) > 400


@pytest.mark.soak
def test_host_memory(first: RunningServer, texts: Any):
    for change in (moved, edited, str):
        document = texts.document()
        reused(first, ALICE, document)
        flood(first, texts)
        before = events(first).get("ram_hits", 0)
        assert reused(first, BOB, change(document)) == 0
        assert events(first).get("ram_hits", 0) == before
        flood(first, texts)
        assert reused(first, ALICE, change(document)) > 400
        assert events(first)["ram_hits"] > before


def flood(server: RunningServer, texts: Any) -> None:
    """Push everything out of the pool."""
    for _ in range(2):
        reused(server, BOB, texts.document(2000))


def test_disk_and_a_second_server(directory: Path, tmp_path: Path, texts: Any):
    """Documents of a generator of its own, so that this test stands alone. The last one is read
    when both are there."""
    texts = type(texts)()
    texts._rng = Random(7)
    *documents, late = [texts.document() for _ in range(4)]
    with start(directory, tmp_path / "first") as one:
        for document in documents:
            reused(one, ALICE, document)
        wait_until_stored(directory, documents)
        with start(directory, tmp_path / "second") as two:
            for change, document in zip((moved, edited, str), documents, strict=True):
                check_disk(two, change(document))
            reused(one, ALICE, late)
            wait_until_stored(directory, [late])
            reused(two, BOB, texts.document())  # what others have written is told in its steps
            check_disk(two, moved(late))
    with StoreDirectory(directory) as stored:
        assert {row.record.chunk.namespace for row in stored.list()} == {
            Tenant.of(key).label for key in (ALICE, BOB)
        }
    assert (directory.stat().st_mode & 0o777, (directory / "secret").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def check_disk(server: RunningServer, prompt: str) -> None:
    """One tenant's text comes from the disk for that tenant alone."""
    before = events(server).get("disk_hits", 0)
    assert reused(server, BOB, prompt) == 0
    assert events(server).get("disk_hits", 0) == before
    assert reused(server, ALICE, prompt) > 400
    assert events(server)["disk_hits"] > before
