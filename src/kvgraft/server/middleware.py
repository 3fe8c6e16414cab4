"""Middleware around every route: authentication, the size of requests, and complete reports.

Reports are added where vLLM's own answers omit them: in streams, and for several prompts.
"""

import re
from contextlib import suppress
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvgraft.server.access import PAGE, PAGE_ROUTES, Access, access, route_path
from kvgraft.server.body import Disconnected, misplaced_options, parsed, read_body
from kvgraft.server.call import CURRENT, Call
from kvgraft.server.engine_client import parse_params
from kvgraft.server.errors import Refused, refuse
from kvgraft.server.sharing import Grants, NotGranted
from kvgraft.server.tenancy import Keyring, Principal, shown_key
from kvgraft.vllm.options import KEY, PARAMS, RequestOptions
from kvgraft.vllm.setting_fields import TOOLS

_NO_ADMIN = "this server has no admin key: start it with KVGRAFT_ADMIN_KEY or --kvgraft-admin-key"
_MISPLACED = (
    f'has no effect here: send "{PARAMS}": {{"{KEY}": {{...}}}} at the top level of the request, '
    'beside "model"'
)
# routes that accept several prompts in one request
COMPLETIONS = frozenset({"/v1/completions", "/invocations"})
_USAGE = re.compile(rb'"choices":\[\].*"usage":\{')
# last event of a stream of Anthropic's Messages API; vLLM puts no report into these streams
_LAST_MESSAGE = b"event: message_stop\n"


