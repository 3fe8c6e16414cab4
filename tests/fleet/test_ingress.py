"""Streams that an ingress passes on, from a replica that only plays one."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import pytest

from kvgraft.fleet.ingress import Ingress
from kvgraft.server.keys import Keys

EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]
WHOLE = b"".join(EVENTS)


def passed_on(
    chunks: Sequence[bytes], path: str = "/v1/completions", *, fails: bool = False
) -> list[bytes]:
    """What a client gets of a stream in these chunks, whose replica may fail behind them."""

    async def answer() -> AsyncIterator[bytes]:
        for chunk in chunks[1:]:
            yield chunk
        if fails:
            raise ConnectionError

    async def collect() -> list[bytes]:
        replicas = SimpleNamespace(options=lambda **_: None)
        ingress = Ingress(replicas, Keys(), ["base"], bytes(32))  # type: ignore[arg-type]
        return [part async for part in ingress._events(chunks[0], answer(), path)]

    return asyncio.run(collect())


@pytest.mark.parametrize("size", [1, 5, 16, 20, 100])
def test_a_stream_arrives_as_it_was_sent_in_whole_events(size: int):
    parts = passed_on([WHOLE[start : start + size] for start in range(0, len(WHOLE), size)])
    assert b"".join(parts) == WHOLE
    assert all(part.endswith(b"\n\n") for part in parts)


def test_what_stands_behind_the_last_event_arrives_too():
    assert b"".join(passed_on([WHOLE, b": a comment\n"])) == WHOLE + b": a comment\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stop", [5, 16, 20])
def test_the_error_of_a_replica_is_an_event_of_its_own(stop: int, path: str):
    body = b"".join(passed_on([WHOLE[:3], WHOLE[3:stop]], path, fails=True))
    *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert events == [EVENTS[0].strip()] * (stop >= len(EVENTS[0]))
    *names, data = last.splitlines()
    # clients of these routes read an event by its name
    assert names == ([] if path == "/v1/completions" else [b"event: error"])
    found = json.loads(data.removeprefix(b"data: "))
    assert (found["type"], found["error"]["code"]) == ("error", 503)
