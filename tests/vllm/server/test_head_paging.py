"""Heads that keep sinks and a window, on a server, whose scheduler runs in another process than its
model."""

import os
from pathlib import Path
from typing import Any

import pytest
from running import RunningServer, running

from kvgraft import Engine, Request, SamplingParams
from kvgraft.engine.text import load_tokenizer
from kvgraft_lab.testbed import MODEL_DIR

pytestmark = pytest.mark.slow
EVERYTHING = {"policy": "spread", "recompute_share": 1.0}


def test_a_server_keeps_sinks_and_grafts(texts: Any, tmp_path: Path):
    encode = load_tokenizer(MODEL_DIR).encode
    known = [encode(texts.document(300)) for _ in range(2)]
    prompt = (
        encode(texts.document(70))
        + known[1]
        + encode(texts.document(60))
        + known[0]
        + encode("code of")
    )
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    native = Engine(MODEL_DIR, dtype="float32", head_paging=True)
    [truth] = native.generate([Request(prompt, "full", sampling)])
    arguments = [
        "-m",
        "kvgraft",
        "serve",
        "--kvgraft-head-paging",
        "--dtype",
        "float32",
        "--kvgraft-costs",
        "tokens",
    ]
    with running(
        [*arguments, "--num-gpu-blocks-override", "400"], tmp_path / "log", os.environ
    ) as server:
        assert ask(server, prompt, {"reuse": "off"}, salt="plain")[0] == truth.token_ids
        for text in known:
            ask(server, text, {"reuse": "off"})
        for options in (EVERYTHING, {"policy": "redknot:reuse=off,mass_share=1.0"}):
            tokens, report = ask(server, prompt, options)
            assert tokens == truth.token_ids
            assert report["grafted_tokens"] == report["recomputed_tokens"] > 480
        _, report = ask(server, prompt, {"policy": "naive"})
        assert (report["outcome"], report["recomputed_tokens"]) == ("grafted", 0)


def ask(
    server: RunningServer, prompt: list[int], options: dict[str, Any], salt: str = ""
) -> tuple[list[int], Any]:
    """The answer and the report."""
    body = {
        "model": "bundled",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True, "kv_transfer_params": {"kvgraft": options}}
    body |= {"cache_salt": salt} if salt else {}
    with server.http(None) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]["kvgraft"]
