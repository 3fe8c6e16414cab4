"""Replica of a fleet: a `kvgraft serve` process, and the actor that feeds it and reports its
contents."""

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

from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import TOKENS, Costs
from kvgraft.core.expected_prefill import BYTES_PER_TOKEN, expect
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.figures import ReplicaFigures
from kvgraft.fleet.ranking import HEARTBEAT, ReplicaReport
from kvgraft.fleet.replica_contents import ReplicaContents
from kvgraft.fleet.requests import FleetRequest, Head, ServerFailed, end_to_end
from kvgraft.fleet.state_log import CHANGE_S, RESET, ReplayedState, StateLog, removes
from kvgraft.server.process import KVGRAFT, running

# factor on the earlier sums of the latency ratio with each new prompt
DECAY = 0.9
# limits of the ratio; it is far from 1 if costs are given in tokens instead of seconds
FASTEST, SLOWEST = 1e-6, 1e3


# headers of the server's answers that are dropped, because the ingress's server adds its own
LEFT_OUT = ("date", "server")
CONNECT_S = 10.0
# seconds between two parts of an answer; an answer without a stream has one part
READ_S = 1800.0
# time to wait for the server's metrics and health
LOOK = aiohttp.ClientTimeout(total=10.0)
# failed health checks in a row after which Ray replaces a replica
FAILED_CHECKS = 3
# time for which an idle connection is kept; vLLM's servers close it after 5 s
IDLE_S = 2.0
# no access log for routes that are polled
QUIET = ("--disable-access-log-for-endpoints", "/health,/metrics")
# seconds between two readings of the server's metrics
METRICS_S = 5.0
# assumed size of the KV pool until the server reports it
POOL_TOKENS = 1 << 18
# plausible range of the bytes per token of text
TOKEN_BYTES = (0.5, 32.0)
# includes the time to fetch a large model
START_S = 1800.0
# time in which a server without running requests must end
STOP_S = 10.0
# name of the deployment of servers
REPLICA = "Replica"
# name of the deployment that keeps the changes of state
INGRESS = "Ingress"
# time to wait for the changes of state of other servers
STATE_S = 10.0
# time before a second request for the changes; by then all ingresses know this replica
AGAIN_S = 10.0
logger = logging.getLogger("ray.serve")


