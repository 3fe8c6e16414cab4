"""Reading anew between requests: when, how much at a time, and how it gives way."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running import ALICE, BOB, RunningServer, running
from test_server import QUESTION, complete

from kvgraft.server import idle_refresher
from kvgraft.server.arguments import parse
from kvgraft.server.call import Call
from kvgraft.server.idle_refresher import CHUNK, IdleRefresher
from kvgraft.server.keys import API_KEY
from kvgraft.server.server_state import ServerState
from kvgraft.vllm.options import READ, REFRESH, Control

TEXT = list(range(2 * CHUNK + 100))
LIMIT_S = 120.0  # of a wait that never lasts as long unless something is wrong


class Engine:
    """Has texts to read; while `holds` is set a reading does not end by itself."""

    def __init__(self, *texts: list[int], engines: int = 1) -> None:
        self.texts, self.engines = list(texts), range(engines)
        self.asked: list[int | None] = []  # engines that were asked for a text
        self.log: list[tuple[str, str, int]] = []  # operation, cache key, tokens
        self.is_idle, self.holds, self.fails = True, False, False
        self.aborted = asyncio.Event()
        self.running = 0
        self.before_request: Callable[[], Any] | None = None

    async def operate(
        self, call: Call, control: Control, token_ids: list[int], request_id: str
    ) -> dict[str, Any]:
        assert call.low_priority
        assert call.salt
        if self.fails:
            raise RuntimeError("the engine is dead")
        if control.op == REFRESH:
            self.asked.append(call.engine)
            return (
                {"tokens": self.texts[0], "cache_salt": "whose it is"}
                if self.texts
                else {"tokens": []}
            )
        self.log.append((control.op, call.salt, len(token_ids)))
        self.aborted.clear()
        self.running += 1
        while self.holds and not self.aborted.is_set():
            await asyncio.sleep(0)
        self.running -= 1
        if self.aborted.is_set():
            return {}
        if token_ids == self.texts[0]:
            self.texts.pop(0)
        return {"num_tokens": len(token_ids)}

    async def abort(self, request_id: str) -> None:
        assert request_id.startswith("kvgraft-read-")
        self.aborted.set()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_refresher, "IDLE_S", 0.0)


def run(engine: Engine, story: Callable[[IdleRefresher], Any]) -> None:
    async def told() -> None:
        reader = IdleRefresher(engine)  # type: ignore[arg-type]
        assert engine.before_request == reader.stop
        await asyncio.wait_for(story(reader), LIMIT_S)

    asyncio.run(told())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def some_time() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_texts_are_read_in_pieces_when_a_request_has_come_and_gone():
    engine = Engine(TEXT, [1, 2, 3])
    lengths = [CHUNK, 2 * CHUNK, len(TEXT), 3]

    async def story(reader: IdleRefresher) -> None:
        await some_time()
        assert engine.log == [], "nothing was asked of the server yet"
        await reader.stop()
        await until(lambda: not engine.texts)
        assert engine.log == [(READ, "whose it is", length) for length in lengths]

    run(engine, story)


def test_each_engine_is_asked_for_its_texts():
    engine = Engine([1, 2, 3], engines=3)

    async def story(reader: IdleRefresher) -> None:
        await reader.stop()
        await until(lambda: engine.asked == [0, 0, 1, 2])

    run(engine, story)


def test_nothing_is_read_while_requests_are_in_flight():
    engine = Engine(TEXT)

    async def story(reader: IdleRefresher) -> None:
        engine.is_idle = False
        await reader.stop()
        await some_time()
        assert engine.log == []
        engine.is_idle = True
        await until(lambda: not engine.texts)

    run(engine, story)


def test_a_request_ends_the_reading_before_it_goes_on_and_the_text_is_read_later():
    engine = Engine(TEXT)

    async def story(reader: IdleRefresher) -> None:
        engine.holds = True
        await reader.stop()
        await until(lambda: engine.running == 1)
        engine.is_idle = False
        await asyncio.gather(reader.stop(), reader.stop())
        assert engine.running == 0
        await some_time()
        assert [length for _, _, length in engine.log] == [CHUNK]
        engine.holds, engine.is_idle = False, True
        await until(lambda: not engine.texts)

    run(engine, story)


def test_an_engine_that_fails_is_asked_no_more_and_requests_go_on():
    engine = Engine(TEXT)

    async def story(reader: IdleRefresher) -> None:
        engine.fails = True
        await reader.stop()
        await until(reader._task.done)
        engine.fails = False
        await reader.stop()
        await some_time()
        assert engine.log == []

    run(engine, story)


@pytest.mark.parametrize(
    "flags", [[], ["--kvgraft-idle-refresh", "0"], ["--kvgraft-idle-refresh", "0.1"]]
)
def test_a_server_reads_anew_only_if_asked_to(monkeypatch: pytest.MonkeyPatch, flags: list[str]):
    monkeypatch.delenv(API_KEY, raising=False)

    async def connected() -> ServerState:
        entrances: dict[str, Any] = {"generate": None, "reset_prefix_cache": None, "add_lora": None}
        entrances["output_processor"] = SimpleNamespace(process_outputs=None)
        entrances["engine_core"] = SimpleNamespace(add_request_async=None, core_engines=[b"0"])
        state = ServerState(parse(flags))
        entrances["vllm_config"] = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m"),
            cache_config=None,
        )
        entrances["is_paused"] = asyncio.Event().wait
        state.connect(SimpleNamespace(**entrances))
        return state

    state = asyncio.run(connected())
    listens = getattr(state.engine_client.before_request, "__self__", None)
    assert isinstance(listens, IdleRefresher) == ("0.1" in flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kvgraft-idle-refresh", "1.5"], "idle_refresh must be a share from 0 to 1, got 1.5"),
        (["--kvgraft-idle-refresh", "0.1", "--enable-sleep-mode"], "must not read"),
        (
            ["--kvgraft-idle-refresh", "0.1", "--no-kvgraft"],
            "does not go with --kvgraft-idle-refresh",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parse(flags)


@pytest.fixture(scope="module")
def reading_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`kvgraft serve` with two tenants that reads as many tokens anew as requests bring."""
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--kvgraft-costs", "tokens"]
    arguments += ["--kvgraft-idle-refresh", "1.0", "--kvgraft-exactness-weight", "0"]
    log: Path = tmp_path_factory.mktemp("reading_server") / "log"
    with running(arguments, log, dict(os.environ)) as started:
        yield started


