"""HTTP endpoint of a fleet: authentication, fingerprints for routing, and retries."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from ray.exceptions import RayActorError, RayTaskError
from ray.serve import get_replica_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvgraft.core.fingerprints import Fingerprints
from kvgraft.fleet.broadcast import ask_all
from kvgraft.fleet.figures import FIGURES, labelled, shown
from kvgraft.fleet.requests import (
    FleetRequest,
    Head,
    ServerFailed,
    decoded,
    narrowed_by,
    scope_of,
    texts_of,
)
from kvgraft.fleet.state_log import CHANGE_S, PATHS, ReplayedState, StateLog
from kvgraft.server.access import PAGE, PAGE_ROUTES, Access, access
from kvgraft.server.body import Disconnected, read_body
from kvgraft.server.errors import Refused
from kvgraft.server.keys import Keys
from kvgraft.server.tenancy import Keyring, Principal, shown_key

STATUS = "/v1/kvgraft/fleet"
# routes with a prompt: a POST is routed by text, and the text counts as known afterwards
PROMPTED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"}
    | {"/v1/messages", "/v1/responses", "/invocations"}
)
# time to wait for metrics and status of replicas; Prometheus waits 10 s by default
LOOK_S = 8.0
# time to wait for the replicas' changes of state
STATE_S = 5.0
# time for which collected metrics are sent again
SHOWN_S = 1.0
# Retry-After of a fleet that ends; a new fleet may be there by then
RETRY_S = 10
# end of an event, and last event of a stream
END = b"\n\n"
LAST = b"data: [DONE]\n\n"
# time within which a running stream produces its next token
CUT_S = 1.0
# bytes; a longer body is fingerprinted in a thread, to keep the event loop free
LONG = 1 << 16
FAILED = (RayActorError, aiohttp.ClientError, asyncio.IncompleteReadError, ConnectionError)
logger = logging.getLogger("ray.serve")


class Ingress:
    """HTTP endpoint that passes the requests of all clients to replicas.

    If a replica fails before any part of its answer was sent on, the request is tried once more on
    another replica. A later failure ends the answer with an error; in a stream the error is an
    event.

    Args:
        replicas: handle of the deployment of `Replica`.
        keys: API keys and admin key, the same as those of the servers.
        names: names of the base model; a request with another model name is for an adapter.
        secret: key of the fingerprints, at most 64 bytes, shared by all processes of this
            deployment.
    """

    def __init__(
        self, replicas: DeploymentHandle, keys: Keys, names: Sequence[str], secret: bytes
    ) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True)
        self._keyring, self._names, self._secret = Keyring(keys), frozenset(names), secret
        self._state_log, self._has_learnt = StateLog(), False
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._is_closing = self._is_cut = False
        # the last collection of metrics
        self._shown: asyncio.Task[bytes] | None = None
        self._shown_until = 0.0

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        # this task also sends the answer, so it ends when the answer is complete
        if (task := asyncio.current_task()) is not None:
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        try:
            if self._is_closing:
                raise Refused(503, "this fleet is ending", retry_after_s=RETRY_S)
            principal = self._authenticate(request)
            body = b"" if principal is None else await read_body(request.headers, request.receive)
        except Refused as refused:
            return refused.response
        except Disconnected:
            return Response(status_code=499)

        path = request.url.path
        if path in ("/metrics", "/metrics/"):
            return Response(await self._metrics(), media_type="text/plain; version=0.0.4")
        if path == STATUS:
            return await self._status(principal)

        is_read = principal is not None and request.method == "POST" and path in PROMPTED
        text = await self._text_of(principal, body) if principal is not None and is_read else None

        written = request.scope.get("raw_path") or quote(path).encode()
        target = written.decode() + (f"?{request.url.query}" if request.url.query else "")
        passed_on = FleetRequest(request.method, target, tuple(request.headers.items()), body, text)

        if path.startswith(PATHS) and request.method != "GET":
            return await self._ask_all(passed_on)
        return await self._ask_one(passed_on)

    def _authenticate(self, request: Request) -> Principal | None:
        """Return the caller, or None on an open route, where the body is not read.

        The server decides what the key allows.

        Raises:
            Refused: the key is missing or unknown.
        """
        path = request.url.path
        if access(path) is Access.OPEN:
            return None

        shown = shown_key(request.headers.get("Authorization"), basic=path in PAGE_ROUTES)
        if (principal := self._keyring.principal(shown)) is None:
            challenge = 'Basic realm="kvgraft", charset="UTF-8"' if path == PAGE else "Bearer"
            raise Refused(401, "no valid API key in the Authorization header", challenge=challenge)
        return principal

    async def _text_of(self, principal: Principal, body: bytes) -> Fingerprints | None:
        """Return the fingerprints by which a request is routed; None if it has no text."""
        if len(body) > LONG:
            return await asyncio.to_thread(self._found_text, principal, body)
        return self._found_text(principal, body)

    def _found_text(self, principal: Principal, body: bytes) -> Fingerprints | None:
        """Compute the fingerprints of a request's text; None if it has no text."""
        request = decoded(body)
        if not (texts := texts_of(request)):
            return None
        with FIGURES.routing.labels("fingerprints").time():
            parts = narrowed_by(request, self._names)
            scope = scope_of(self._secret, principal.tenant.identity, *parts)
            return Fingerprints.joined(
                Fingerprints.of(text.encode(errors="replace"), scope) for text in texts
            )

    async def _ask_one(self, request: FleetRequest) -> Response:
        """Pass a request to one replica, and to a second one if the first fails."""
        for attempt in (1, 2):
            answer: Any = self._streams.remote(request)
            try:
                head = await anext(answer)
                first = await anext(answer, b"")
                if not head.is_stream:
                    return _answer(head, first + b"".join([part async for part in answer]))
                events = self._events(first, answer, request.target.partition("?")[0])
                return with_headers(StreamingResponse(events, head.status), head)
            except (*FAILED, RayTaskError) as error:
                cause = getattr(error, "cause", None)
                if not isinstance(error, FAILED) and not isinstance(cause, FAILED):
                    raise
                # avoid this replica, because Ray may take a while to notice the failure
                if isinstance(cause, ServerFailed):
                    request = replace(request, avoids=request.avoids | {*cause.args})
                logger.warning("a replica failed at attempt %d: %s", attempt, type(error).__name__)
                FIGURES.failed.labels(attempt).inc()
                if self._is_closing:
                    return Refused(503, "this fleet has ended", retry_after_s=RETRY_S).response
            except DeploymentUnavailableError:
                return Refused(503, "no server is ready: ask again", retry_after_s=RETRY_S).response
            except asyncio.CancelledError:
                answer.cancel()
                raise

        return Refused(503, "two replicas have failed before they answered").response

    async def _events(self, first: bytes, answer: Any, path: str) -> AsyncGenerator[bytes]:
        """Yield a stream's events as they arrive.

        If the client disconnects, the request is cancelled. If the replica fails or the fleet ends,
        the stream ends with an error event. A chunk can end within an event; such a part is passed
        on with its rest, so that the error never stands in the middle of an event.
        """
        try:
            events, end, part = first.rpartition(END)
            if end:
                yield events + end
            async for chunk in answer:
                events, end, part = (part + chunk).rpartition(END)
                if end:
                    yield events + end
                    if self._is_cut and not (events + end).endswith(LAST):
                        yield Refused(503, "this fleet has ended").event(path)
                        return
            if part:
                yield part
        except (*FAILED, RayTaskError) as error:
            logger.warning("a replica failed within a stream: %s", type(error).__name__)
            FIGURES.failed.labels("stream").inc()
            yield Refused(503, "the server of this request has failed").event(path)
        finally:
            with suppress(Exception):
                answer.cancel()

    async def _ask_all(self, request: FleetRequest) -> Response:
        """Send a change of state to every replica, and log the changes that were made."""
        request = replace(request, at=time.time_ns())
        answers = await ask_all(self._replicas, "once", request, within_s=CHANGE_S + LOOK_S)
        for answer in answers:
            if not isinstance(answer, BaseException):
                self._state_log.note(request, *answer)
        return together(answers)

    async def drain(self, within_s: float) -> int:
        """Refuse new requests, and wait up to `within_s` seconds for those that run.

        After that time each stream ends with an error at its next token.

        Returns:
            Number of requests that still run.
        """
        self._is_closing = True
        for seconds in (within_s, CUT_S):
            deadline = time.monotonic() + seconds
            while self._in_flight and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            self._is_cut = True
        return len(self._in_flight)

    async def replayed_state(self) -> ReplayedState:
        """Return the changes of state that a new replica must repeat.

        An ingress that has just started first asks the replicas for them.
        """
        if not self._has_learnt:
            answers = await self._say("replayed_state", STATE_S)
            self._state_log.learn(answers)
            self._has_learnt = bool(answers)
        return self._state_log.state

    async def _say(self, method: str, within_s: float = LOOK_S) -> list[Any]:
        """Call a method of every replica, and return the answers of those that do not fail."""
        answers = await ask_all(self._replicas, method, within_s=within_s)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _metrics(self) -> bytes:
        """Return the metrics of the fleet, collected at most once a second.

        The route is open to all. One collection serves all callers that arrive while it runs.
        """
        if self._shown is None or (self._shown.done() and time.monotonic() > self._shown_until):
            self._shown = asyncio.create_task(self._asked_metrics())
        return await asyncio.shield(self._shown)

    async def _asked_metrics(self) -> bytes:
        """Collect the metrics of this ingress and of all replicas."""
        try:
            own = shown(get_replica_context().replica_id.unique_id)
            return own + labelled(await self._say("metrics"))
        finally:
            self._shown_until = time.monotonic() + SHOWN_S

    async def _status(self, principal: Principal | None) -> Response:
        """Answer with the state of all replicas, for the admin or the only tenant."""
        if principal is None or not (principal.is_admin or self._keyring.has_one_tenant):
            return Refused(403, "this needs the admin key").response
        return JSONResponse(
            {
                "replicas": sorted(
                    await self._say("describe"), key=lambda replica: str(replica["name"])
                )
            }
        )


