"""The body of an HTTP request, as far as it is taken."""

import json
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from kvgraft.vllm.options import KEY, PARAMS
from kvgraft.vllm.server.errors import Refused

MAX_BODY = 32 << 20  # bytes
# of client libraries and proxies
WRAPPERS = ("extra_body", "extra_args", "extra_params", "model_kwargs", "vllm_xargs")


class Disconnected(Exception):
    """The client left before its request was complete."""


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """The whole body, at most MAX_BODY bytes of it in memory.

    Raises:
        Refused: it is longer.
        Disconnected: it did not come in full.
    """
    too_long = Refused(413, f"the body of a request may have at most {MAX_BODY >> 20} MiB")
    announced = headers.get("Content-Length", "0")
    if not announced.isdecimal() or int(announced) > MAX_BODY:
        raise too_long
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise too_long
        more = message.get("more_body", False)
    return bytes(body)


def parsed(body: bytes) -> Any:
    """A JSON body. vLLM understands more than strict JSON, and so do we. ValueError if nobody
    understands it."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        try:
            return json.loads(body)
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error


def misplaced_options(body: Any) -> str | None:
    """The field of a parsed request that says something of reuse where nothing reads it, such as
    `extra_body.kv_transfer_params`; None: there is none. A wrapper may be an object or JSON text,
    within others."""
    if not isinstance(body, dict):
        return None
    if KEY in body:
        return KEY
    inner = [(name, body[name]) for name in WRAPPERS if name in body]
    while inner:
        path, value = inner.pop()
        if isinstance(value, str):
            value = _object(value)
        if isinstance(value, dict):
            for name in (PARAMS, KEY):
                if name in value:
                    return f"{path}.{name}"
            inner += [(f"{path}.{name}", value[name]) for name in WRAPPERS if name in value]
    return None


def _object(text: str) -> Any:
    """What a text says in JSON, None of other texts."""
    try:
        return parsed(text.encode())
    except ValueError:
        return None
