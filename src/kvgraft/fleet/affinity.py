"""Headers that bring prompts with the same document to the same server, behind a router that knows
nothing of ours.

Such routers (vLLM's own `vllm-router --policy consistent_hash`, vLLM's production stack) keep
requests with the same session together. Reuse is of text, not of sessions, so the session here is
the largest segment of the prompt: of all that could be reused it is what takes longest to read, and
a header can name one thing only. Imports neither Ray, vLLM nor torch, so that a client can use it.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvgraft.segments.prompt import START, Segment, parse_markers

HEADER = "X-Session-ID"  # vLLM's router looks at this one first
MIN_SECRET_BYTES = 16
# roles whose text is that of an application, not of a document
_INSTRUCTIONS = ("system", "developer")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_OWN_SECRET = secrets.token_bytes(32)  # of this process

Prompt = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def affinity_headers(prompt: Prompt, *, secret: str | bytes | None = None) -> dict[str, str]:
    """The headers of a request, for a router that keeps sessions together.

    Equal largest segments give equal headers, whatever stands around them and in whatever order.
    What a segment is: text between reuse markers (`kvgraft.segments.prompt.mark`), if there are
    any; else each of several text parts of a message; else what stands between blank lines. System
    prompts do not count: all requests of an application have the same one.

    Args:
        prompt: messages as of OpenAI's chat completions or responses; or the body of such a
            request, or of a completion; or its text; or the texts of its segments.
        secret: of which the value is a keyed digest, at least 16 bytes. Clients with the same one
            are sent to the same servers. None: drawn by this process, whose requests are then
            together with each other alone.

    Returns:
        One header; none if the prompt has no such text (token ids, images, nothing but a system
        prompt).

    Raises:
        ValueError: the secret is too short, or markers of the prompt have no partner.
    """
    key = _OWN_SECRET if secret is None else _as_bytes(secret)
    if len(key) < MIN_SECRET_BYTES:
        raise ValueError(f"secret has {len(key)} bytes, must have at least {MIN_SECRET_BYTES}")
    if not (segments := _segments(prompt)):
        return {}
    # of equally long ones always the same
    largest = max(segments, key=lambda text: (len(text), text))
    digest = hashlib.blake2b(_as_bytes(largest), digest_size=16, key=hashlib.sha256(key).digest())
    return {HEADER: digest.hexdigest()}


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text


def _segments(prompt: Prompt) -> list[str]:
    """Texts of which the largest decides, without what is around them of white space."""
    messages = [texts for texts in _messages(prompt) if texts]
    marked = [text for texts in messages for text in texts if START in text]
    if marked:
        found = [
            part.text
            for text in marked
            for part in parse_markers(text)
            if isinstance(part, Segment)
        ]
    else:
        found = [
            part
            for texts in messages
            for part in (texts if len(texts) > 1 else _BLANK_LINE.split(texts[0]))
        ]
    return [text for text in map(str.strip, found) if text]


def _messages(prompt: Prompt) -> Iterator[list[str]]:
    """The text parts of each message that is no instruction."""
    if isinstance(prompt, Mapping):
        for field in ("messages", "prompt", "input"):
            if prompt.get(field):
                yield from _messages(prompt[field])
    elif isinstance(prompt, str):
        yield [prompt]
    else:
        yield [item for item in prompt if isinstance(item, str)]
        for message in prompt:
            if isinstance(message, Mapping) and message.get("role") not in _INSTRUCTIONS:
                yield _parts(message.get("content"))


def _parts(content: Any) -> list[str]:
    """The texts of what a message holds."""
    if isinstance(content, str):
        return [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in content or ()]
    return [text for text in texts if isinstance(text, str)]
