"""Error responses in the format of the OpenAI API."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

# routes whose server-sent events have a name
NAMED_EVENTS = ("/v1/messages", "/v1/responses")


class Refused(Exception):
    """Refusal of a request, answered with an error.

    Args:
        status: HTTP status code.
        param: the request field that caused the error.
        challenge: value of the `WWW-Authenticate` header.
        retry_after_s: seconds after which the client may retry, for the `Retry-After` header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        challenge: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.challenge, self.retry_after_s = challenge, retry_after_s

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object of the OpenAI API."""
        phrase = HTTPStatus(self.status).phrase
        return {"message": str(self), "type": phrase, "param": self.param, "code": self.status}

    @property
    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {"WWW-Authenticate": self.challenge, "Retry-After": self.retry_after_s}
        given = {name: str(value) for name, value in headers.items() if value is not None}
        return JSONResponse({"error": self.error}, self.status, given)

    def event(self, path: str) -> bytes:
        """Return the server-sent event that ends a stream of this route with the error."""
        name = b"event: error\n" if path in NAMED_EVENTS else b""
        data = msgspec.json.encode({"type": "error", "error": self.error})
        return name + b"data: " + data + b"\n\n"


async def answer_refusal(_: Request, refused: Exception) -> Response:
    """Handle `Refused` as an exception handler of the application."""
    if not isinstance(refused, Refused):
        raise refused
    return refused.response


async def refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a connection with an error; a websocket is closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refused)})
    else:
        await refused.response(scope, receive, send)
