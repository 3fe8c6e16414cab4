"""Tokenisation of prompts: chat template, reuse markers, anchors, padding to blocks (SparseX,
section 4.5)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, END = "<|reuse|>", "<|/reuse|>"  # around a segment in text
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Segment:
    """Reusable text. It is tokenised on its own, so its token ids never depend on its
    neighbours."""

    text: str


Part = str | Segment


@dataclass(frozen=True, eq=False)
class TokenisedPrompt:
    """Token ids int64 [T] and the half-open token ranges of the explicit segments, in order."""

    token_ids: np.ndarray
    segments: tuple[tuple[int, int], ...]


def mark(text: str) -> str:
    """Put text between reuse markers, unless it has markers of its own."""
    return text if START in text else f"{START}{text}{END}"


def parse_markers(text: str, *, start: str = START, end: str = END) -> list[Part]:
    """Split text at reuse markers. Text between a start and an end marker becomes a Segment. Empty
    pieces are dropped.

    Raises:
        ValueError: a marker is unpaired or nested (the message gives its position), or the markers
            are empty or one begins with the other.
    """
    if start.startswith(end) or end.startswith(start):
        raise ValueError(
            f"markers {start!r} and {end!r}: must not be empty, nor one the beginning of the other"
        )

    parts: list[Part] = []
    cursor, opened = 0, None
    for marker in re.finditer(f"{re.escape(start)}|{re.escape(end)}", text):
        if (marker.group() == start) != (opened is None):
            raise ValueError(
                f"marker {marker.group()!r} at character {marker.start()}: markers must alternate"
            )
        piece = text[cursor : marker.start()]
        parts.append(piece if opened is None else Segment(piece))
        cursor, opened = marker.end(), marker.start() if opened is None else None

    if opened is not None:
        raise ValueError(f"marker {start!r} at character {opened}: has no {end!r}")

    return [part for part in [*parts, text[cursor:]] if part not in ("", Segment(""))]


def split_at_anchors(text: str, anchors: Sequence[str]) -> list[Part]:
    """Split text so that every anchor begins a Segment, which lasts to the next one (cross-query
    reuse, segmentation).

    Anchors are strings that recur in a trace, such as "\\nThought:" or "\\nPassage". The joined
    parts equal the text.

    Raises:
        ValueError: there is no anchor, or an empty one.
    """
    if not anchors or "" in anchors:
        raise ValueError(f"anchors {list(anchors)}: at least one is needed, and none may be empty")
    cuts = [
        *(found.start() for found in re.finditer("|".join(map(re.escape, anchors)), text)),
        len(text),
    ]
    head: list[Part] = [text[: cuts[0]]] if cuts[0] else []
    return head + [Segment(text[start:stop]) for start, stop in pairwise(cuts)]


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> str:
    """Render a conversation up to the assistant's answer, by the model's own chat template
    (sandboxed).

    Args:
        messages: `{"role": system | user | assistant | tool, "content": text}` each; reuse markers
            stay in the text.

    Raises:
        ValueError: the tokenizer has no template, a message is not of this form, or the template
            refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give the prompt as text")

    for number, message in enumerate(messages):
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise ValueError(
                f"message {number}: must have a role and a text content, and nothing else"
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {number}, role {message['role']!r}: allowed are {', '.join(ROLES)}"
            )

    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def tokenise(
    parts: str | Sequence[Part] | Sequence[int],
    encode: Callable[[str], list[int]],
    *,
    prefix_ids: Sequence[int] = (),
    block_size: int | None = None,
    pad_id: int | None = None,
) -> TokenisedPrompt:
    """Tokenise a prompt.

    Args:
        parts: plain text, or parts in order, or token ids, which are used unchanged.
        encode: text to token ids, without special tokens of its own.
        prefix_ids: ids to put first, such as the beginning-of-sequence token.
        block_size, pad_id: both or neither. Padding is inserted before a segment and before text
            that follows one, so that segments begin at multiples of block_size.

    Raises:
        ValueError: the prompt has no tokens, only one of block_size and pad_id is given, or
            block_size is below 1.
    """
    if (block_size is None) != (pad_id is None) or (block_size is not None and block_size < 1):
        raise ValueError(
            f"block_size {block_size}, pad_id {pad_id}: both or neither, and block_size at least 1"
        )
    # Token ids need no loop, which would take milliseconds for thousands of them.
    if set(map(type, parts)) == {int}:
        return TokenisedPrompt(np.array([*prefix_ids, *parts], dtype=np.int64), ())

    token_ids, segments, after_segment = list(prefix_ids), [], False
    for part in [parts] if isinstance(parts, str) else parts:
        is_segment = isinstance(part, Segment)
        text = part.text if isinstance(part, Segment) else part
        if not (new := encode(text) if isinstance(text, str) else [index(text)]):
            continue
        if block_size and pad_id is not None and (is_segment or after_segment):
            token_ids += [pad_id] * (-len(token_ids) % block_size)
        if is_segment:
            segments.append((len(token_ids), len(token_ids) + len(new)))
        token_ids += new
        after_segment = is_segment

    if len(token_ids) == len(prefix_ids):
        raise ValueError("the prompt has no tokens")

    return TokenisedPrompt(np.array(token_ids, dtype=np.int64), tuple(segments))
