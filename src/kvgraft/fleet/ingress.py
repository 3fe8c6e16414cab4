"""The one endpoint of a fleet: who asks, by which text a request is routed, and what is tried
again."""

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
import msgspec
from ray.exceptions import RayActorError, RayTaskError
from ray.serve import get_replica_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

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
from kvgraft.segments.fingerprints import Fingerprints
from kvgraft.vllm.server.access import PAGE, PAGE_ROUTES, Access, access
from kvgraft.vllm.server.body import Disconnected, read_body
from kvgraft.vllm.server.errors import Refused
from kvgraft.vllm.server.keys import Keys
from kvgraft.vllm.server.tenancy import Keyring, Principal, shown_key

STATUS = "/v1/kvgraft/fleet"
PROMPTED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"}
    | {"/v1/messages", "/v1/responses", "/invocations"}
)  # what is posted there is read, and held then
LOOK_S = 8.0  # for which it is waited what servers say of themselves: scrapers wait for 10
STATE_S = 5.0  # for the state of servers
SHOWN_S = 1.0  # for which metrics are shown again
# after which clients of a fleet that ends may ask again: another one may be there then
RETRY_S = 10
LAST = b"data: [DONE]\n\n"  # of a stream
CUT_S = 1.0  # in which a stream has its next token
LONG = 1 << 16  # bytes of a body that others need not wait for
FAILED = (RayActorError, aiohttp.ClientError, asyncio.IncompleteReadError, ConnectionError)
logger = logging.getLogger("ray.serve")


class Ingress:
    """Takes the requests of all clients and passes them on to replicas.

    A request is tried a second time if its replica fails before anything of the answer was sent on;
    what fails later ends with an error, in a stream as an event.

    Args:
        replicas: handle of the deployment of `Replica`.
        keys: API keys and admin key, as those of the servers.
        names: under which the model is served; a request with another one is for an adapter.
        secret: at most 64 bytes that all replicas of this deployment share, of which fingerprints
            are made.
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
        self._shown: asyncio.Task[bytes] | None = None  # metrics
        self._shown_until = 0.0

    async def __call__(self, request: Request) -> Response:
        """One request."""
        if (task := asyncio.current_task()) is not None:  # which also sends the answer
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
        """Who asks; None where that does not matter: of a body nothing is read then. What a key
        allows its server decides."""
        path = request.url.path
        if access(path) is Access.OPEN:
            return None
        shown = shown_key(request.headers.get("Authorization"), basic=path in PAGE_ROUTES)
        if (principal := self._keyring.principal(shown)) is None:
            challenge = 'Basic realm="kvgraft", charset="UTF-8"' if path == PAGE else "Bearer"
            raise Refused(401, "no valid API key in the Authorization header", challenge=challenge)
        return principal

    async def _text_of(self, principal: Principal, body: bytes) -> Fingerprints | None:
        """By which a request is routed; None if it has no text."""
        if len(body) > LONG:
            return await asyncio.to_thread(self._found_text, principal, body)
        return self._found_text(principal, body)

    def _found_text(self, principal: Principal, body: bytes) -> Fingerprints | None:
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
        for attempt in (1, 2):
            answer: Any = self._streams.remote(request)
            try:
                head = await anext(answer)
                first = await anext(answer, b"")
                if not head.is_stream:
                    return _answer(head, first + b"".join([part async for part in answer]))
                return with_headers(StreamingResponse(self._rest(first, answer), head.status), head)
            except (*FAILED, RayTaskError) as error:
                cause = getattr(error, "cause", None)
                if not isinstance(error, FAILED) and not isinstance(cause, FAILED):
                    raise
                if isinstance(cause, ServerFailed):  # it may take a while until Ray knows
                    request = replace(request, avoids=request.avoids | {*cause.args})
                logger.warning("a replica failed at attempt %d: %s", attempt, type(error).__name__)
                FIGURES.failed.labels(attempt).inc()
                if self._is_closing:
                    return Refused(503, "this fleet has ended", retry_after_s=RETRY_S).response
            except DeploymentUnavailableError:
                return Refused(503, "no server is ready: ask again").response
            except asyncio.CancelledError:
                answer.cancel()
                raise
        return Refused(503, "two replicas have failed before they answered").response

    async def _rest(self, first: bytes, answer: Any) -> AsyncGenerator[bytes]:
        """A stream as it comes. If the client leaves, so does the request; if the replica fails, or
        the fleet ends, the stream ends with an error event."""
        try:
            yield first
            async for chunk in answer:
                yield chunk
                # a whole event
                if self._is_cut and chunk.endswith(b"\n\n") and not chunk.endswith(LAST):
                    yield _error("this fleet has ended")
                    return
        except (*FAILED, RayTaskError) as error:
            logger.warning("a replica failed within a stream: %s", type(error).__name__)
            FIGURES.failed.labels("stream").inc()
            yield _error("the server of this request has failed")
        finally:
            with suppress(Exception):
                answer.cancel()

    async def _ask_all(self, request: FleetRequest) -> Response:
        """What changes the state of a server is asked of each that there is."""
        request = replace(request, at=time.time_ns())
        answers = await ask_all(self._replicas, "once", request, within_s=CHANGE_S + LOOK_S)
        for answer in answers:
            if not isinstance(answer, BaseException):
                self._state_log.note(request, *answer)
        return together(answers)

    async def drain(self, within_s: float) -> int:
        """Refuse new requests from now on, and wait so many seconds for those in flight. Then
        streams end with an error at their next token; how many requests are left."""
        self._is_closing = True
        for seconds in (within_s, CUT_S):
            deadline = time.monotonic() + seconds
            while self._in_flight and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            self._is_cut = True
        return len(self._in_flight)

    async def replayed_state(self) -> ReplayedState:
        """Return the changes of state that a server must repeat when it starts."""
        if not self._has_learnt:
            answers = await self._say("replayed_state", STATE_S)
            self._state_log.learn(answers)
            self._has_learnt = bool(answers)
        return self._state_log.state

    async def _say(self, method: str, within_s: float = LOOK_S) -> list[Any]:
        """What replicas say of themselves; without those that fail."""
        answers = await ask_all(self._replicas, method, within_s=within_s)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _metrics(self) -> bytes:
        """Anybody may ask for them: servers are asked once for all who do so until they have
        answered, and a second."""
        if self._shown is None or (self._shown.done() and time.monotonic() > self._shown_until):
            self._shown = asyncio.create_task(self._asked_metrics())
        return await asyncio.shield(self._shown)

    async def _asked_metrics(self) -> bytes:
        try:
            own = shown(get_replica_context().replica_id.unique_id)
            return own + labelled(await self._say("metrics"))
        finally:
            self._shown_until = time.monotonic() + SHOWN_S

    async def _status(self, principal: Principal | None) -> Response:
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
    """Answer a change of state: the first answer if all servers say the same, else how
    many have done it."""
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
    return with_headers(Response(body, head.status), head)


def with_headers(response: Response, head: Head) -> Response:
    """With all headers of a server's answer, repeated ones, too."""
    for name, value in head.headers:
        response.headers.append(name, value)
    return response


def _error(message: str) -> bytes:
    """The event with which a stream ends that cannot go on."""
    body = {"error": {"message": message, "type": "server_error", "code": 503}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
