"""What the load generator asks: RAG, chat and agent prompts of a given length, of which a given
share was read before.

Prompts are made of words of one token each, so that both are exact. A prompt may hold the answers
of earlier ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random

KINDS = ("rag", "chat", "agents", "mixed")
# at most; prompts with less known text hold shorter documents, of at least two pieces
DOCUMENT_TOKENS = 512
CORPUS_PROMPTS = 3  # the documents are those of this many prompts
TURNS = 3  # of a chat session; its last prompt has the full length
AGENTS = 3  # before one judge
QUESTION_TOKENS = 16  # behind interleaved documents
MIN_FIRST_TURN = 64  # tokens; a session has fewer turns where its first one would be shorter
_WORD = re.compile(r"[a-z]+\d*")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Ask:
    """One request; untimed ones are sent first and in order, so that the model has read their
    text."""

    kind: str
    messages: tuple["Message", ...]
    max_tokens: int
    timed: bool = True


@dataclass(frozen=True, eq=False)
class Output:
    """The answer to another request, counted as its `max_tokens` tokens."""

    ask: Ask


Piece = str | Output


@dataclass(frozen=True, eq=False)
class Message:
    """A turn of a conversation; a completion prompt is the text of all turns."""

    role: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Shape:
    """How large requests are.

    Attributes:
        tokens: of a prompt (chat: of the longest prompt of a session).
        reuse: share of a prompt's tokens that stood in earlier prompts or answers, in [0, 1).
        max_tokens: of an answer.
        interleaved: new text stands before each document, not only before and behind all of them.

    Raises:
        ValueError: a value out of its range.
    """

    tokens: int
    reuse: float
    max_tokens: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reuse < 1:
            raise ValueError(f"reuse must be in [0, 1), got {self.reuse}")
        if self.tokens - self.known < 2 or self.max_tokens < 1:
            raise ValueError(f"{self}: needs two new tokens and an answer of at least one")

    @property
    def known(self) -> int:
        """Tokens of a prompt that were read before."""
        return round(self.tokens * self.reuse)


def single_token_words(encode: Encode, candidates: Iterable[str]) -> tuple[str, ...]:
    """The candidates that are one token wherever they stand after a space.

    Raises:
        ValueError: fewer than 100 of them; text of so few words repeats itself.
    """
    base = len(encode("the"))
    words = sorted({word for word in candidates if _WORD.fullmatch(word)})
    kept = tuple(word for word in words if len(encode(f"the {word} {word}")) == base + 2)
    if len(kept) < 100:
        raise ValueError(
            f"only {len(kept)} of {len(words)} words are single tokens: give the model's tokenizer"
        )
    return kept


def make_workload(
    kind: str, shape: Shape, count: int, words: Sequence[str], seed: object
) -> tuple[Ask, ...]:
    """`count` timed requests of a kind, after the untimed ones that they need; equal arguments give
    equal text, other shapes, kinds and seeds have no text in common.

    Raises:
        ValueError: an unknown kind, or answers that do not fit into the prompts that hold them.
    """
    if kind not in KINDS:
        raise ValueError(f"workload must be one of {', '.join(KINDS)}, got {kind!r}")
    author = Author(shape, words, Random(f"{kind} {shape} {count} {seed}"))
    if kind == "rag":
        return author.rag(count)
    if kind == "chat":
        return author.chat(count)
    if kind == "agents":
        return author.agents(count)
    parts = [make_workload(part, shape, -(-count // 3), words, seed) for part in KINDS[:3]]
    mixed = [
        ask
        for asks in zip_longest(*([a for a in part if a.timed] for part in parts))
        for ask in asks
        if ask
    ]
    return (*(ask for part in parts for ask in part if not ask.timed), *mixed[:count])


class Author:
    """Writes the requests of one workload; all text that nothing has read before is random."""

    def __init__(self, shape: Shape, words: Sequence[str], rng: Random) -> None:
        self.shape, self.words, self.rng = shape, words, rng
        self.num_documents = max(2, -(-shape.known // DOCUMENT_TOKENS))  # of a prompt
        self.corpus: list[list[str]] = []

    def rag(self, count: int) -> tuple[Ask, ...]:
        """Retrieved documents in another order, behind another instruction."""
        return (*self.read_corpus("rag"), *(self.over_documents("rag") for _ in range(count)))

    def chat(self, count: int) -> tuple[Ask, ...]:
        """Sessions with a growing history, each followed by another session that quotes it."""
        asks: list[Ask] = []
        while sum(ask.timed for ask in asks) < count:
            session = self.session()
            asks += [*session, self.quote(session[-1])] if self.shape.known else session
        timed = [ask for ask in asks if ask.timed][:count]
        return (*(ask for ask in asks if not ask.timed), *timed)

    def agents(self, count: int) -> tuple[Ask, ...]:
        """Agents read the same documents, each its own way; a judge reads their answers and
        documents."""
        reads, asks = self.read_corpus("agents"), list[Ask]()
        while len(asks) < count:
            team = [self.over_documents("agents") for _ in range(AGENTS)]
            asks += [*team, self.judge(team)]
        return (*reads, *asks[:count])

    def read_corpus(self, kind: str) -> tuple[Ask, ...]:
        """Requests in which all documents stand once; they also make the corpus."""
        if not self.shape.known:
            return ()
        size, extra = divmod(self.shape.known, self.num_documents)
        length = size + bool(extra)
        self.corpus = [self._fresh(length) for _ in range(CORPUS_PROMPTS * self.num_documents)]
        batches = [self.corpus[i::CORPUS_PROMPTS] for i in range(CORPUS_PROMPTS)]
        return tuple(
            Ask(kind, (_user(" ".join(self._fresh(7)), *map(" ".join, batch)),), 1, timed=False)
            for batch in batches
        )

    def over_documents(self, kind: str, *before: Output) -> Ask:
        """A new instruction, earlier answers, known documents in random order, a new question."""
        known = self.shape.known - sum(output.ask.max_tokens for output in before)
        if known < 0:
            raise ValueError(
                f"answers of {self.shape.max_tokens} tokens are more than {self.shape.known} known "
                "tokens"
            )
        documents: list[str] = []
        if known:
            drawn = self.rng.sample(self.corpus, self.num_documents)
            size, extra = divmod(known, self.num_documents)
            documents = [
                " ".join(document[: size + (i < extra)]) for i, document in enumerate(drawn)
            ]
        instruction, question = self._around()
        if self.shape.interleaved:
            words, parts = instruction.split(), len(documents)
            texts = [
                " ".join(words[i * len(words) // parts : (i + 1) * len(words) // parts])
                for i in range(parts)
            ]
            documents = [piece for pair in zip(texts, documents, strict=True) for piece in pair]
            instruction = ""
        return Ask(
            kind, (_user(instruction, *before, *documents, question),), self.shape.max_tokens
        )

    def judge(self, team: Sequence[Ask]) -> Ask:
        """What comes after the agents of a team."""
        return self.over_documents("agents", *map(Output, team))

    def session(self) -> list[Ask]:
        """Turns of one conversation, from an untimed first one to the full length; each adds its
        share of new words."""
        lengths = [self.shape.tokens]
        while self.shape.known and len(lengths) < TURNS + 1:
            earlier = round(lengths[0] * self.shape.reuse) - self.shape.max_tokens
            if earlier < MIN_FIRST_TURN:
                break
            lengths.insert(0, earlier)
        asks: list[Ask] = []
        for length in lengths:
            history = (
                (*asks[-1].messages, Message("assistant", (Output(asks[-1]),))) if asks else ()
            )
            message = _user(" ".join(self._fresh(length - sum(map(_size, history)))))
            timed = bool(asks) or not self.shape.known
            asks.append(Ask("chat", (*history, message), self.shape.max_tokens, timed))
        return asks

    def quote(self, last: Ask) -> Ask:
        """A new conversation that cites the end of another one."""
        pieces = [piece for message in last.messages for piece in message.pieces]
        quoted = _tail([*pieces, Output(last)], self.shape.known)
        instruction, question = self._around(self.shape.tokens - sum(map(_piece_size, quoted)))
        return Ask("chat", (_user(instruction, *quoted, question),), self.shape.max_tokens)

    def _around(self, new: int | None = None) -> tuple[str, str]:
        """New text before and behind what is known: half each, or (interleaved) all but a question
        before."""
        new = self.shape.tokens - self.shape.known if new is None else new
        behind = min(QUESTION_TOKENS, new // 2) if self.shape.interleaved else new // 2
        return " ".join(self._fresh(new - behind)), " ".join(self._fresh(behind))

    def _fresh(self, count: int) -> list[str]:
        return self.rng.choices(self.words, k=count)


def text_of(pieces: Iterable[Piece], answers: Callable[[Ask], str]) -> str:
    """Pieces as one text; `answers` gives that of an earlier request."""
    return " ".join(filter(None, (p if isinstance(p, str) else answers(p.ask) for p in pieces)))


def needed_by(ask: Ask) -> list[Ask]:
    """The requests whose answers a request holds."""
    return [
        piece.ask
        for message in ask.messages
        for piece in message.pieces
        if isinstance(piece, Output)
    ]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process of `rate` per second, or all at 0 for a
    rate of 0."""
    rng, now, times = Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        times.append(now)
    return times


def _user(*pieces: Piece) -> Message:
    return Message("user", tuple(piece for piece in pieces if piece))


def _piece_size(piece: Piece) -> int:
    return piece.ask.max_tokens if isinstance(piece, Output) else len(piece.split())


def _size(message: Message) -> int:
    return sum(map(_piece_size, message.pieces))


def _tail(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The last `count` tokens; an answer that does not fit whole is left out, with all before
    it."""
    kept: list[Piece] = []
    for piece in reversed(pieces):
        size = _piece_size(piece)
        if size <= count:
            kept.append(piece)
        elif isinstance(piece, str) and count:
            kept.append(" ".join(piece.split()[-count:]))
        if size >= count:
            break
        count -= size
    return kept[::-1]
