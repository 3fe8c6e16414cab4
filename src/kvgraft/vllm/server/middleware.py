"""Every HTTP request: who calls, how much may be sent, and what answers say of reuse where vLLM
says less."""

import re
from contextlib import suppress
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvgraft.vllm.options import KEY, PARAMS, RequestOptions
from kvgraft.vllm.server.access import PAGE, PAGE_ROUTES, Access, access, route_path
from kvgraft.vllm.server.body import Disconnected, misplaced_options, parsed, read_body
from kvgraft.vllm.server.call import CURRENT, Call
from kvgraft.vllm.server.engine_client import parse_params
from kvgraft.vllm.server.errors import Refused, refuse
from kvgraft.vllm.server.sharing import Grants, NotGranted
from kvgraft.vllm.server.tenancy import Keyring, Principal, shown_key
from kvgraft.vllm.settings import TOOLS

_NO_ADMIN = "this server has no admin key: start it with KVGRAFT_ADMIN_KEY or --kvgraft-admin-key"
_MISPLACED = (
    f'has no effect here: send "{PARAMS}": {{"{KEY}": {{...}}}} at the top level of the request, '
    'beside "model"'
)
COMPLETIONS = frozenset({"/v1/completions", "/invocations"})  # one request may have several prompts
_USAGE = re.compile(rb'"choices":\[\].*"usage":\{')
# of Anthropic's Messages API, in the streams of which vLLM reports nothing
_LAST_MESSAGE = b"event: message_stop\n"


class ServerMiddleware:
    """Pure ASGI; passes what the application sends on as it comes.

    Args:
        default: what a request that says nothing gets; it may change the options of that policy.
        finds_tools: whether it matters if a request may call tools.
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
        """Who calls; None where that does not matter.

        Raises:
            Refused: no key, an unknown one, one that is not enough, or a path that the application
                does not have.
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
        """Refuse bad options here, where a stream still can be: as a status, not within the stream.

        The guard of the engine checks again, so a body that is not understood here may pass.
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
    kv_transfer_params: Any = None


def _peek(body: bytes) -> _Peek:
    """Some fields of a body; nothing of one that is not understood."""
    try:
        return msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _Peek()


def _misplaced(body: bytes) -> str | None:
    """See `misplaced_options`; None of what nobody understands."""
    try:
        return misplaced_options(parsed(body))
    except ValueError:
        return None


def _may_call_tools(body: bytes) -> bool:
    """Whether a request may call tools; what nobody understands might."""
    try:
        found = parsed(body)
    except ValueError:
        return bool(body)
    return (
        isinstance(found, dict) and bool(found.get("tools")) and found.get("tool_choice") != "none"
    )


class _Replay:
    """Give the body that has been read, then whatever else comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """The next message of the client."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _has_route(scope: Scope) -> bool:
    """Whether the application answers this path, by whatever method."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _reporting(call: Call | None, send: Send) -> Send:
    """`send`, which adds to an answer what vLLM leaves out: in streams the report, of several
    prompts all but one."""
    if call is None:
        return send
    streams, start, whole = False, None, bytearray()

    async def send_with_report(message: Message) -> None:
        nonlocal streams, start
        if message["type"] == "http.response.start":
            streams = (
                Headers(raw=message["headers"])
                .get("Content-Type", "")
                .startswith("text/event-stream")
            )
            if not streams and _has_many(call):
                start = message  # is held until it is known how long the body will be
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
    """Whether the request has several prompts: vLLM then reports one of them, and counts the cached
    tokens of one."""
    return call.route in COMPLETIONS and len(call.cached) > 1


def _takes_report(event: bytes) -> bool:
    """Whether a server-sent event is the one of its stream that gets the report."""
    return event.startswith(_LAST_MESSAGE) or _USAGE.search(event) is not None


def _reported(event: bytes, call: Call) -> bytes:
    """One server-sent event with the report in it, where the other answers of vLLM have it."""
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
    """A JSON answer whose report and cached tokens are those of all prompts; another one as it
    is."""
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
    """The beginning of a response whose body has got another length."""
    others = [
        (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
    ]
    return {**start, "headers": [*others, (b"content-length", str(length).encode())]}
