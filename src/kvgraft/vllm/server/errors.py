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
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, challenge: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.challenge = status, param, challenge

    @property
    def response(self) -> Response:
        """What the client gets."""
        error = {"message": str(self), "type": HTTPStatus(self.status).phrase, "param": self.param, "code": self.status}
        headers = {"WWW-Authenticate": self.challenge} if self.challenge else None
        return JSONResponse({"error": error}, self.status, headers)


async def answer_refusal(_: Request, refused: Exception) -> Response:
    """Exception handler of the application for Refused."""
    if not isinstance(refused, Refused):
        raise refused
    return refused.response