class Replica:
    """One server of a fleet, which starts and ends with this object.

    If the server ends by itself, this process exits, so that Ray starts another replica.

    Args:
        arguments: of `kvgraft serve`.
        environment: added to the environment of this process.
        environment_check: check that this machine has the same environment as the ingresses.
        program: see `running`.

    Raises:
        ValueError: the environment differs.
        RuntimeError: the server did not start.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        environment_check: EnvironmentCheck,
        program: Sequence[str] = KVGRAFT,
    ) -> None:
        environment_check.check()

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
        # expected prefill seconds of the requests without a first token, by number
        self._waiting: dict[int, float] = {}
        self._latency = LatencyCalibration()
        # totals of the requests sent to the server, and of the bytes of their prompts
        self._num_requests = self._num_bytes = 0
        self._looked = 0.0
        self._state_log, self._changing = StateLog(), asyncio.Lock()
        self._taking_over: asyncio.Task[None] | None = None
        self._figures = ReplicaFigures()
        # health checks that failed in a row
        self._failed_checks = 0

    async def __call__(self, request: FleetRequest) -> AsyncGenerator[Head | bytes]:
        """Pass a request on; yield the head of the answer, then its body as it arrives.

        Raises:
            ServerFailed: the server did not answer, or not completely.
        """
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
                        # a refused prompt was not read
                        is_read, is_stream = part.status == HTTPStatus.OK, part.is_stream
                    elif (
                        self._waiting.pop(number, None) is not None and text is not None and is_read
                    ):
                        self._num_bytes += text.num_bytes
                        self._held.add(text)
                        # only a stream's first part arrives with the first token
                        if is_stream:
                            self._latency.add(expected_s, time.monotonic() - started)
                    yield part
        except aiohttp.ClientError as error:
            raise ServerFailed(self._name) from error
        finally:
            self._waiting.pop(number, None)

    async def once(self, request: FleetRequest) -> tuple[Head, bytes]:
        """Make a change of state, one at a time, and return the whole answer.

        Raises:
            TimeoutError, aiohttp.ClientError: the server did not answer in time, or failed.
        """
        async with asyncio.timeout(CHANGE_S), self._changing:
            return await self._change(request)

    async def end(self) -> None:
        """End the server and all its processes."""
        self._is_closing.set()
        await asyncio.to_thread(self._open.close)

    async def replayed_state(self) -> ReplayedState:
        """Return the changes of state that this server has made."""
        return self._state_log.state

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report that Ray Serve hands to routers."""
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
        """Return figures of this replica for the status of the fleet."""
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
        """Return the replica's name, and the metrics of its server and itself in Prometheus's text
        format."""
        async with self._http().get(f"{self._server.url}/metrics", timeout=LOOK) as answer:
            answer.raise_for_status()
            return self._name, await answer.text() + generate_latest(
                self._figures.registry
            ).decode()

    async def check_health(self) -> None:
        """Raise if the server is not healthy; called by Ray Serve.

        Ray replaces a replica after failed checks, and sends nothing to one before its first check.
        So this is also where a new replica repeats other replicas' changes of state.
        """
        # a replica that is ending needs no replacement
        if self._is_closing.is_set():
            return

        try:
            async with self._http().get(f"{self._server.url}/health", timeout=LOOK) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError):
            self._failed_checks += 1
            if self._failed_checks == FAILED_CHECKS:
                # Ray would wait for running requests and then kill this process only. A frozen
                # engine does not notice that its parent is gone, and would keep its memory.
                with suppress(ProcessLookupError):
                    os.killpg(self._server.process.pid, signal.SIGKILL)
            raise

        self._failed_checks = 0
        if self._taking_over is None:
            await self._take_over()
            self._taking_over = asyncio.create_task(self._take_over(AGAIN_S))

    async def _take_over(self, after_s: float = 0.0) -> None:
        """Repeat the other replicas' changes of state, after a delay of `after_s` seconds."""
        await asyncio.sleep(after_s)
        try:
            ingresses = await asyncio.to_thread(
                get_deployment_handle, INGRESS, get_replica_context().app_name
            )
            answers = await ask_all(ingresses, "replayed_state", within_s=STATE_S)
        # the fleet is starting: there is no ingress yet
        except KeyError:
            return
        # any error of Ray is logged only: the server works without these changes
        except Exception:
            logger.exception("the changes of state of other servers are not known")
            return

        for key, request in self._state_log.news(
            state for state in answers if not isinstance(state, BaseException)
        ):
            try:
                async with asyncio.timeout(CHANGE_S), self._changing:
                    # the change was made here in the meantime
                    if not self._state_log.is_new(key, request):
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
        """Make a change of state on this server, log it, and return the answer."""
        parts: list[Any] = []
        async with aclosing(self._answer(request)) as answer:
            parts += [part async for part in answer]
        head, body = parts[0], b"".join(parts[1:])
        if self._state_log.note(request, head, body) and request.target.startswith(RESET):
            self._held.clear()
        return head, body

    async def _answer(self, request: FleetRequest) -> AsyncGenerator[Head | bytes]:
        """Send a request to the server; yield the head of the answer, then its body as it
        arrives."""
        # keep the client's spelling of the path
        url = URL(self._server.url + request.target, encoded=True)
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
        """Return the HTTP session, created in the event loop that uses it."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                connector=connector,
                # requests of different clients must share no cookies
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                auto_decompress=False,
            )
        return self._session

    def _prefill_s(self, text: Fingerprints) -> float:
        """Return the expected prefill seconds of a prompt on this server."""
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
        """Read the size of the pool, the costs and the bytes per token from the server's
        metrics."""
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
        """Wait until the server ends, then end this process unless it is closing."""
        code = self._server.process.wait()
        if not self._is_closing.is_set():
            print(f"the server ended with {code}", flush=True)
            # end its engine too, which would keep its memory
            self._open.close()
            # running requests fail here, and the ingress tries them on another replica
            os._exit(1)

    def __del__(self) -> None:
        """End the server when Ray deletes this object."""
        if hasattr(self, "_is_closing"):
            self._is_closing.set()
            self._open.close()


class LatencyCalibration:
    """Ratio of real to expected seconds until the first token, for one server; 1 before any answer.

    Real and expected seconds are summed with exponential decay, so long prompts weigh more.
    """

    def __init__(self) -> None:
        self._expected = self._real = 0.0

    @property
    def value(self) -> float:
        """Real seconds per expected second."""
        return min(max(self._real / self._expected, FASTEST), SLOWEST) if self._expected else 1.0

    def add(self, expected_s: float, real_s: float) -> None:
        """Add a prompt that got its first token after `real_s` seconds."""
        self._expected = DECAY * self._expected + expected_s
        self._real = DECAY * self._real + real_s
