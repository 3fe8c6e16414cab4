"""Token ids of a trace's prompts. Repeated text of a conversation is tokenised once."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from kvgraft.core.segmentation import ANCHORS
from kvgraft.engine.text import anchor_ids, load_tokenizer, opening_ids
from kvgraft_lab.traffic.records import (
    BLOCK_TOKENS,
    BadLine,
    Conversation,
    HashedPrompt,
    Prompt,
)

# pieces of text whose tokens are cached
REMEMBERED = 1 << 16
_PIECE = re.compile(r"\s?[A-Za-z]{1,6}|\s?\d{1,3}|\s+|.", re.DOTALL)
# first token id of pieces: beyond every vocabulary, so that they never equal token ids of a trace
_FIRST_ID = 1 << 24


class TokenReader(Protocol):
    """Tokenizer of prompts.

    Attributes:
        name: name for reports.
        unknown_id: token id of all unknown words, or None.
        anchors: token sequences that begin a segment, for near-duplicates.
    """

    name: str
    unknown_id: int | None
    anchors: list[list[int]]

    def pieces(self, prompt: str | Conversation) -> list[np.ndarray]:
        """Return the token ids of a prompt, int32, cut at the beginnings of messages where the
        tokenizer knows them.
        """

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text within a prompt, int32."""


class ModelTokens:
    """A Hugging Face tokenizer and its chat template, as a server of that model uses them.

    Rendered text is cut before its special tokens. No token crosses these, so the text after one
    always has the same tokens, and is tokenised once for all prompts.
    """

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
    """Words, cut into pieces about as long as a tokenizer's tokens, for use without a tokenizer.

    Equal texts have equal tokens, on which reuse depends. The number of tokens is an estimate. The
    vocabulary grows with the text.
    """

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
    """Return the tokenizer of a directory, or `WordPieces`."""
    return WordPieces() if directory is None else ModelTokens(directory)


def pieces_of(prompt: Prompt | HashedPrompt, reader: TokenReader) -> list[np.ndarray]:
    """Return the token ids of a prompt, int32, cut at the beginnings of messages where known.

    Given token ids are unchanged. Blocks without text get artificial ids, equal ones for equal
    blocks.

    Raises:
        BadLine: the prompt has no tokens, or the chat template refuses it.
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
    """Return artificial token ids, different in every block."""
    firsts = BLOCK_TOKENS * np.array(prompt.ids, np.int32)
    return (firsts[:, None] + np.arange(BLOCK_TOKENS, dtype=np.int32)).reshape(-1)[
        : prompt.num_tokens
    ]


def role_marked(prompt: Conversation) -> list[str]:
    """Return a conversation without a template: the tools, and each message after a mark of its
    role.
    """
    tools = [f"<|tools|>\n{json.dumps(prompt.tools)}\n"] if prompt.tools else []
    return [*tools, *map(_as_text, prompt.messages), "<|assistant|>\n"]


def _as_text(message: Mapping[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return f"<|{message['role']}|>\n{message['content']}{calls}\n"


def _stands_alone(token: Any) -> bool:
    """Return whether an added token is always found in a text, and takes no characters around
    it.
    """
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)
