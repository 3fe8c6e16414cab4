"""From prompts of a trace to token ids. What a conversation repeats is tokenised once."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from kvgraft.engine.text import anchor_ids, load_tokenizer, opening_ids
from kvgraft.evaluate.traffic.records import (
    BLOCK_TOKENS,
    BadLine,
    Conversation,
    HashedPrompt,
    Prompt,
)
from kvgraft.segments.segmentation import ANCHORS

REMEMBERED = 1 << 16  # pieces of text whose tokens are kept
_PIECE = re.compile(r"\s?[A-Za-z]{1,6}|\s?\d{1,3}|\s+|.", re.DOTALL)
# of pieces: beyond every vocabulary, so that they are never taken for token ids of a trace
_FIRST_ID = 1 << 24


class TokenReader(Protocol):
    """What makes tokens of text.

    Attributes:
        name: for reports.
        unknown_id: of all words that it does not know, or None.
        anchors: tokens that begin a segment, for near-duplicates.
    """

    name: str
    unknown_id: int | None
    anchors: list[list[int]]

    def pieces(self, prompt: str | Conversation) -> list[np.ndarray]:
        """Token ids int32 of a prompt, cut where messages begin as far as the tokenizer knows
        where."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32 of a text that stands somewhere in a prompt."""


class ModelTokens:
    """A Hugging Face tokenizer and its chat template, as a server of that model would use them.

    Rendered text is cut before the special tokens in it: no token reaches over those, so what
    follows one is tokenised on its own to the same tokens, and once for all prompts."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._tokenizer = load_tokenizer(directory)
        self.unknown_id: int | None = self._tokenizer.unk_token_id
        self.anchors = anchor_ids(self._tokenizer, ANCHORS)
        self._special = [
            token.content
            for token in self._tokenizer.added_tokens_decoder.values()
            if _stands_alone(token)
        ]
        self._remembered = lru_cache(REMEMBERED)(self._encode)

    def pieces(self, prompt: str | Conversation) -> list[np.ndarray]:
        if isinstance(prompt, str):
            opening = np.array(opening_ids(self._tokenizer, prompt), np.int32)
            return [opening, *map(self.encode, self._cut(prompt))]
        if not self._tokenizer.chat_template:
            return [self.encode(text) for text in role_marked(prompt)]
        return [self.encode(text) for text in self._cut(self._render(prompt))]

    def encode(self, text: str) -> np.ndarray:
        return self._remembered(text)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(
            self._tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32
        )

    def _render(self, prompt: Conversation) -> str:
        options = {"tools": list(prompt.tools) or None, **prompt.template_options}
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise BadLine(
                f"the chat template of {self.name} refuses the messages: {error}"
            ) from error
        return text

    def _cut(self, text: str) -> list[str]:
        present = [mark for mark in self._special if mark in text]
        if not present:
            return [text]
        return re.split(
            f"(?={'|'.join(map(re.escape, sorted(present, key=len, reverse=True)))})", text
        )


class WordPieces:
    """Words, cut into pieces about as long as a tokenizer's tokens, with a vocabulary that grows:
    for those who have no tokenizer at hand. Equal texts have equal tokens, which is what reuse
    depends on; how many is an estimate."""

    name = "pieces of words"
    unknown_id: int | None = None
    anchors: list[list[int]] = []  # noqa: RUF012

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._remembered = lru_cache(REMEMBERED)(self._encode)

    def pieces(self, prompt: str | Conversation) -> list[np.ndarray]:
        return [
            self.encode(text)
            for text in ([prompt] if isinstance(prompt, str) else role_marked(prompt))
        ]

    def encode(self, text: str) -> np.ndarray:
        return self._remembered(text)

    def _encode(self, text: str) -> np.ndarray:
        ids = self._ids
        return np.array(
            [ids.setdefault(piece, _FIRST_ID + len(ids)) for piece in _PIECE.findall(text)],
            np.int32,
        )


def open_tokens(directory: Path | None) -> TokenReader:
    """The tokenizer of a directory, or `WordPieces`."""
    return WordPieces() if directory is None else ModelTokens(directory)


def pieces_of(prompt: Prompt | HashedPrompt, reader: TokenReader) -> list[np.ndarray]:
    """Token ids int32 of a prompt, cut where messages begin as far as that is known; ids are taken
    as they are; those of blocks without text are made up, equal ones for equal blocks.

    Raises:
        BadLine: it has no tokens, or the chat template refuses it.
    """
    if isinstance(prompt, HashedPrompt):
        pieces = [_made_up(prompt)]
    else:
        pieces = (
            [np.array(prompt, np.int32)] if isinstance(prompt, tuple) else reader.pieces(prompt)
        )
    found = [piece for piece in pieces if len(piece)]
    if not found:
        raise BadLine("the prompt has no tokens")
    return found


def _made_up(prompt: HashedPrompt) -> np.ndarray:
    """Others in every block."""
    firsts = BLOCK_TOKENS * np.array(prompt.ids, np.int32)
    return (firsts[:, None] + np.arange(BLOCK_TOKENS, dtype=np.int32)).reshape(-1)[
        : prompt.num_tokens
    ]


def role_marked(prompt: Conversation) -> list[str]:
    """A conversation without a template: the tools, and each message behind a mark of its role."""
    tools = [f"<|tools|>\n{json.dumps(prompt.tools)}\n"] if prompt.tools else []
    return [*tools, *map(_as_text, prompt.messages), "<|assistant|>\n"]


def _as_text(message: Mapping[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return f"<|{message['role']}|>\n{message['content']}{calls}\n"


def _stands_alone(token: Any) -> bool:
    """Whether an added token is found in a text as it is, whatever stands beside it, and takes
    nothing of that."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)
