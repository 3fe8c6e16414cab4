"""A request on its way through a fleet, and the text by which it is routed."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraft.segments.fingerprints import Fingerprints
from kvgraft.vllm.options import KEY, PARAMS
from kvgraft.vllm.server.body import parsed

# of a request; one with more is routed by load, as all others would wait for it
MAX_TEXTS = 1 << 12
MAX_CHARACTERS = 1 << 22  # of them together
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-connection"}
    | {"te", "transfer-encoding", "upgrade"}
)
_FIELDS = ("prompt", "instructions", "input", "messages")


@dataclass(frozen=True, eq=False)
class FleetRequest:
    """One HTTP request.

    Attributes:
        target: path and query.
        headers: names in lower case, and values.
        text: of its prompt; None: it is routed by load alone.
        avoids: replicas that have failed it, and get it only if there is no other one.
        at: when it was asked for, in nanoseconds, if it changes the state of servers.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    text: Fingerprints | None = None
    avoids: frozenset[str] = frozenset()
    at: int = 0


class ServerFailed(ConnectionError):
    """The server of the replica with this name (the only argument) has not answered, or not in
    full."""


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        """Whether its body is server-sent events."""
        return any(
            n.lower() == "content-type" and v.startswith("text/event-stream")
            for n, v in self.headers
        )


def end_to_end(headers: Iterable[tuple[str, str]], *left_out: str) -> tuple[tuple[str, str], ...]:
    """Headers that are passed on: without those of one connection, the ones included that
    `Connection` names (RFC 9110, 7.6.1), and without these others, in lower case."""
    headers = tuple(headers)
    named = (
        ",".join(value for name, value in headers if name.lower() == "connection")
        .lower()
        .split(",")
    )
    dropped = HOP_BY_HOP.union(left_out, map(str.strip, named))
    return tuple((name, value) for name, value in headers if name.lower() not in dropped)


def decoded(body: bytes) -> Mapping[str, Any]:
    """A JSON object; an empty one for a body that is none."""
    try:
        found = parsed(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def texts_of(request: Mapping[str, Any]) -> list[str]:
    """The texts of an OpenAI request's prompt in their order: a completion, a chat or a response;
    token ids are none, nor are pictures. None at all if there are too many, or they are too
    long."""
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
    """What of a request narrows down whose cache it uses: namespace, salt and adapter. What servers
    refuse is empty.

    Args:
        names: of the model itself, which is no adapter.
    """
    params = request.get(PARAMS)
    options = params.get(KEY) if isinstance(params, dict) else None
    namespace = options.get("namespace") if isinstance(options, dict) else None
    model = request.get("model")
    adapter = None if isinstance(model, str) and model in names else model
    given = (namespace, request.get("cache_salt"), adapter)
    return tuple(part.encode(errors="replace") if isinstance(part, str) else b"" for part in given)


def scope_of(secret: bytes, *parts: bytes) -> bytes:
    """The scope of fingerprints, 32 bytes, of whoever these parts name: nobody makes it without the
    secret."""
    named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(named, digest_size=32, key=secret).digest()
