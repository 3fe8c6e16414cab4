"""The one endpoint of a fleet: who asks, by which text a request is routed, and what is tried again."""

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvgraft.fleet.asks import Ask, decoded, texts_of
from kvgraft.segments.fingerprints import Fingerprints
from kvgraft.segments.keys import scope_digest
from kvgraft.vllm.options import KEY, PARAMS
from kvgraft.vllm.server.keys import Keys
from kvgraft.vllm.server.tenancy import Keyring, Salts, shown_key


class Door:
    """Takes the requests of all clients and passes them on to replicas.

    Args:
        replicas: handle of the deployment of `Replica`.
        keys: API keys and admin key, as those of the servers.
        salts: cache keys, as those of the servers.
        model: the name under which the model is served; what has another one runs under an adapter.
    """

    def __init__(self, replicas: DeploymentHandle, keys: Keys, salts: Salts, model: str) -> None:
        self._replicas = replicas.options(stream=True)
        self._keyring, self._salts, self._model = Keyring(keys), salts, model

    async def __call__(self, request: Request) -> Response:
        """One request. It is tried a second time if its replica dies before anything was answered."""
        body = await request.body()
        principal = self._keyring.principal(shown_key(request.headers.get("Authorization"), basic=False))
        if principal is None and request.url.path not in ("/health", "/ping", "/version"):
            error = {"message": "no valid API key in the Authorization header", "type": "Unauthorized", "code": 401}
            return JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        text = self._text_of(principal, body) if principal is not None else None
        ask = Ask(request.method, target, tuple(request.headers.items()), body, text)
        for last in (False, True):
            answer = self._replicas.remote(ask)
            try:
                status, headers = await anext(answer)
                return StreamingResponse(_rest(answer), status, dict(headers))
            except RayActorError:
                if last:
                    raise
        raise AssertionError("unreachable")

    def _text_of(self, principal: Any, body: bytes) -> Fingerprints | None:
        """By which a request is routed; None if it has no text."""
        request = decoded(body)
        texts = texts_of(request)
        if not texts:
            return None
        params = request.get(PARAMS)
        options = params.get(KEY) if isinstance(params, dict) else None
        namespace = options.get("namespace", "") if isinstance(options, dict) else ""
        salt = self._salts.of(principal.tenant, str(namespace), request.get("cache_salt"))
        named = request.get("model", self._model)
        scope = scope_digest(self._model if named == self._model else f"{self._model}\0{named}", salt)
        return Fingerprints.joined(Fingerprints.of(text.encode(errors="replace"), scope) for text in texts)


async def _rest(answer: Any) -> AsyncGenerator[bytes]:
    async for chunk in answer:
        yield chunk
