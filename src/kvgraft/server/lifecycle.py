"""Shutdown of a server: running requests may finish, new ones are refused, no process is left
behind."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from kvgraft.server.access import HEALTH_ROUTES, METRICS_ROUTES, PAGE_ROUTES, route_path
from kvgraft.server.errors import Refused, refuse

logger = init_logger(f"vllm.{__name__}")
# default of --shutdown-timeout, which is 0 in vLLM
DRAIN_S = 30
# time for the engine to end after the drain; then all processes are killed
END_S = 10.0
# time for clients to read the error at the end of their answer
CLOSE_S = 1.0
POLL_S = 0.05
RETRY_AFTER_S = 5
SIGNALS = (signal.SIGTERM, signal.SIGINT)
OPEN_IN_DRAIN = METRICS_ROUTES | PAGE_ROUTES
# Every child process seen. A grandchild whose parent has died can be found in this set only.
_seen: set[psutil.Process] = set()


class CutOff(Refused):
    """Error of a request that was still running when the drain ended."""

    def __init__(self) -> None:
        message = "the server was shut down before this answer was complete"
        super().__init__(503, message, retry_after_s=RETRY_AFTER_S)


class Drain:
    """State of a server's shutdown.

    The first signal starts the drain: running requests have `limit_s` seconds to finish. A second
    signal ends the server at once. A timer kills all processes if anything hangs.

    Args:
        limit_s: seconds; 0 ends all requests at once.

    Attributes:
        abort_requests: called when the drain ends, to abort requests that still run in the engine.
    """

    def __init__(self, limit_s: float) -> None:
        self.abort_requests: Callable[[], Awaitable[None]] | None = None
        self._limit_s = limit_s
        self._running: set[asyncio.Timeout] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: threading.Timer | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether the first signal has arrived."""
        return self._task is not None

    def watch_signals(self, server: Any) -> None:
        """Replace vLLM's signal handlers, which end the engine before its running requests are
        complete.

        Args:
            server: uvicorn's server; setting its `should_exit` ends it.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, server)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Count a request as running while the context is open.

        Raises:
            CutOff: the drain ended before the request did.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._running.add(limit)
                yield
        except Exception as error:
            if not limit.expired():
                raise
            raise CutOff from error
        finally:
            self._running.discard(limit)

    def _on_signal(self, number: int, server: Any) -> None:
        """Start the drain, or end the server if the drain has already begun."""
        if self.has_begun:
            logger.warning("KVGraft: signalled a second time: ends at once")
            _end_now(128 + number)

        logger.info(
            "KVGraft: drains %d requests for up to %s s; a second signal ends at once",
            len(self._running),
            self._limit_s,
        )

        note_children()
        self._end_after(self._limit_s + CLOSE_S + END_S)
        self._task = asyncio.get_running_loop().create_task(self._run(server))

    async def _run(self, server: Any) -> None:
        """Wait for the running requests, abort the others at the limit, and let uvicorn exit."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._limit_s
        for running in self._running:
            running.reschedule(limit)

        while self._running and loop.time() < limit + CLOSE_S:
            await asyncio.sleep(POLL_S)

        # From here on nothing waits for clients, so the engine gets END_S from now, not from the
        # limit.
        self._end_after(END_S)
        if self.abort_requests is not None:
            await self.abort_requests()
        server.should_exit = True

    def _end_after(self, seconds: float) -> None:
        """Start the timer that kills all processes. It runs in a thread because the event loop may
        hang."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, _end_late)
        self._timer.daemon = True
        self._timer.start()


class DrainMiddleware:
    """Outermost ASGI middleware, which refuses requests during a drain and reports a frozen engine.

    During a drain, health checks and new requests get status 503. Answers that are cut off at the
    limit end with an error. Health checks also get 503 if the engine is frozen.

    Args:
        silence: returns why the engine is not healthy, or None.
        on_start: called when the server is ready.
    """

    def __init__(
        self,
        app: ASGIApp,
        drain: Drain,
        silence: Callable[[], str | None],
        on_start: Callable[[], None],
    ) -> None:
        self._app, self._drain, self._silence, self._on_start = app, drain, silence, on_start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            # vLLM sets its signal handlers before this point, and none later
            if (server := getattr(scope["app"].state, "server", None)) is not None:
                self._drain.watch_signals(server)

            async def send_and_note_start(message: Message) -> None:
                await send(message)
                if message["type"] == "lifespan.startup.complete":
                    self._on_start()

            await self._app(scope, receive, send_and_note_start)
            return

        path = route_path(scope)
        reason = None
        if self._drain.has_begun and path not in OPEN_IN_DRAIN:
            reason = "this server is shutting down"
        elif path in HEALTH_ROUTES:
            reason = self._silence()

        if reason is not None:
            await refuse(Refused(503, reason, retry_after_s=RETRY_AFTER_S), scope, receive, send)
        elif path in OPEN_IN_DRAIN:
            await self._app(scope, receive, send)
        else:
            await self._serve(path, scope, receive, send)

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request until it ends or the drain ends."""
        answer = _Answer(send)
        try:
            async with self._drain.request():
                await self._app(scope, receive, answer)
        except CutOff as error:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await answer.cut_off(error, path, scope, receive)


class _Answer:
    """ASGI `send` that records how much of the answer the client has received."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = self._is_stream = self._is_whole = False

    async def __call__(self, message: Message) -> None:
        """Send a message and record its part of the answer."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._has_started = True
            content = Headers(raw=message["headers"]).get("Content-Type", "")
            self._is_stream = content.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)

    async def cut_off(self, error: Refused, path: str, scope: Scope, receive: Receive) -> None:
        """End the answer with an error.

        An answer that has begun and is not a stream stays incomplete.
        """
        if not self._has_started:
            await refuse(error, scope, receive, self._send)
        elif self._is_stream and not self._is_whole:
            await self._send({"type": "http.response.body", "body": error.event(path)})


def note_children() -> None:
    """Add the present child processes, at any depth, to those that `end_children` kills."""
    _seen.update(psutil.Process().children(recursive=True))


def end_children() -> None:
    """Kill all child processes that are still running."""
    note_children()
    left = [process for process in _seen if process.is_running() and not _ends_by_itself(process)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=CLOSE_S)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Return whether a process is Python's resource tracker.

    The tracker removes the shared memory of killed processes, then ends.
    """
    with suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return False


def _end_late() -> None:
    """Log that the shutdown took too long, and end the server."""
    logger.error("KVGraft: not ended in time, kills all processes")
    _end_now(1)


def _end_now(status: int) -> None:
    """Kill all child processes and exit with this status."""
    end_children()
    os._exit(status)
