"""One server of a fleet: a `kvgraft serve` process, and what passes requests on to it and tells what it holds."""

import os
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from json import dumps
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import zmq

from kvgraft.evaluate.servers import Server, serving
from kvgraft.fleet.asks import Ask
from kvgraft.fleet.expected import BYTES_PER_TOKEN
from kvgraft.fleet.holdings import Beginnings, EventBatch, Holdings
from kvgraft.fleet.ranking import Report
from kvgraft.prefill.costs import TOKENS, Costs

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"})
CONNECT_S = 10.0
Head = tuple[int, tuple[tuple[str, str], ...]]  # status and headers of an answer


class EventReader:
    """Follows the events of a vLLM server in a thread of its own.

    Args:
        endpoint: where ZeroMQ finds them.
        holdings: takes what they say; to be read under `lock` alone.
    """

    def __init__(self, endpoint: str, holdings: Holdings) -> None:
        self.lock = threading.Lock()
        self._holdings, self._ended = holdings, threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 200)  # milliseconds, after which it looks whether it is to end
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="kvgraft-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more."""
        self._ended.set()
        self._thread.join()
        self._socket.close(0)

    def _run(self) -> None:
        decoder, last = msgspec.msgpack.Decoder(EventBatch), -1
        while not self._ended.is_set():
            try:
                _, number, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            with self.lock:
                if int.from_bytes(number) != last + 1:
                    self._holdings.clear()  # what was missed is not known
                last = int.from_bytes(number)
                self._holdings.take(decoder.decode(payload))


class Replica:
    """A server, started with these arguments of `kvgraft serve`, and ended with this object.

    Raises:
        RuntimeError: it did not start; the message holds the end of its log.
    """

    def __init__(self, model: str, arguments: Sequence[str], environment: Mapping[str, str], costs: Costs = TOKENS):
        from transformers import AutoTokenizer

        self._open = ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-")))
        endpoint = f"ipc://{folder / 'events'}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        self._costs = costs
        self._server: Server = self._open.enter_context(
            serving(model, *arguments, "--kv-events-config", dumps(events), environment=environment)
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._holdings = Holdings(tokenizer.decode, model)
        self._reader = EventReader(endpoint, self._holdings)
        self._open.callback(self._reader.close)
        self._session: aiohttp.ClientSession | None = None
        self._beginnings = Beginnings()
        self._waiting_bytes = 0  # of prompts that have no token yet

    async def __call__(self, ask: Ask) -> AsyncGenerator[Head | bytes]:
        """Pass a request on: first the head of the answer, then its body as it comes."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        headers = [(name, value) for name, value in ask.headers if name not in HOP_BY_HOP]
        num_bytes = ask.text.num_bytes if ask.text is not None else 0
        self._waiting_bytes += num_bytes
        try:
            async with self._session.request(
                ask.method, self._server.url + ask.target, headers=headers, data=ask.body, allow_redirects=False
            ) as answer:
                kept = [(n, v) for n, v in answer.headers.items() if n.lower() not in HOP_BY_HOP]
                yield answer.status, tuple(kept)
                async for chunk in answer.content.iter_any():
                    if num_bytes and answer.status == HTTPStatus.OK:
                        self._beginnings.add(ask.text)
                    self._waiting_bytes, num_bytes = self._waiting_bytes - num_bytes, 0
                    yield chunk
        finally:
            self._waiting_bytes -= num_bytes

    def record_routing_stats(self) -> dict[str, Any]:
        """What Ray Serve hands to routers."""
        with self._reader.lock:
            sketches = self._holdings.sketch(), self._beginnings.sketch(self._holdings)
            per_token = self._holdings.bytes_per_token or BYTES_PER_TOKEN
        tokens = self._waiting_bytes / per_token
        waiting_s = float(self._costs.computing(tokens, np.array(tokens**2 / 2))) if tokens else 0.0
        return Report(*sketches, waiting_s, self._costs, bytes_per_token=per_token).as_stats()

    async def check_health(self) -> None:
        """Ray Serve replaces a replica of which this raises."""
        if self._server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self._server.process.returncode}")

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self._open.close()


def environment_of_replica() -> dict[str, str]:
    """What its server is to find in its environment."""
    return {name: os.environ[name] for name in ("KVGRAFT_API_KEYS", "KVGRAFT_ADMIN_KEY") if name in os.environ}
