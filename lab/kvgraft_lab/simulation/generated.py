"""Traffic for simulated fleets: prompts of documents in any order, and conversations, as
fingerprints without text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from kvgraft.core.expected_prefill import BYTES_PER_TOKEN
from kvgraft.core.fingerprints import SPACING, WINDOW, Fingerprints
from kvgraft_lab.simulation.run import Arrival

_SYSTEM_PROMPT = 1 << 31  # its number; documents come before, what nobody has read behind


@dataclass(frozen=True)
class TrafficShape:
    """Prompts of a system prompt, some documents and a question; some of them go on as
    conversations.

    Attributes:
        requests: how many.
        rate: of them a second, as a Poisson process.
        documents: of the corpus; the n-th is asked about 1 / n**zipf as often as the first.
        per_prompt: documents of a prompt; 0 is a conversation about none.
        topics: into which the corpus falls; `on_topic`: share of a prompt's documents that are of
            one topic.
        document_tokens, system_tokens, question_tokens, answer_tokens: their sizes.
        turns: of a conversation, on average; each later one comes `pause_s` seconds after the one
            before, on average.

    Raises:
        ValueError: a number out of its range.
    """

    requests: int = 2000
    rate: float = 8.0
    documents: int = 2000
    zipf: float = 1.0
    per_prompt: int = 6
    topics: int = 100
    on_topic: float = 0.8
    document_tokens: int = 512
    system_tokens: int = 256
    question_tokens: int = 32
    answer_tokens: int = 128
    turns: float = 1.0
    pause_s: float = 20.0

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "rate",
            "documents",
            "topics",
            "document_tokens",
            "question_tokens",
            "pause_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, must be more than 0")
        if not self.turns >= 1:
            raise ValueError(f"turns is {self.turns}, must be at least 1")
        if not 0 <= self.on_topic < 1:
            raise ValueError(f"on_topic is {self.on_topic}, must be at least 0 and less than 1")
        if not 0 <= 2 * self.per_prompt <= self.documents:
            raise ValueError(
                f"per_prompt is {self.per_prompt}: must be at most half of the {self.documents} "
                "documents"
            )


KINDS = {
    "rag": TrafficShape(),
    "chat": TrafficShape(
        per_prompt=0, turns=8, system_tokens=1024, question_tokens=256, answer_tokens=512
    ),
    "mixed": TrafficShape(per_prompt=4, turns=3, question_tokens=64, answer_tokens=256),
}


def generate(shape: TrafficShape, seed: int = 0) -> list[Arrival]:
    """Requests in the order in which they come."""
    return sorted(_Generator(shape, seed).arrivals(), key=lambda arrival: arrival.at)[
        : shape.requests
    ]


class _Generator:
    def __init__(self, shape: TrafficShape, seed: int) -> None:
        self._shape, self._random, self._texts = shape, np.random.default_rng(seed), _Texts(seed)
        weights = np.arange(1, shape.documents + 1) ** -shape.zipf
        self._bounds = np.cumsum(weights / weights.sum())

    def arrivals(self) -> Iterator[Arrival]:
        """Conversation by conversation, until as many requests as are wanted have come before the
        next one begins."""
        shape, begins, later, come = self._shape, 0.0, list[float](), 0
        while come < shape.requests:
            begins += self._random.exponential(shape.turns / shape.rate)
            for arrival in self._conversation(begins):
                heappush(later, arrival.at)
                yield arrival
            while later and later[0] <= begins:
                heappop(later)
                come += 1

    def _conversation(self, at: float) -> Iterator[Arrival]:
        shape = self._shape
        history = [self._texts.of(_SYSTEM_PROMPT, shape.system_tokens)]
        history += [self._texts.of(document, shape.document_tokens) for document in self._choose()]
        for _ in range(self._random.geometric(1 / shape.turns)):
            asked = Fingerprints.joined([*history, self._texts.fresh(shape.question_tokens)])
            yield Arrival(at, asked, shape.answer_tokens)
            history = [asked, self._texts.fresh(shape.answer_tokens)]
            at += self._random.exponential(shape.pause_s)

    def _choose(self) -> list[int]:
        """Different documents, many of them of one topic."""
        shape, chosen, topic = self._shape, list[int](), self._draw() % self._shape.topics
        while len(chosen) < shape.per_prompt:
            drawn = self._draw()
            if self._random.random() < shape.on_topic:
                drawn = drawn - drawn % shape.topics + topic
            chosen += [drawn] * (drawn not in chosen and drawn < shape.documents)
        return chosen

    def _draw(self) -> int:
        return min(
            int(np.searchsorted(self._bounds, self._random.random())), self._shape.documents - 1
        )


@dataclass
class _Texts:
    """Random texts by number; the same number has the same fingerprints."""

    seed: int
    _known: dict[int, Fingerprints] = field(default_factory=dict)
    _fresh: int = 1 << 32

    def of(self, number: int, tokens: int) -> Fingerprints:
        """One that may come again."""
        if number not in self._known:
            self._known[number] = self._make(number, tokens)
        return self._known[number]

    def fresh(self, tokens: int) -> Fingerprints:
        """One that nobody has read."""
        self._fresh += 1
        return self._make(self._fresh, tokens)

    def _make(self, number: int, tokens: int) -> Fingerprints:
        random, num_bytes = (
            np.random.default_rng((self.seed, number)),
            int(tokens * BYTES_PER_TOKEN),
        )
        room = max(num_bytes - WINDOW, 0)
        places = np.unique(random.integers(0, max(room, 1), random.poisson(room / SPACING)))
        return Fingerprints(
            places, random.integers(0, 2**63, len(places)).astype(np.uint64), num_bytes
        )
