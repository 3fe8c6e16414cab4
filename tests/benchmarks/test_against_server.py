"""The load generator and the soak against a real server on the bundled model."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, cast

import httpx
import pytest
import typer
from typer.testing import CliRunner

import serve
import soak
from kvgraft.server.process import Server
from kvgraft_lab.testbed import MODEL_DIR
from load import Client, Outcome, drive, local_tokenizer, words_of
from scenarios import pauses_of_streams
from servers import ServerOptions, start
from soak_traffic import Traffic
from workload import Ask, Shape, make_workload, single_token_words

pytestmark = pytest.mark.slow
KEYS, ADMIN = ["first-key", "second-key", "third-key"], "admin-key"
LENGTH = 2048
WORDS = single_token_words(*local_tokenizer(MODEL_DIR))
FLAGS = ("--served-model-name", "bundled", "--num-gpu-blocks-override", "128", "--api-key", *KEYS)
GUARD = ("--kvgraft-guard", "0.5", "--kvgraft-guard-tokens", "1000000")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServerOptions(MODEL_DIR, max_model_len=LENGTH, flags=(*FLAGS, *GUARD))
    with start(options, environment={"KVGRAFT_ADMIN_KEY": ADMIN}) as server:
        yield server


def run_command(server: Server, *arguments: str) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(serve.main)
    result = CliRunner().invoke(
        app, ["--url", server.api, "--api-key", KEYS[0], "--json", *arguments]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_mixed_load_is_answered_and_mostly_reused(server: Server):
    shape = (
        "--tokens",
        "320",
        "--reuse",
        "0.9",
        "--max-tokens",
        "6",
        "--requests",
        "9",
        "--concurrency",
        "2",
    )
    summary = run_command(server, "--workload", "mixed", "--rate", "20", *shape)["summary"]
    assert summary["requests"] == 9
    assert summary["errors"] == {}
    assert 0.5 < summary["grafted"] <= summary["cached"] <= 0.95
    assert summary["worst_gap_s"] >= summary["gap_s"]["p99"] >= summary["gap_s"]["median"] > 0


def test_options_reach_the_server(server: Server):
    known = (
        "--workload",
        "rag",
        "--tokens",
        "400",
        "--max-tokens",
        "2",
        "--requests",
        "2",
        "--seed",
        "5",
    )
    off = run_command(server, *known, "--kvgraft", '{"reuse": "off"}')["summary"]
    assert off["grafted"] == 0.0
    assert sum(off["reasons"].values()) == 2
    app = typer.Typer()
    app.command()(serve.main)
    refused = CliRunner().invoke(app, ["--url", server.api, "--compare"])
    assert refused.exit_code == 2
    assert "--url has no meaning with --compare" in " ".join(refused.output.split())


def test_the_endpoint_itself_tells_its_words(server: Server):
    assert set(words_of(None, server.api, "bundled", KEYS[0])) == set(WORDS)


def test_answers_stand_in_later_prompts(server: Server):
    asks = make_workload("agents", Shape(500, 0.8, 8), 4, WORDS, 1)

    async def run() -> list[Outcome]:
        async with Client(server.api, api_key=KEYS[1], extra={"ignore_eos": True}) as client:
            return await drive(client, asks, [0.0] * 4, concurrency=4)

    outcomes = asyncio.run(run())
    assert all(o.error is None and o.output_tokens == 8 and len(o.gaps_s) <= 7 for o in outcomes)
    *team, judge = outcomes
    begin = len(local_tokenizer(MODEL_DIR)[0](" ".join(o.text for o in team)))
    assert judge.prompt_tokens == 500 - 3 * 8 + begin, "as many tokens as the answers have as text"
    assert judge.start_s >= max(o.end_s for o in team)
    assert judge.report is not None
    assert judge.report["prompt_tokens"] == judge.prompt_tokens


def test_a_refused_request_is_an_error_and_no_figure(server: Server):
    [ask] = make_workload("rag", Shape(LENGTH + 10, 0.0, 1), 1, WORDS, 0)

    async def run(key: str) -> Outcome:
        async with Client(server.api, api_key=key, model="bundled") as client:
            return await client.ask(ask)

    assert "BadRequestError" in str(asyncio.run(run(KEYS[0])).error)
    assert "AuthenticationError" in str(asyncio.run(run("nobody")).error)


def test_pauses_are_those_of_the_streams(server: Server):
    prompts = make_workload("rag", Shape(1500, 0.0, 1), 2, WORDS, 8)

    async def run(tokens: int, max_tokens: int) -> tuple[list[float], list[Outcome]]:
        streams = make_workload("rag", Shape(tokens, 0.0, max_tokens), 2, WORDS, 7)
        async with Client(server.api, api_key=KEYS[2], extra={"ignore_eos": True}) as client:
            return await pauses_of_streams(client, streams, prompts)

    for max_tokens in (1500, 7):  # the short ones are over many times before the prompts are read
        pauses, outcomes = asyncio.run(run(32, max_tokens))
        assert [o.prompt_tokens for o in outcomes] == [1500, 1500]
        assert min(pauses) > 0
    with pytest.raises(RuntimeError, match="a request failed: BadRequestError"):
        asyncio.run(run(LENGTH + 10, 8))


def test_a_pause_that_lasts_to_the_end_counts():
    class Silent:
        """Decodes as long as no prompt comes, and then waits for it."""

        async def ask(
            self, ask: Ask, on_token: Callable[[float], object] = lambda _: None
        ) -> Outcome:
            if ask.kind == "prompt":
                return Outcome("prompt", 10.0, 17.0, 17.5)
            for at in (1.0, 2.0, 3.0, 9.0, 11.0):
                on_token(at)
            return await asyncio.get_running_loop().create_future()

    asks = [Ask("stream", (), 9)], [Ask("prompt", (), 1)]
    pauses, _ = asyncio.run(pauses_of_streams(cast(Client, Silent()), *asks))
    assert pauses == [2.0, 6.0], (
        "the last one from the token at 11 to the first of the prompt at 17"
    )


@pytest.mark.soak
def test_a_short_soak_breaks_nothing_and_notices_what_is_wrong(server: Server):
    async def run() -> tuple[soak.Result, Traffic]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            traffic = Traffic(http, "bundled", KEYS, ADMIN, WORDS, LENGTH, seed=0)
            bounds = dict.fromkeys((soak.API_SERVER, soak.ENGINE, soak.WORKER), 1e9)
            result = await soak.soak(
                server, traffic, 10.0, workers=12, max_requests=72, max_growth=bounds
            )
            wrong = [replace(fixed, answer=f"{fixed.answer} more") for fixed in traffic.fixed[:2]]
            traffic.fixed = wrong
            await traffic.check_all_fixed(soak.Random(0))
            return result, traffic

    result, traffic = asyncio.run(run())
    depends_on_speed = ("no preemption", "no aborts")  # in so short a time
    assert [
        what for what in result.broken if not any(word in what for word in depends_on_speed)
    ] == []
    assert result.pool["used"] == result.pool["pinned"] > 0
    assert json.loads(json.dumps(asdict(result)))["broken"] == result.broken
    assert result.metrics["kvgraft:requests_total[grafted]"] > 0
    assert set(result.rss_mib) == {soak.API_SERVER, soak.ENGINE, soak.WORKER}
    assert all(samples[-1][1] > 100 for samples in result.rss_mib.values())
    assert traffic.findings.broken["a plain answer differs from that of the fresh server"] == 2
