"""Sessions that have the shape of recorded agent traffic: a history that grows, documents that come
back in another order, edits, tool results, and a summary in the place of the oldest turns.

    # 8 sessions of 9 turns, prompts of 20K tokens and more
    python benchmarks/sessions.py --out sessions.jsonl
    python benchmarks/sessions.py --kind append_only --scale 0.1 --completions --out chat.jsonl

Each line is `{"session": ..., "timestamp": ..., "body": {...}}`, a body an OpenAI request. The
default sizes are those of 32 recorded sessions of an agent that answers questions from documents.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import exp
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from kvgraft_lab.testbed import MODEL_DIR
from load import local_tokenizer
from traces import Body, Session, Turn, lines_of, text_of_body
from workload import single_token_words

KINDS = ("reordered", "append_only", "novel", "mixed")
NUM_TOOLS = 8
# of the logarithm of a document's length: a quarter of them is under .6, a quarter over 1.6 of the
# median
SPREAD = 0.7
EDITED_WORDS = 0.03  # of a document that is edited
Message = dict[str, Any]


@dataclass(frozen=True)
class SessionShape:
    """How large sessions are. Sizes are in words, each about a token, `_share`s of turns or
    documents in [0, 1].

    Attributes:
        turns: questions of a session; a tool call or a summary is a further request.
        documents: in a turn, from half to one and a half of it.
        document_tokens: the median; lengths are log-normal.
        known_share: of a turn's documents, those that the session has seen.
        edited_share: of these, those that have changed since.
        tool_share: of turns that call a tool before they are answered.
        context_tokens: a longer history is summarised.
        corpus: documents that all sessions draw from; the n-th is drawn 1 / n**zipf as often as the
            first.

    Raises:
        ValueError: a value out of its range.
    """

    turns: int = 9
    system_tokens: int = 7500
    tools_tokens: int = 12000
    question_tokens: int = 16
    answer_tokens: int = 400
    documents: int = 6
    document_tokens: int = 2000
    known_share: float = 0.8
    edited_share: float = 0.05
    tool_share: float = 0.07
    tool_tokens: int = 200
    context_tokens: int = 90_000
    summary_tokens: int = 1500
    corpus: int = 200
    zipf: float = 0.9

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith("_share") and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
            if not name.endswith("_share") and name != "zipf" and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.corpus < 2 * self.documents * self.turns:
            needed = 2 * self.documents * self.turns
            raise ValueError(
                f"corpus must be at least {needed}, 2 x documents x turns, got {self.corpus}"
            )

    def scaled(self, factor: float) -> "SessionShape":
        """The same shape with all numbers of tokens times `factor`."""
        sizes = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_tokens")
        }
        return replace(self, **{name: max(1, round(size * factor)) for name, size in sizes.items()})


class Corpus:
    """What all sessions have in common: how they open, and documents, of which the first are asked
    for most."""

    def __init__(self, shape: SessionShape, words: Sequence[str], seed: object) -> None:
        self._shape, self._words, self._seed = shape, words, seed
        self._weights = list(accumulate(1 / n**shape.zipf for n in range(1, shape.corpus + 1)))
        self.opening = opening(Random(f"{seed} opening"), shape, words)

    def draw(self, rng: Random, seen: Sequence[int]) -> int:
        """The number of a document that is not among those seen."""
        while (
            number := rng.choices(range(self._shape.corpus), cum_weights=self._weights)[0]
        ) in seen:
            pass
        return number

    def text(self, number: int) -> list[str]:
        """Its words, the same for every session."""
        return document(Random(f"{self._seed} document {number}"), self._shape, self._words)


def opening(
    rng: Random, shape: SessionShape, words: Sequence[str]
) -> tuple[Message, list[dict[str, Any]]]:
    """(system prompt, tools) of an agent."""
    query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    length = max(1, shape.tools_tokens // NUM_TOOLS)
    described = [(f"tool_{n}", " ".join(rng.choices(words, k=length))) for n in range(NUM_TOOLS)]
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": query}}
        for name, text in described
    ]
    return {"role": "system", "content": " ".join(rng.choices(words, k=shape.system_tokens))}, tools


def document(rng: Random, shape: SessionShape, words: Sequence[str]) -> list[str]:
    """Random words of a random length."""
    return rng.choices(words, k=max(2, round(shape.document_tokens * exp(rng.gauss(0, SPREAD)))))


def make_sessions(
    kind: str, shape: SessionShape, count: int, words: Sequence[str], seed: object
) -> list[Session]:
    """`count` sessions: equal arguments give equal text. `mixed` is one of each kind in turn.

    Timestamps are seconds; a session starts every 5 s on average, and its next request comes 10 s
    after the last one.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    corpus = Corpus(shape, words, seed)
    sessions, start = [], 0.0
    for number in range(count):
        own = KINDS[number % 3] if kind == "mixed" else kind
        rng = Random(f"{own} {shape} {seed} {number}")
        start += rng.expovariate(1 / 5)
        at_s, turns = start, []
        for body in SessionAuthor(own, shape, words, corpus, rng).bodies():
            turns.append(Turn(at_s, body))
            at_s += rng.expovariate(1 / 10)
        sessions.append(Session(f"{own}-{number}", own, tuple(turns)))
    return sessions


