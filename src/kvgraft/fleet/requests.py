"""Request on its way through a fleet, and the text by which it is routed."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraft.core.fingerprints import Fingerprints
from kvgraft.server.body import parsed
from kvgraft.vllm.options import KEY, PARAMS

# limits on one request's texts; a request above them is routed by load, because fingerprinting it
# would delay all others
MAX_TEXTS = 1 << 12
# characters of all texts together
MAX_CHARACTERS = 1 << 22
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-connection"}
    | {"te", "transfer-encoding", "upgrade"}
)
_FIELDS = ("prompt", "instructions", "input", "messages")


@dataclass(frozen=True, eq=False)
class FleetRequest:
    """One HTTP request on its way to a replica.

    Attributes:
        target: path and query.
        headers: names and values; names in lower case.
        text: fingerprints of its prompt; None: it is routed by load alone.
        avoids: names of replicas that failed this request; they get it only if there is no other.
        at: time of arrival in nanoseconds, if it changes the state of servers; else 0.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    text: Fingerprints | None = None
    avoids: frozenset[str] = frozenset()
    at: int = 0


class ServerFailed(ConnectionError):
    """Error of a replica whose server did not answer, or not completely.

    The only argument is the replica's name.
    """


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        """Return whether the body consists of server-sent events."""
        return any(
            n.lower() == "content-type" and v.startswith("text/event-stream")
            for n, v in self.headers
        )


def end_to_end(headers: Iterable[tuple[str, str]], *left_out: str) -> tuple[tuple[str, str], ...]:
    """Return the headers to pass on.

    Headers of one connection are dropped, including those that `Connection` names (RFC 9110,
    7.6.1).

    Args:
        left_out: more headers to drop, in lower case.
    """
    headers = tuple(headers)
    named = (
        ",".join(value for name, value in headers if name.lower() == "connection")
        .lower()
        .split(",")
    )
    dropped = HOP_BY_HOP.union(left_out, map(str.strip, named))
    return tuple((name, value) for name, value in headers if name.lower() not in dropped)


def decoded(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a body; an empty one if the body is something else."""
    try:
        found = parsed(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def texts_of(request: Mapping[str, Any]) -> list[str]:
    """Return the texts of a prompt in order, for an OpenAI completion, chat or response.

    Token ids and images are skipped. The list is empty if there are too many texts or characters.
    """
    texts: list[str] = []
    parts, room = [request.get(field) for field in reversed(_FIELDS)], MAX_CHARACTERS

    while parts:
        part = parts.pop()
        if isinstance(part, str):
            texts.append(part)
            room -= len(part)
        elif isinstance(part, list):
            parts += [inner for inner in reversed(part) if isinstance(inner, str | list | dict)]
        elif isinstance(part, dict):
            parts.append(part.get("content", part.get("text")))
        if room < 0 or len(texts) > MAX_TEXTS:
            return []
    return texts


def narrowed_by(request: Mapping[str, Any], names: Collection[str]) -> tuple[bytes, ...]:
    """Return the fields that narrow the namespace of a request: namespace, cache salt and adapter.

    A field is empty if it is missing, or of a type that servers refuse.

    Args:
        names: names of the base model, which is not an adapter.
    """
    params = request.get(PARAMS)
    options = params.get(KEY) if isinstance(params, dict) else None
    namespace = options.get("namespace") if isinstance(options, dict) else None

    model = request.get("model")
    adapter = None if isinstance(model, str) and model in names else model
    given = (namespace, request.get("cache_salt"), adapter)
    return tuple(part.encode(errors="replace") if isinstance(part, str) else b"" for part in given)


def scope_of(secret: bytes, *parts: bytes) -> bytes:
    """Return the scope of fingerprints, 32 bytes, a keyed digest of these parts.

    Nobody can compute it without the secret.
    """
    named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(named, digest_size=32, key=secret).digest()