class ServerMiddleware:
    """ASGI middleware that authenticates each request and sets `CURRENT` to its `Call`.

    It passes messages on one by one, so streams stay streams.

    Args:
        default: options of a request that sets none; its policy's options can be changed per
            request.
        finds_tools: whether to find out if a request may call tools (`exact_for` includes tools).
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        grants: Grants,
        default: RequestOptions,
        *,
        finds_tools: bool = False,
    ) -> None:
        self._app, self._keyring, self._grants, self._default = app, keyring, grants, default
        self._finds_tools = finds_tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        try:
            path = route_path(scope)
            principal = self._authenticate(path, scope)
            if principal is None or scope["type"] == "websocket":
                body = None
            else:
                body = await read_body(Headers(scope=scope), receive)
                self._check(body, principal)
        except Refused as refused:
            await refuse(refused, scope, receive, send)
            return
        except Disconnected:
            return

        kinds = frozenset(
            {TOOLS} if self._finds_tools and body is not None and _may_call_tools(body) else ()
        )
        call = Call(principal, path, kinds=kinds) if principal is not None else None

        before = CURRENT.set(call)
        try:
            await self._app(
                scope, receive if body is None else _Replay(body, receive), _reporting(call, send)
            )
        finally:
            CURRENT.reset(before)

    def _authenticate(self, path: str, scope: Scope) -> Principal | None:
        """Return the caller, or None on a route that is open to all.

        Raises:
            Refused: the key is missing, unknown or not sufficient, or the application has no such
                path.
        """
        needed = access(path)
        if needed is Access.OPEN and scope["type"] == "websocket":
            raise Refused(404, "nothing listens to a websocket here")
        if needed is Access.OPEN:
            return None

        on_page = path in PAGE_ROUTES
        shown = Headers(scope=scope).get("Authorization")
        principal = self._keyring.principal(shown_key(shown, basic=on_page))
        if principal is None:
            challenge = 'Basic realm="kvgraft", charset="UTF-8"' if path == PAGE else "Bearer"
            raise Refused(401, "no valid API key in the Authorization header", challenge=challenge)

        if needed is Access.ADMIN and not _has_route(scope):
            raise Refused(404, "this server has no such path")
        if needed is Access.ADMIN and not principal.is_admin:
            raise (
                Refused(403, "this needs the admin key")
                if self._keyring.has_admin
                else Refused(503, _NO_ADMIN)
            )
        return principal

    def _check(self, body: bytes, principal: Principal) -> None:
        """Refuse invalid options before a stream begins, so that the client gets an HTTP status.

        A body that cannot be parsed here passes; the engine client checks the options again.
        """
        if PARAMS.encode() not in body and KEY.encode() not in body:
            return

        if (path := _misplaced(body)) is not None:
            raise Refused(400, f"{path} {_MISPLACED}", param=path)

        if (params := _peek(body).kv_transfer_params) is not None:
            try:
                self._grants.names_for(principal.tenant, parse_params(params, self._default).shared)
            except NotGranted as error:
                raise Refused(404, str(error), param=f"{PARAMS}.{KEY}.shared") from error
            except ValueError as error:
                raise Refused(400, str(error), param=f"{PARAMS}.{KEY}") from error


class _Peek(msgspec.Struct):
    """The one field of a request body that is checked before the application runs."""

    kv_transfer_params: Any = None


def _peek(body: bytes) -> _Peek:
    """Decode the checked field of a body; every field is None if the body is not strict JSON."""
    try:
        return msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _Peek()


def _misplaced(body: bytes) -> str | None:
    """Return the result of `misplaced_options`, or None if the body is not JSON."""
    try:
        return misplaced_options(parsed(body))
    except ValueError:
        return None


def _may_call_tools(body: bytes) -> bool:
    """Return whether a request may call tools; True for a body that is not JSON."""
    try:
        found = parsed(body)
    except ValueError:
        return bool(body)
    return (
        isinstance(found, dict) and bool(found.get("tools")) and found.get("tool_choice") != "none"
    )


class _Replay:
    """ASGI `receive` that returns the body that was read, then the client's later messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """Return the next message of the client."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _has_route(scope: Scope) -> bool:
    """Return whether the application has this path, with any method."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _reporting(call: Call | None, send: Send) -> Send:
    """Wrap `send` to add what vLLM leaves out of an answer.

    In a stream this is the report. For several prompts it is the reports of all prompts but one.
    """
    if call is None:
        return send

    streams, start, whole = False, None, bytearray()

    async def send_with_report(message: Message) -> None:
        """Send a message, or hold it until the whole body is known."""
        nonlocal streams, start
        if message["type"] == "http.response.start":
            streams = (
                Headers(raw=message["headers"])
                .get("Content-Type", "")
                .startswith("text/event-stream")
            )
            if not streams and _has_many(call):
                # hold the headers: the report changes the content length
                start = message
                return
        elif start is not None:
            whole.extend(message.get("body", b""))
            if not message.get("more_body", False):
                body = _of_all(bytes(whole), call)
                await send(_of_length(start, len(body)))
                await send({**message, "body": body})
            return
        elif streams and _takes_report(message.get("body", b"")):
            message = {**message, "body": _reported(message["body"], call)}
        await send(message)

    return send_with_report


def _has_many(call: Call) -> bool:
    """Return whether the request has several prompts.

    vLLM then reports one prompt only, and counts the cached tokens of one.
    """
    return call.route in COMPLETIONS and len(call.cached) > 1


def _takes_report(event: bytes) -> bool:
    """Return whether a server-sent event is the one of its stream that carries the report."""
    return event.startswith(_LAST_MESSAGE) or _USAGE.search(event) is not None


def _reported(event: bytes, call: Call) -> bytes:
    """Return a server-sent event with the report added, in the field that other answers use."""
    prefix, _, data = event.partition(b"data: ")
    if _has_many(call):
        data = _of_all(data, call)

    if not (call.reports and call.reports[0]):
        return prefix + b"data: " + data.rstrip() + b"\n\n"
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return event

    reports = call.reports if _has_many(call) else call.reports[0]
    return prefix + b"data: " + msgspec.json.encode({**chunk, PARAMS: {KEY: reports}}) + b"\n\n"


def _of_all(body: bytes, call: Call) -> bytes:
    """Return a JSON answer with the reports and cached tokens of all prompts.

    A body that is not a JSON object is returned unchanged.
    """
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return body

    if answer.get(PARAMS):
        answer[PARAMS] = {KEY: call.reports}
    with suppress(KeyError, TypeError):
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] = sum(call.cached)
    return msgspec.json.encode(answer)


def _of_length(start: Message, length: int) -> Message:
    """Return the response start message with a new content length."""
    others = [
        (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
    ]
    return {**start, "headers": [*others, (b"content-length", str(length).encode())]}
