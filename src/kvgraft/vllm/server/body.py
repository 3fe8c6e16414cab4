"""The body of an HTTP request, as far as it is taken."""

import json
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from kvgraft.vllm.server.errors import Refused

MAX_BODY = 32 << 20  # bytes


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
    """A JSON body. vLLM understands more than strict JSON, and so do we. ValueError if nobody understands it."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        try:
            return json.loads(body)
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error
