"""A request on its way through a fleet, and the text by which it is routed."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvgraft.segments.fingerprints import Fingerprints


@dataclass(frozen=True, eq=False)
class FleetRequest:
    """One HTTP request.

    Attributes:
        target: path and query.
        headers: names in lower case, and values.
        text: of its prompt; None: it is routed by load alone.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    text: Fingerprints | None = None


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        """Whether its body is server-sent events."""
        return any(n.lower() == "content-type" and v.startswith("text/event-stream") for n, v in self.headers)


def decoded(body: bytes) -> Mapping[str, Any]:
    """A JSON object; an empty one for a body that is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        try:
            found = json.loads(body)  # vLLM understands more than strict JSON
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def texts_of(request: Mapping[str, Any]) -> list[str]:
    """The texts of an OpenAI request's prompt in their order: a completion, a chat or a response; token ids are none,
    nor are pictures."""
    return [text for field in ("prompt", "instructions", "input", "messages") for text in _texts(request.get(field))]


def scope_of(secret: bytes, *parts: bytes) -> bytes:
    """The scope of fingerprints, 32 bytes, of whoever these parts name: nobody makes it without the secret."""
    named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(named, digest_size=32, key=secret).digest()


def _texts(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, list):
        for part in found:
            yield from _texts(part)
    elif isinstance(found, dict):
        yield from _texts(found.get("content", found.get("text")))
