"""Headers that send prompts with the same document to the same server, for routers without KVGraft.

Such routers keep requests of a session together. Examples are vLLM's own `vllm-router --policy
consistent_hash` and vLLM's production stack. Reuse depends on text, not on sessions, so the session
id here is a digest of the prompt's largest segment. A header can name one segment only, and the
largest one takes longest to prefill.

This module imports neither Ray, vLLM nor torch, so clients can use it.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvgraft.core.prompt import START, Segment, parse_markers

# the header that vLLM's router checks first
HEADER = "X-Session-ID"
MIN_SECRET_BYTES = 16
# roles whose text belongs to the application, not to a document
_INSTRUCTIONS = ("system", "developer")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# used if the client gives no secret; valid in this process only
_OWN_SECRET = secrets.token_bytes(32)

Prompt = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def affinity_headers(prompt: Prompt, *, secret: str | bytes | None = None) -> dict[str, str]:
    """Return the headers of a request, for a router that keeps sessions together.

    Prompts with the same largest segment get the same headers; the other text and its order do not
    matter. Segments are the texts between reuse markers (`kvgraft.core.prompt.mark`). Without
    markers they are the text parts of a message that has several, else the texts between blank
    lines. System prompts do not count, because all requests of an application have the same one.

    Args:
        prompt: messages in the form of OpenAI's chat completions or responses; or the body of such
            a request, or of a completion; or its text; or the texts of its segments.
        secret: key of the digest, at least 16 bytes. Clients with the same key are sent to the same
            servers. None: a random key of this process, so that only its own requests are kept
            together.

    Returns:
        One header; none if the prompt has no such text (token ids, images, only a system prompt).

    Raises:
        ValueError: the secret is too short, or the prompt has a marker without a partner.
    """
    key = _OWN_SECRET if secret is None else _as_bytes(secret)
    if len(key) < MIN_SECRET_BYTES:
        raise ValueError(f"secret has {len(key)} bytes, must have at least {MIN_SECRET_BYTES}")

    if not (segments := _segments(prompt)):
        return {}
    # break ties by text, so that the choice does not depend on the order
    largest = max(segments, key=lambda text: (len(text), text))
    digest = hashlib.blake2b(_as_bytes(largest), digest_size=16, key=hashlib.sha256(key).digest())
    return {HEADER: digest.hexdigest()}


def _as_bytes(text: str | bytes) -> bytes:
    """Encode text as UTF-8; bytes are returned unchanged."""
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text


def _segments(prompt: Prompt) -> list[str]:
    """Return the candidate segments of a prompt, without surrounding white space."""
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
    """Yield the text parts of each message that is not a system prompt."""
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
    """Return the texts in the content of a message."""
    if isinstance(content, str):
        return [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in content or ()]
    return [text for text in texts if isinstance(text, str)]
