"""Answers that refuse a request, in the error format of the OpenAI API."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


class Refused(Exception):
    """A request is answered with an error.

    Args:
        status: of HTTP.
        param: what in the request it is about.
        challenge: value of the `WWW-Authenticate` header.
        retry_after_s: seconds after which the client may ask again.
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
    def response(self) -> Response:
        """What the client gets."""
        error = {"message": str(self), "type": HTTPStatus(self.status).phrase, "param": self.param, "code": self.status}
        headers = {"WWW-Authenticate": self.challenge, "Retry-After": self.retry_after_s}
        given = {name: str(value) for name, value in headers.items() if value is not None}
        return JSONResponse({"error": error}, self.status, given)


async def answer_refusal(_: Request, refused: Exception) -> Response:
    """Exception handler of the application for Refused."""
    if not isinstance(refused, Refused):
        raise refused
    return refused.response
