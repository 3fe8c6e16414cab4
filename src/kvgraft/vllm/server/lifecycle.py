"""The end of a server: what runs may finish, what is new is refused, and no process of the server
outlives it."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from kvgraft.vllm.server.access import HEALTH_ROUTES, METRICS_ROUTES, PAGE_ROUTES, route_path
from kvgraft.vllm.server.errors import Refused, refuse

logger = init_logger(f"vllm.{__name__}")
DRAIN_S = 30  # default of vLLM's --shutdown-timeout, which is 0 in vLLM
END_S = 10.0  # for the engine to end after the drain, then all processes are killed
CLOSE_S = 1.0  # for clients to read the error at the end of their answer
POLL_S = 0.05
RETRY_AFTER_S = 5
SIGNALS = (signal.SIGTERM, signal.SIGINT)
OPEN_IN_DRAIN = METRICS_ROUTES | PAGE_ROUTES
NAMED_EVENTS = ("/v1/messages", "/v1/responses")  # whose server-sent events have a name
# processes below this one; one whose parent has died is found here only
_seen: set[psutil.Process] = set()


class CutOff(Refused):
    """A request still ran at the end of the drain."""

    def __init__(self) -> None:
        message = "the server was shut down before this answer was complete"
        super().__init__(503, message, retry_after_s=RETRY_AFTER_S)


class Drain:
    """The state of a server that was signalled to end.

    The first signal starts the drain: requests that run have `limit_s` seconds. The second one ends
    the server at once. A timer kills all processes if anything hangs.

    Args:
        limit_s: seconds; 0 ends all requests at once.

    Attributes:
        abort_requests: called when the drain ends, to abort what the engine still runs.
    """

    def __init__(self, limit_s: float) -> None:
        self.abort_requests: Callable[[], Awaitable[None]] | None = None
        self._limit_s = limit_s
        self._running: set[asyncio.Timeout] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: threading.Timer | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the server was signalled to end."""
        return self._task is not None

    def watch_signals(self, server: Any) -> None:
        """Replace vLLM's signal handlers, which end the engine before the requests that run in it.

        Args:
            server: uvicorn's; it ends by its `should_exit`.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, server)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Count a request as running.

        Raises:
            CutOff: the drain has ended before the request.
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
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._limit_s
        for running in self._running:
            running.reschedule(limit)

        while self._running and loop.time() < limit + CLOSE_S:
            await asyncio.sleep(POLL_S)

        # From here on nothing depends on clients, so the engine gets END_S from now, not from the
        # limit.
        self._end_after(END_S)
        if self.abort_requests is not None:
            await self.abort_requests()
        server.should_exit = True

    def _end_after(self, seconds: float) -> None:
        """Set the timer; it runs in a thread, as the event loop may hang."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, _end_late)
        self._timer.daemon = True
        self._timer.start()


class DrainMiddleware:
    """Pure ASGI, outside of all others. While the server drains, health and new requests get 503,
    and answers that are cut off at the limit get an error.

    Args:
        silence: says why the engine is not healthy, or None.
    """

    def __init__(self, app: ASGIApp, drain: Drain, silence: Callable[[], str | None]) -> None:
        self._app, self._drain, self._silence = app, drain, silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            # vLLM has set its signal handlers by now, and sets no others
            if (server := getattr(scope["app"].state, "server", None)) is not None:
                self._drain.watch_signals(server)
            await self._app(scope, receive, send)
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
        """Serve a request until it ends, or the drain does."""
        answer = _Answer(send)
        try:
            async with self._drain.request():
                await self._app(scope, receive, answer)
        except CutOff as error:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await answer.cut_off(error, path, scope, receive)


class _Answer:
    """`send`, which knows how much of an answer the client has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = self._is_stream = self._is_whole = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._has_started = True
            content = Headers(raw=message["headers"]).get("Content-Type", "")
            self._is_stream = content.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)

    async def cut_off(self, error: Refused, path: str, scope: Scope, receive: Receive) -> None:
        """End the answer with an error; one that has begun and is no stream stays without its
        end."""
        if not self._has_started:
            await refuse(error, scope, receive, self._send)
        elif self._is_stream and not self._is_whole:
            name = b"event: error\n" if path in NAMED_EVENTS else b""
            data = msgspec.json.encode({"type": "error", "error": error.error})
            await self._send(
                {"type": "http.response.body", "body": name + b"data: " + data + b"\n\n"}
            )


def note_children() -> None:
    """Remember the processes below this one as they are now."""
    _seen.update(psutil.Process().children(recursive=True))


def end_children() -> None:
    """Kill whatever is left of the processes below this one."""
    note_children()
    left = [process for process in _seen if process.is_running() and not _ends_by_itself(process)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=CLOSE_S)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which removes shared memory of those that were
    killed, then ends."""
    with suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return False


def _end_late() -> None:
    logger.error("KVGraft: not ended in time, kills all processes")
    _end_now(1)


def _end_now(status: int) -> None:
    """End this process and all below it."""
    end_children()
    os._exit(status)
