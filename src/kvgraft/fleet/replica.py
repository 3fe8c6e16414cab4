"""One server of a fleet: a `kvgraft serve` process, and what passes requests on to it and tells
what it holds."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from http import HTTPStatus
from typing import Any

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import get_deployment_handle, get_replica_context
from yarl import URL

from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.expected import BYTES_PER_TOKEN, expect
from kvgraft.fleet.figures import ReplicaFigures
from kvgraft.fleet.ranking import HEARTBEAT, ReplicaReport
from kvgraft.fleet.replica_contents import ReplicaContents
from kvgraft.fleet.requests import FleetRequest, Head, ServerFailed, end_to_end
from kvgraft.fleet.state_log import CHANGE_S, RESET, ReplayedState, StateLog, removes
from kvgraft.prefill.costs import TOKENS, Costs
from kvgraft.reuse.cost import WORK
from kvgraft.segments.fingerprints import Fingerprints
from kvgraft.vllm.server.process import KVGRAFT, running

DECAY = 0.9  # weight of earlier prompts in the latency ratio, with each new one
FASTEST, SLOWEST = 1e-6, 1e3  # costs may be given in tokens instead of seconds


LEFT_OUT = ("date", "server")  # of answers: whoever answers the client sends these
CONNECT_S = 10.0
READ_S = 1800.0  # between two parts of an answer; one that is no stream comes as a whole
LOOK = aiohttp.ClientTimeout(total=10.0)  # for which its metrics and its health are waited for
FAILED_CHECKS = 3  # of health, in a row, after which Ray replaces a replica
IDLE_S = 2.0  # that a connection is kept; servers of vLLM end it after 5
# that are asked for all the time
QUIET = ("--disable-access-log-for-endpoints", "/health,/metrics")
METRICS_S = 5.0  # between two looks at the metrics of the server
POOL_TOKENS = 1 << 18  # until the server has said how large its pool is
TOKEN_BYTES = (0.5, 32.0)  # between which the length of a token of text is believed
START_S = 1800.0  # a large model may be fetched first
STOP_S = 10.0  # in which a server has to end that has nothing in flight, or that nobody waits for
REPLICA = "Replica"  # name of the deployment of servers
INGRESS = "Ingress"  # name of the deployment that keeps the changes of state
STATE_S = 10.0  # to wait for the changes of state of other servers
AGAIN_S = 10.0  # after which it is asked again: by then all know of this server
logger = logging.getLogger("ray.serve")


class Replica:
    """A server, started with these arguments of `kvgraft serve`, and ended with this object.

    If the server ends, this process does, too: whoever sees to replicas starts another one.

    Args:
        environment: that the server gets beside ours.
        alike: what this machine must have as those have who take requests.
        program: see `running`.

    Raises:
        ValueError: it has not.
        RuntimeError: it did not start.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        alike: EnvironmentCheck,
        program: Sequence[str] = KVGRAFT,
    ) -> None:
        alike.check()
        self._open = ExitStack()
        server = running(
            [*arguments, *QUIET],
            environment,
            program=program,
            start_timeout_s=START_S,
            stop_timeout_s=STOP_S,
        )
        self._server = self._open.enter_context(server)
        self._name = get_replica_context().replica_id.unique_id
        self._is_closing = threading.Event()
        threading.Thread(target=self._end_with_server, name="kvgraft-server", daemon=True).start()
        self._session: aiohttp.ClientSession | None = None
        self._costs, self._bytes_per_token, self._pool_tokens = (
            TOKENS,
            BYTES_PER_TOKEN,
            float(POOL_TOKENS),
        )
        self._held = ReplicaContents(self._pool_tokens * self._bytes_per_token)
        # expected seconds of prefill of requests without an answer so far
        self._waiting: dict[int, float] = {}
        self._latency = LatencyCalibration()
        self._num_requests = self._num_bytes = 0  # sent to the server; of their prompts
        self._looked = 0.0
        self._state_log, self._changing = StateLog(), asyncio.Lock()
        self._taking_over: asyncio.Task[None] | None = None
        self._figures = ReplicaFigures()
        self._failed_checks = 0  # in a row

    async def __call__(self, request: FleetRequest) -> AsyncGenerator[Head | bytes]:
        """Pass a request on: first the head of the answer, then its body as it comes. Raises
        ServerFailed."""
        number, text, is_read, is_stream = self._num_requests, request.text, False, False
        self._num_requests += 1
        started, expected_s = time.monotonic(), 0.0
        if text is not None:
            self._waiting[number] = self._prefill_s(text)
            expected_s = sum(self._waiting.values())
        try:
            async with aclosing(self._answer(request)) as answer:
                async for part in answer:
                    if isinstance(part, Head):
                        # or it was refused
                        is_read, is_stream = part.status == HTTPStatus.OK, part.is_stream
                    elif (
                        self._waiting.pop(number, None) is not None and text is not None and is_read
                    ):
                        self._num_bytes += text.num_bytes
                        self._held.add(text)
                        if is_stream:  # others come with their last token
                            self._latency.add(expected_s, time.monotonic() - started)
                    yield part
        except aiohttp.ClientError as error:
            raise ServerFailed(self._name) from error
        finally:
            self._waiting.pop(number, None)

    async def once(self, request: FleetRequest) -> tuple[Head, bytes]:
        """The whole answer to what changes the state of every server, one change after the other.
        Raises TimeoutError, ClientError."""
        async with asyncio.timeout(CHANGE_S), self._changing:
            return await self._change(request)

    async def end(self) -> None:
        """End the server, and all of its processes."""
        self._is_closing.set()
        await asyncio.to_thread(self._open.close)

    async def replayed_state(self) -> ReplayedState:
        """Return the changes of state that this server has made."""
        return self._state_log.state

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Ray Serve hands to routers."""
        if time.monotonic() - self._looked > METRICS_S:
            await self._look()
        text, beginnings = self._held.sketches()
        report = ReplicaReport(
            text,
            beginnings,
            waiting_s=sum(self._waiting.values()),
            costs=self._costs,
            bytes_per_token=self._bytes_per_token,
            pace=self._latency.value,
            beat=int(time.time() // HEARTBEAT),
        )
        return report.as_stats()

    async def describe(self) -> dict[str, Any]:
        """For people."""
        text, beginnings = self._held.sketches()
        return {
            "name": self._name,
            "requests": self._num_requests,
            "prompt_bytes": self._num_bytes,
            "fingerprints": len(self._held),
            "sketch_bytes": len(text) + len(beginnings),
            "waiting": len(self._waiting),
            "waiting_s": sum(self._waiting.values()),
            "pace": self._latency.value,
            "pool_tokens": self._pool_tokens,
            "bytes_per_token": self._bytes_per_token,
            "pid": os.getpid(),
            "server_pid": self._server.process.pid,
        }

    async def metrics(self) -> tuple[str, str]:
        """Its name, and the metrics of its server as they are shown."""
        async with self._http().get(f"{self._server.url}/metrics", timeout=LOOK) as answer:
            answer.raise_for_status()
            return self._name, await answer.text() + generate_latest(
                self._figures.registry
            ).decode()

    async def check_health(self) -> None:
        """Ray Serve replaces a replica of which this raises, and sends nothing to one that it has
        not asked yet."""
        if self._is_closing.is_set():  # no other one is wanted
            return
        try:
            async with self._http().get(f"{self._server.url}/health", timeout=LOOK) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError):
            self._failed_checks += 1
            if self._failed_checks == FAILED_CHECKS:
                # Ray would wait for what is in flight and then kill this process only: an engine
                # that is frozen notices no parent that is gone, and would keep its memory.
                with suppress(ProcessLookupError):
                    os.killpg(self._server.process.pid, signal.SIGKILL)
            raise
        self._failed_checks = 0
        if self._taking_over is None:
            await self._take_over()
            self._taking_over = asyncio.create_task(self._take_over(AGAIN_S))

    async def _take_over(self, after_s: float = 0.0) -> None:
        """Repeat the changes of state of other servers."""
        await asyncio.sleep(after_s)
        try:
            ingresses = await asyncio.to_thread(
                get_deployment_handle, INGRESS, get_replica_context().app_name
            )
            answers = await ask_all(ingresses, "replayed_state", within_s=STATE_S)
        except KeyError:  # the fleet is just being started
            return
        except Exception:  # whatever Ray raises: this server can do without
            logger.exception("the changes of state of other servers are not known")
            return
        for key, request in self._state_log.news(
            state for state in answers if not isinstance(state, BaseException)
        ):
            try:
                async with asyncio.timeout(CHANGE_S), self._changing:
                    if not self._state_log.is_new(key, request):  # it was made here meanwhile
                        continue
                    head, body = await self._change(request)
                is_done = not self._state_log.is_new(key, request)
                is_done |= removes(request) and head.status == HTTPStatus.NOT_FOUND
                said = f"{head.status} {body[:200]!r}"
            except (aiohttp.ClientError, TimeoutError) as error:
                is_done, said = False, repr(error)
            self._figures.taken_over.labels("done" if is_done else "failed").inc()
            if not is_done:
                logger.error(
                    "%s, a change that other servers have made, failed here: %s",
                    " ".join(key),
                    said,
                )

    async def _change(self, request: FleetRequest) -> tuple[Head, bytes]:
        parts: list[Any] = []
        async with aclosing(self._answer(request)) as answer:
            parts += [part async for part in answer]
        head, body = parts[0], b"".join(parts[1:])
        if self._state_log.note(request, head, body) and request.target.startswith(RESET):
            self._held.clear()
        return head, body

    async def _answer(self, request: FleetRequest) -> AsyncGenerator[Head | bytes]:
        url = URL(self._server.url + request.target, encoded=True)  # as the client has written it
        async with self._http().request(
            request.method,
            url,
            headers=end_to_end(request.headers),
            data=request.body,
            allow_redirects=False,
        ) as answer:
            yield Head(answer.status, end_to_end(answer.headers.items(), *LEFT_OUT))
            async for chunk in answer.content.iter_any():
                yield chunk

    def _http(self) -> aiohttp.ClientSession:
        """Made in the event loop that it is used in."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),  # clients have nothing in common
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                auto_decompress=False,
            )
        return self._session

    def _prefill_s(self, text: Fingerprints) -> float:
        held, begun = self._held.holds(text)
        expected = expect(
            text,
            held[None],
            begun[None],
            self._costs,
            work=WORK,
            bytes_per_token=self._bytes_per_token,
        )
        return float(expected.prefill_s[0])

    async def _look(self) -> None:
        """Learn from the metrics of the server: its pool, its costs, and how long its tokens
        are."""
        self._looked = time.monotonic()
        costs: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.metrics())[1]):
            for name, labels, value, *_ in family.samples:
                if name == "vllm:cache_config_info":
                    self._pool_tokens = float(labels["num_gpu_blocks"]) * float(
                        labels["block_size"]
                    )
                elif name == "kvgraft:cost_seconds":
                    costs[f"{labels['of']}_s"] = value
                elif name == "vllm:prompt_tokens_total" and value and self._num_bytes:
                    self._bytes_per_token = min(
                        max(self._num_bytes / value, TOKEN_BYTES[0]), TOKEN_BYTES[1]
                    )
        if costs and (learned := Costs(**costs)) != self._costs:
            self._costs, self._latency = learned, LatencyCalibration()
        self._held.resize(self._pool_tokens * self._bytes_per_token)

    def _end_with_server(self) -> None:
        code = self._server.process.wait()
        if not self._is_closing.is_set():
            print(f"the server ended with {code}", flush=True)
            self._open.close()  # ends its engine, too, which would keep its memory
            os._exit(1)  # what is on its way here ends with an error, and is tried elsewhere

    def __del__(self) -> None:
        if hasattr(self, "_is_closing"):
            self._is_closing.set()
            self._open.close()


class LatencyCalibration:
    """Of one server; 1 until it has answered. Expected and real seconds are summed, so long prompts
    count for more."""

    def __init__(self) -> None:
        self._expected = self._real = 0.0

    @property
    def value(self) -> float:
        """Real seconds to an expected one."""
        return min(max(self._real / self._expected, FASTEST), SLOWEST) if self._expected else 1.0

    def add(self, expected_s: float, real_s: float) -> None:
        """A prompt had its first token after so many seconds."""
        self._expected = DECAY * self._expected + expected_s
        self._real = DECAY * self._real + real_s