def num_read(server: RunningServer) -> int:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return int(
        sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("kvgraft:idle_refresh_tokens_total{")
        )
    )


def grafted(server: RunningServer, key: str, document: str, number: int) -> tuple[int, int]:
    """What is grafted by a prompt that holds the document somewhere, and the depth of what its
    answer rests on."""
    report = complete(server, key, f"note grey means {number} . {document} {QUESTION}")[1]
    return report["grafted_tokens"], report["depth"]


def read_behind(server: RunningServer, texts: Any, key: str, num_tokens: int) -> tuple[str, int]:
    """A document that is read behind a graft, and then grafted; and how many tokens of it."""
    known, document = texts.document(), texts.document(num_tokens)
    complete(server, key, known)
    report = complete(server, key, f"the old river slept . {known} {document} {QUESTION}")[1]
    assert (report["outcome"], report["reason"], report["depth"]) == ("grafted", None, 1)
    num_grafted, depth = grafted(server, key, document, 51)
    assert depth == 2
    return document, num_grafted


def wait_until_read(server: RunningServer, least: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while num_read(server) < least:
        assert time.monotonic() < deadline, f"{num_read(server)} of {least} tokens were read"
        time.sleep(0.02)  # the wait between two looks


@pytest.mark.slow
def test_between_requests_popular_text_becomes_exact_for_its_tenant_alone(
    reading_server: RunningServer, texts: Any
):
    document, num_tokens = read_behind(reading_server, texts, ALICE, 600)
    assert num_tokens >= 500
    before = reading_server.status(ALICE)["totals"]["requests"]
    wait_until_read(reading_server, num_tokens)
    assert grafted(reading_server, ALICE, document, 53)[1] == 1
    cached, report = complete(reading_server, BOB, f"note grey means 54 . {document} {QUESTION}")
    assert (cached, report["grafted_tokens"]) == (0, 0)
    after = reading_server.status(ALICE)["totals"]["requests"]
    assert sum(after.values()) == sum(before.values()) + 1, "it is no request"
    assert all(entry["route"] for entry in reading_server.status(ALICE)["recent"])


@pytest.mark.soak
def test_requests_that_come_meanwhile_are_answered_and_it_is_read_in_the_end(
    reading_server: RunningServer, texts: Any
):
    before = num_read(reading_server)
    document, num_tokens = read_behind(reading_server, texts, ALICE, 3500)
    wait_until_read(reading_server, before + 1)  # it has begun
    for number in range(60, 65):
        assert (
            complete(reading_server, BOB, f"note grey means {number} . {QUESTION}")[1]["outcome"]
            == "miss"
        )
    wait_until_read(reading_server, before + num_tokens)
    assert grafted(reading_server, ALICE, document, 75)[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("op", [REFRESH, READ])
def test_a_client_cannot_send_what_the_reader_sends(reading_server: RunningServer, op: str):
    params = {"kvgraft": {"control": {"op": op, "name": "", "token": ""}}}
    with reading_server.http(ALICE) as client:
        body = {"model": "bundled", "prompt": "the", "kv_transfer_params": params}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "no option 'control'" in answer.json()["error"]["message"]
