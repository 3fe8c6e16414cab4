"""Sessions of requests to an OpenAI endpoint: as JSONL, as text, as token ids.

A line of a trace is `{"session": NAME, "timestamp": SECONDS, "body": {...}}`, or a bare body, which
then belongs to the session that has the file's name. Recorders that write more (a `type`, responses
between the requests) are understood. Sessions, times, messages and tokens are read as `kvgraft
analyze` reads them."""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvgraft_lab.traffic.records import Prompt, prompts_of, session_of, timestamp_of
from kvgraft_lab.traffic.tokens import open_tokens, pieces_of

Body = Mapping[str, Any]
EncodeBody = Callable[[Body], list[int]]

_PIECE = re.compile(r" ?[^\W\d_]{1,10}|\d{1,3}|\s+| ?(?:[^\w\s]|_){1,4}")


@dataclass(frozen=True)
class Turn:
    """One request; `at_s` as its recorder counts seconds."""

    at_s: float
    body: Body


@dataclass(frozen=True)
class Session:
    """Requests that somebody sent one after another; `kind` says of what shape they are."""

    name: str
    kind: str
    turns: tuple[Turn, ...]


def lines_of(sessions: Iterable[Session]) -> Iterator[str]:
    """The sessions as JSONL, in the order of their timestamps."""
    turns = [(turn.at_s, session.name, turn.body) for session in sessions for turn in session.turns]
    for at_s, name, body in sorted(turns, key=lambda turn: turn[0]):
        yield json.dumps({"session": name, "timestamp": round(at_s, 3), "body": body})


def read_traces(paths: Sequence[Path], limit: int) -> tuple[list[Session], int]:
    """(the first `limit` sessions of these files, and of the JSONL files of directories among them,
    by name; how many of their lines were no requests with a prompt).

    Raises:
        ValueError: a line that is no JSON object, with its place; or no session at all.
        OSError: a file cannot be read.
    """
    sessions: list[Session] = []
    skipped = 0
    for path in chain.from_iterable(
        sorted(p.glob("*.jsonl")) if p.is_dir() else [p] for p in paths
    ):
        if len(sessions) >= limit:
            break
        found, others = _read_file(path)
        sessions += found
        skipped += others
    if not sessions:
        raise ValueError(f"no requests with messages or a prompt in {', '.join(map(str, paths))}")
    return sessions[:limit], skipped


def _read_file(path: Path) -> tuple[list[Session], int]:
    turns: dict[str, list[Turn]] = {}
    skipped = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            if not isinstance(entry, dict):
                raise ValueError(
                    f"{path}:{number}: a line must be a JSON object, got {type(entry).__name__}"
                )
            body = entry.get("body", entry)
            if entry.get("type", "request") != "request" or not _is_request(body):
                skipped += 1
                continue
            try:
                at_s = timestamp_of(entry) or 0.0
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            turns.setdefault(session_of(entry, body) or path.stem, []).append(Turn(at_s, body))
    kept = [(name, sorted(found, key=lambda turn: turn.at_s)) for name, found in turns.items()]
    return [Session(name, "recorded", tuple(found)) for name, found in kept], skipped


def _is_request(body: object) -> bool:
    return isinstance(body, dict) and bool({"messages", "prompt"} & body.keys())


def text_of_body(body: Body) -> str:
    """What a body asks, as one text: that of a request with one more message begins with that of
    the one before.

    Raises:
        ValueError: a prompt of token ids, or a part of a message that is no text.
    """
    prompt = _prompt_of(body)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, tuple):
        raise ValueError(f"a prompt must be a string here, got {len(prompt)} token ids")
    texts = [json.dumps(prompt.tools)] if prompt.tools else []
    for message in prompt.messages:
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        texts.append(f"{message['role']} : {message['content']}{calls}")
    return "".join(f"{text}\n\n" for text in texts)


def _prompt_of(body: Body) -> Prompt:
    """What a body asks, as `kvgraft analyze` reads it; ValueError if that is nothing or several
    prompts."""
    prompts = prompts_of(body)
    if len(prompts) > 1:
        raise ValueError(f"a body must ask one thing here, got a batch of {len(prompts)} prompts")
    return prompts[0]


def hashed(vocab_size: int) -> EncodeBody:
    """Bodies as the token ids of a model that knows no words: every piece of the text, about four
    characters in English, is a hash below `vocab_size`. Equal text has equal ids; two unequal
    pieces in `vocab_size` have, too, so a block of unequal text has not."""

    def encode(body: Body) -> list[int]:
        return [
            1 + zlib.crc32(piece.encode()) % (vocab_size - 1)
            for piece in _PIECE.findall(text_of_body(body))
        ]

    return encode


def tokenised(folder: Path) -> EncodeBody:
    """Bodies as a model directory's tokenizer and chat template have them, and `kvgraft analyze
    --tokenizer`."""
    reader = open_tokens(folder)

    def encode(body: Body) -> list[int]:
        return np.concatenate(pieces_of(_prompt_of(body), reader)).tolist()

    return encode


class OwnAnswers:
    """Puts the answers that a server gave where a recorded session has the answers that it got."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._asked: Sequence[Mapping[str, Any]] = ()
        self._answer: str | None = None

    def body(self, body: Body) -> Body:
        """The body, which must have messages, with the server's own answers."""
        messages = body["messages"]
        behind = messages[len(self._asked) :]
        continues = (
            messages[: len(self._asked)] == self._asked
            and behind
            and behind[0]["role"] == "assistant"
        )
        if continues and self._answer is not None:
            self._texts[_key(behind[0])] = self._answer
        self._asked = messages
        return {**body, "messages": [self._own(message) for message in messages]}

    def answered(self, text: str) -> None:
        """Take note of the answer to the last body."""
        self._answer = text

    def _own(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        own = self._texts.get(_key(message))
        return message if own is None else {**message, "content": own}


def _key(message: Mapping[str, Any]) -> str:
    return json.dumps(message, sort_keys=True)
