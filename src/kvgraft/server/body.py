"""Reading and parsing of HTTP request bodies."""

import json
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from kvgraft.server.errors import Refused
from kvgraft.vllm.options import KEY, PARAMS

# maximum length of a body in bytes
MAX_BODY = 32 << 20
# fields in which client libraries and proxies wrap extra options
WRAPPERS = ("extra_body", "extra_args", "extra_params", "model_kwargs", "vllm_xargs")


class Disconnected(Exception):
    """Error: the client disconnected before its request was complete."""


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """Return the whole body, at most MAX_BODY bytes.

    Raises:
        Refused: the body is longer.
        Disconnected: the client left before the body was complete.
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
    """Return the parsed JSON body. Like vLLM, accept what Python's `json` accepts beyond strict
    JSON.

    Raises:
        ValueError: the body is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        try:
            return json.loads(body)
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error


def misplaced_options(body: Any) -> str | None:
    """Return the path of a field that sets reuse options where nothing reads them.

    An example is `extra_body.kv_transfer_params`. Wrappers may be nested, and may hold JSON text
    instead of an object.

    Returns:
        The path with dots, or None if nothing is misplaced.
    """
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
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return parsed(text.encode())
    except ValueError:
        return None