def together(answers: Sequence[tuple[Head, bytes] | BaseException]) -> Response:
    """Combine the replicas' answers to a change of state.

    Returns:
        The first answer if all replicas agree, else an error that counts the replicas that did it.
    """
    given = [answer for answer in answers if not isinstance(answer, BaseException)]
    refusals = [answer for answer in given if answer[0].status >= HTTPStatus.BAD_REQUEST]
    num_done, num_silent = len(given) - len(refusals), len(answers) - len(given)

    if not answers:
        return Refused(
            503, "no server is there: none has started yet, or all were idle and have ended"
        ).response

    if num_silent:
        message = (
            f"{num_done} of {len(answers)} servers have done this, {num_silent} failed or did not "
            "answer in time"
        )
        return Refused(503, f"{message}, and may do it later: ask again").response

    if refusals and num_done:
        head, body = refusals[0]
        error = decoded(body).get("error")
        said = error.get("message") if isinstance(error, dict) else body.decode(errors="replace")
        message = f"{len(refusals)} of {len(answers)} servers refuse this, the others have done it"
        return Refused(head.status, f"{message}: {said}").response

    return _answer(*given[0])


def _answer(head: Head, body: bytes) -> Response:
    """Return a complete server answer as an HTTP response."""
    return with_headers(Response(body, head.status), head)


def with_headers(response: Response, head: Head) -> Response:
    """Add all headers of a server's answer to a response, including repeated ones."""
    for name, value in head.headers:
        response.headers.append(name, value)
    return response