class SessionAuthor:
    """Writes the requests of one session of a kind other than `mixed`."""

    def __init__(
        self, kind: str, shape: SessionShape, words: Sequence[str], corpus: Corpus, rng: Random
    ) -> None:
        self.kind, self.shape, self.words, self.corpus, self.rng = kind, shape, words, corpus, rng
        self.history: list[Message] = []  # behind the system prompt
        self.seen: dict[int, list[str]] = {}  # documents by number, as the session knows them now
        self.system, self.tools = corpus.opening

    def bodies(self) -> Iterator[Body]:
        """All requests, in order."""
        for turn in range(self.shape.turns):
            if self.kind == "novel":  # no tools: their schemas are alike
                self.system, self.tools = opening(self.rng, self.shape, self.words)[0], []
                self.history.clear()
            self.history.append({"role": "user", "content": self._ask()})
            if self.kind == "reordered" and (old := self._too_old()):
                yield self._summary_request(old)
                summary = {"role": "user", "content": self._fresh(self.shape.summary_tokens)}
                self.history = [summary, *self.history[len(old) :]]
            yield self._body()
            if self.tools and self.rng.random() < self.shape.tool_share:
                self._call_tool(turn)
                yield self._body()
            self.history.append(
                {"role": "assistant", "content": self._fresh(self.shape.answer_tokens)}
            )

    def _body(self) -> Body:
        body = {
            "model": "any",
            "messages": [self.system, *self.history],
            "max_tokens": self.shape.answer_tokens,
        }
        return body | ({"tools": self.tools} if self.tools else {})

    def _ask(self) -> str:
        """The documents of a turn and a question about them."""
        count = self.rng.randint(-(-self.shape.documents // 2), self.shape.documents * 3 // 2)
        texts = (
            self._retrieved(count)
            if self.kind == "reordered"
            else [self._new_text() for _ in range(count)]
        )
        headed = [f"doc {number} :\n{' '.join(text)}" for number, text in enumerate(texts, 10)]
        return "\n\n".join([*headed, self._fresh(self.shape.question_tokens)])

    def _retrieved(self, count: int) -> list[list[str]]:
        """Known documents, some of them edited, and documents new to the session, in random
        order."""
        num_known = min(
            sum(self.rng.random() < self.shape.known_share for _ in range(count)), len(self.seen)
        )
        known = self.rng.sample(list(self.seen), num_known)
        for number in known:
            if self.rng.random() < self.shape.edited_share:
                self.seen[number] = self._edited(self.seen[number])
        new: list[int] = []
        while len(new) < count - num_known:
            number = self.corpus.draw(self.rng, [*self.seen])
            self.seen[number] = self.corpus.text(number)
            new.append(number)
        drawn = [*known, *new]
        self.rng.shuffle(drawn)
        return [self.seen[number] for number in drawn]

    def _edited(self, words: Sequence[str]) -> list[str]:
        changed = list(words)
        for place in self.rng.sample(range(len(words)), max(1, round(EDITED_WORDS * len(words)))):
            changed[place] = self.rng.choice(self.words)
        return changed

    def _new_text(self) -> list[str]:
        return document(self.rng, self.shape, self.words)

    def _call_tool(self, turn: int) -> None:
        name = self.tools[self.rng.randrange(len(self.tools))]["function"]["name"]
        arguments = json.dumps({"query": self._fresh(self.shape.question_tokens)})
        call = {
            "id": f"call-{turn}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        thought = self._fresh(self.shape.question_tokens)
        result = {
            "role": "tool",
            "tool_call_id": f"call-{turn}",
            "content": self._fresh(self.shape.tool_tokens),
        }
        self.history += [{"role": "assistant", "content": thought, "tool_calls": [call]}, result]

    def _too_old(self) -> list[Message]:
        """What to summarise: if the history is too long, all of it before the last exchange and the
        new question."""
        if len(text_of_body(self._body()).split()) <= self.shape.context_tokens:
            return []
        asked = [place for place, message in enumerate(self.history) if message["role"] == "user"]
        return self.history[: asked[-2]] if len(asked) > 1 else []

    def _summary_request(self, old: Sequence[Message]) -> Body:
        """Another system prompt, no tools, and the oldest messages as text."""
        instruction: Message = {
            "role": "system",
            "content": self._fresh(self.shape.question_tokens * 4),
        }
        messages = [instruction, {"role": "user", "content": text_of_body({"messages": old})}]
        return {"model": "any", "messages": messages, "max_tokens": self.shape.summary_tokens}

    def _fresh(self, count: int) -> str:
        return " ".join(self.rng.choices(self.words, k=count))


def as_completions(sessions: Sequence[Session]) -> list[Session]:
    """The same sessions with the text of each body as a completion prompt."""
    return [
        replace(session, turns=tuple(map(_as_completion, session.turns))) for session in sessions
    ]


def _as_completion(turn: Turn) -> Turn:
    body = {
        "model": turn.body["model"],
        "prompt": text_of_body(turn.body),
        "max_tokens": turn.body["max_tokens"],
    }
    return replace(turn, body=body)


def bundled_words() -> tuple[str, ...]:
    """The bundled model's words of letters: a token there, a piece where text is hashed, and few
    tokens elsewhere."""
    return tuple(word for word in single_token_words(*local_tokenizer(MODEL_DIR)) if word.isalpha())


def main(
    out: Annotated[
        Path | None, typer.Option(help="JSONL file to write.", show_default="standard output")
    ] = None,
    kind: Annotated[str, typer.Option(help=", ".join(KINDS))] = "reordered",
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 8,
    turns: Annotated[int, typer.Option(help="Questions of a session.")] = SessionShape.turns,
    documents: Annotated[int, typer.Option(help="In a turn.")] = SessionShape.documents,
    document_tokens: Annotated[
        int, typer.Option(help="Median length of one.")
    ] = SessionShape.document_tokens,
    corpus: Annotated[
        int, typer.Option(help="Documents that all sessions draw from.")
    ] = SessionShape.corpus,
    scale: Annotated[float, typer.Option(help="All numbers of tokens times this.")] = 1.0,
    completions: Annotated[
        bool, typer.Option("--completions", help="Prompts instead of messages.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="Whose words to use.", show_default="the bundled one")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
) -> None:
    """Write sessions of OpenAI requests."""
    try:
        shape = SessionShape(
            turns=turns, documents=documents, document_tokens=document_tokens, corpus=corpus
        )
        words = single_token_words(*local_tokenizer(model)) if model else bundled_words()
        made = make_sessions(kind, shape.scaled(scale), sessions, words, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lines = "".join(f"{line}\n" for line in lines_of(as_completions(made) if completions else made))
    if out is None:
        sys.stdout.write(lines)
    else:
        out.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
