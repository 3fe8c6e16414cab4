"""A server that only takes time: what a fleet needs of `kvgraft serve`, with a wait in place of a
model.

Its prompts are words, one token each. Pieces of a prompt that it has read before cost nothing; the
others are waited for, one prompt after the other. An answer tells how long its first token was
waited for. `routing.py` starts it."""

import argparse
import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

PIECE = 16  # words
BLOCK = 16  # tokens of a block of the pool that it tells of
DECODE_S = 0.01  # of each token but the first
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",num_gpu_blocks="{blocks}"}} 1.0
# TYPE kvgraft:cost_seconds gauge
kvgraft:cost_seconds{{of="pass"}} 0.0
kvgraft:cost_seconds{{of="token"}} {token_s}
kvgraft:cost_seconds{{of="pair"}} 0.0
kvgraft:cost_seconds{{of="copy"}} 0.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total {tokens}
"""


class StandIn:
    """One server.

    Args:
        pool: tokens that it holds.
        speed: tokens a second that it reads.
    """

    def __init__(self, pool: int, speed: float) -> None:
        self._pool, self._token_s = pool, 1 / speed
        self._held: OrderedDict[str, None] = OrderedDict()
        self._free_at, self._num_tokens = 0.0, 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                names = {
                    name.lower(): value
                    for name, _, value in (line.partition(":") for line in head[1:])
                }
                body = await reader.readexactly(int(names.get("content-length", 0)))
                path = head[0].split(" ")[1]
                if path == "/metrics":
                    told = {"block": BLOCK, "blocks": self._pool // BLOCK, "token_s": self._token_s}
                    writer.write(
                        _whole(
                            "text/plain", METRICS.format(**told, tokens=self._num_tokens).encode()
                        )
                    )
                elif path == "/v1/completions":
                    await self._complete(json.loads(body), writer)
                else:
                    writer.write(_whole("text/plain", b""))
                await writer.drain()

    async def _complete(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        events = self._answer(request["prompt"].split(), request.get("max_tokens", 1))
        if not request.get("stream"):
            *_, last = [event async for event in events]
            writer.write(_whole("application/json", json.dumps(last).encode()))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n"
        )
        async for event in events:
            writer.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        writer.write(_chunk(b"data: [DONE]\n\n") + _chunk(b""))

    async def _answer(self, words: list[str], max_tokens: int) -> AsyncGenerator[dict[str, Any]]:
        """One event for each token."""
        begun = time.perf_counter()
        num_known = self._read(words)
        self._free_at = max(self._free_at, begun) + (len(words) - num_known) * self._token_s
        await asyncio.sleep(self._free_at - time.perf_counter())
        choices = [{"index": 0, "text": " word", "finish_reason": None}]
        usage = {"prompt_tokens": len(words), "known_tokens": num_known}
        yield {"choices": choices, "usage": usage, "waited_s": time.perf_counter() - begun}
        for _ in range(max_tokens - 1):
            await asyncio.sleep(DECODE_S)
            yield {"choices": choices, "usage": usage}

    def _read(self, words: list[str]) -> int:
        """How many of these were known; all are then."""
        num_known = 0
        for start in range(0, len(words), PIECE):
            piece = words[start : start + PIECE]
            text = " ".join(piece)
            num_known += len(piece) * (text in self._held)
            self._held[text] = None
            self._held.move_to_end(text)
        while len(self._held) > self._pool // PIECE:
            self._held.popitem(last=False)
        self._num_tokens += len(words)
        return num_known


def _whole(kind: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pool", type=int)
    parser.add_argument("--speed", type=float)
    given, _ = parser.parse_known_args()  # others are those of `kvgraft serve`
    standin = StandIn(given.pool, given.speed)
    server = await asyncio.start_server(standin.talk, given.host, given.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
