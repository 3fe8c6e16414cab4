"""Traffic for simulated fleets: prompts of documents in any order, and conversations, as fingerprints without text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvgraft.fleet.expected import BYTES_PER_TOKEN
from kvgraft.fleet.simulation import Arrival
from kvgraft.segments.fingerprints import SPACING, WINDOW, Fingerprints


@dataclass(frozen=True)
class TrafficShape:
    """Prompts of a system prompt, some documents and a question; some of them go on as conversations.

    Attributes:
        requests: how many.
        rate: of them a second, as a Poisson process.
        documents: of the corpus; the n-th is asked about 1 / n**zipf as often as the first.
        per_prompt: documents of a prompt.
        topics: into which the corpus falls; `on_topic`: share of a prompt's documents that are of one topic.
        document_tokens, system_tokens, question_tokens, answer_tokens: their sizes.
        turns: of a conversation, on average; each later one comes `pause_s` seconds after the one before, on average.

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
        for name in ("requests", "rate", "documents", "per_prompt", "document_tokens", "turns"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be more than 0")
        if self.per_prompt > self.documents:
            raise ValueError(f"per_prompt is {self.per_prompt}, there are {self.documents} documents")


class _Texts:
    """Random texts by number; the same number has the same fingerprints."""

    def __init__(self, seed: int) -> None:
        self._seed, self._known = seed, dict[int, Fingerprints]()
        self._fresh = 1 << 32

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
        random, num_bytes = np.random.default_rng((self._seed, number)), int(tokens * BYTES_PER_TOKEN)
        room = max(num_bytes - WINDOW, 0)
        places = np.unique(random.integers(0, max(room, 1), random.poisson(room / SPACING)))
        return Fingerprints(places, random.integers(0, 2**63, len(places)).astype(np.uint64), num_bytes)


def generate(shape: TrafficShape, seed: int = 0) -> list[Arrival]:
    """Requests in the order in which they come."""
    return sorted(_arrivals(shape, seed), key=lambda arrival: arrival.at)[: shape.requests]


def _arrivals(shape: TrafficShape, seed: int) -> Iterator[Arrival]:
    random, texts = np.random.default_rng(seed), _Texts(seed)
    weights = np.arange(1, shape.documents + 1) ** -shape.zipf
    bounds = np.array(list(accumulate(weights / weights.sum())))
    at, sent = 0.0, 0
    while sent < shape.requests:
        at += random.exponential(shape.turns / shape.rate)
        chosen: list[int] = []
        topic = int(np.searchsorted(bounds, random.random())) % shape.topics
        while len(chosen) < shape.per_prompt:
            drawn = min(int(np.searchsorted(bounds, random.random())), shape.documents - 1)
            if random.random() < shape.on_topic:
                drawn = drawn - drawn % shape.topics + topic
            chosen += [drawn] * (drawn not in chosen and drawn < shape.documents)
        history = [texts.of(-1 + (1 << 31), shape.system_tokens)]
        history += [texts.of(document, shape.document_tokens) for document in chosen]
        now, turns = at, random.geometric(1 / shape.turns)
        for _ in range(turns):
            history = [*history, texts.fresh(shape.question_tokens)]
            yield Arrival(now, Fingerprints.joined(history), shape.answer_tokens)
            history = [*history, texts.fresh(shape.answer_tokens)]
            now, sent = now + random.exponential(shape.pause_s), sent + 1
