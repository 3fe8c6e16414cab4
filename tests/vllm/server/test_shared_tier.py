"""Two servers on two machines, as far as they know: what one has read the other finds at the place
that they share."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from running import ALICE, BOB, RunningServer, running
from test_store import events, moved, reused

from kvgraft.store.secret import CACHE_SECRET
from redis_server import RedisServer, needs_redis, redis_server

pytestmark = [pytest.mark.slow, needs_redis]
CHUNK = 256  # tokens


def start(shared: RedisServer, folder: Path) -> Any:
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--max-model-len", "3072"]
    arguments += ["--kvgraft-store-dir", str(folder / "store"), "--kvgraft-store-ram-gib", "1"]
    arguments += ["--kvgraft-store-shared", shared.url, "--kvgraft-store-shared-timeout", "30"]
    folder.mkdir()
    return running(arguments, folder / "log", {**os.environ, CACHE_SECRET: "5e" * 32})


def answer(server: RunningServer, prompt: str) -> tuple[str, int, int]:
    """What is answered, the tokens of the prompt, and how many of them are exact reused ones."""
    said = server.openai(ALICE).completions.create(
        model="bundled", prompt=prompt, max_tokens=24, temperature=0
    )
    assert said.usage is not None
    report = (said.model_extra or {})["kv_transfer_params"]["kvgraft"]
    return said.choices[0].text, said.usage.prompt_tokens, report["prefix_tokens"]


def test_a_server_finds_what_another_one_has_read_before_it_ended(tmp_path: Path, texts: Any):
    document, late = texts.document(1500), texts.document(900)
    with redis_server(tmp_path) as shared, start(shared, tmp_path / "second") as server:
        reused(server, ALICE, texts.document())  # it has said what it holds, and waits
        with start(shared, tmp_path / "first") as first:
            num_before = len(shared.client.keys("kvgraft:*/*"))
            expected, num_tokens, num_reused = answer(first, document)
            assert num_reused == 0
            num_late = answer(first, late)[1]
            deadline = time.monotonic() + 60.0
            while (
                len(shared.client.keys("kvgraft:*/*"))
                < num_before + num_tokens // CHUNK + num_late // CHUNK
            ):
                assert time.monotonic() < deadline, "the documents were not written"
                time.sleep(0.1)
        time.sleep(3.0)  # in which the other one has looked
        found, _, num_reused = answer(server, document)
        assert found == expected
        assert num_reused >= num_tokens // CHUNK * CHUNK
        assert reused(server, ALICE, moved(late)) > 400
        counts = events(server)
        assert counts["shared_hits"] >= (num_tokens // CHUNK + num_late // CHUNK) * CHUNK // 32
        assert reused(server, BOB, document) == reused(server, BOB, moved(late)) == 0
        assert events(server)["shared_hits"] == counts["shared_hits"]
        assert not any(
            counts.get(f"shared_{reason}") for reason in ("late", "failed", "damaged", "forged")
        )
        for log in tmp_path.glob("*/log"):
            assert "5e" * 32 not in log.read_text()
