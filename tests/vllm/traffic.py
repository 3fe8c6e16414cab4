"""Requests of several namespaces that come, run, and are given up, by the dice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engines import EVERYTHING, MAX_LENGTH, NAIVE, OFF, Answer, Ask, words
from hosts import Host

Options = dict[str, Any] | None
WANT_EXACT: list[Options] = [OFF, {"reuse": "exact"}, {"policy": "full"}]
EVERY_WAY: list[Options] = [
    None,
    NAIVE,
    EVERYTHING,
    {"policy": "sparsex", "boundary_layers": 1},
    {"match": "exact"},
    *({"policy": name} for name in ("epic", "cacheblend", "prophet", "spread", "condense")),
    {"policy": "samkv", "block_tokens": 8, "kept_share": 0.8},  # keeps less than vLLM reserves
]
SALTS = [None, None, "a", "b"]
PLACES = 2  # conversations of a salt that go on
LONGEST = 900  # tokens of a conversation before a new one begins in its place
LONG = [words(length, length) for length in (70, 110, 150, 230, 330, 400)]
SHORT = [words(length, length) for length in (50, 90, 140, 190)]


@dataclass(frozen=True)
class Place:
    """Where a conversation is held. Others of other salts hold the same text."""

    salt: str | None
    number: int


@dataclass(frozen=True)
class Sent:
    """A request, and where in its prompt documents stand that were edited for it."""

    ask: Ask
    place: Place
    edited: list[range]


@dataclass
class Traffic:
    """Documents in any order between other text, as they are or edited; conversations that go on;
    what somebody else has asked.

    Attributes:
        exact: options of requests whose answers are kept.
        approximate: those of the others; a conversation mostly keeps to one of them.
        documents: that the prompts are made of.
        lengths: of answers, in tokens.
        most_alive: requests at a time.
        ended: exact requests that ran to their end, with their answers.
        counts: of what has happened, by what it was.
    """

    host: Host
    dice: np.random.Generator
    exact: Sequence[Options]
    approximate: Sequence[Options]
    documents: Sequence[list[int]]
    lengths: Sequence[int]
    most_alive: int = 8
    ended: list[tuple[Ask, Answer]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _alive: dict[str, Sent] = field(default_factory=dict)
    _histories: dict[Place, list[int]] = field(default_factory=dict)
    _recent: list[Place] = field(default_factory=list)
    _mood: float = 0.5  # share of those that go on with a conversation

    def run(self, num_requests: int) -> None:
        """Let so many come, and the last of them go."""
        for _ in range(num_requests):
            sent = self._send()
            self._alive[self.host.add(sent.ask)] = sent
            while len(self._alive) > self.dice.integers(1, self.most_alive + 1):
                self._step()
        self.host.step_until(self._is_over)

    def reset(self, max_depth: int) -> None:
        """Forget all that was computed; from now on this is the greatest depth of what is grafted
        from."""
        self.host.settle()
        assert self.host.problems() == []
        assert self.host.llm.reset_prefix_cache()
        self.host.known.index.max_depth = max_depth
        self.counts["reset"] += 1
        self._mood = float(self.dice.choice([0.3, 0.9]))

    def _is_over(self) -> bool:
        self._collect()
        return not self._alive

    def _send(self) -> Sent:
        dice = self.dice
        place = Place(SALTS[dice.integers(len(SALTS))], int(dice.integers(PLACES)))
        if self._recent and dice.random() < 0.7:
            place = self._recent[dice.integers(len(self._recent))]
        length = int(dice.choice(self.lengths))
        edited: list[range] = []
        goes_on = dice.random() < self._mood and 0 < len(self._histories.get(place, [])) < LONGEST
        prompt = self._next_turn(place, edited) if goes_on else self._prompt(edited)
        options = self._options(place, exact_share=0.2 if goes_on else 0.6)
        ask = Ask(prompt[: MAX_LENGTH - length], options, place.salt, length, logprobs=True)
        return Sent(ask, place, edited)

    def _options(self, place: Place, exact_share: float) -> Options:
        if self.dice.random() < exact_share:
            return self.exact[self.dice.integers(len(self.exact))]
        number = self.dice.integers(1000)
        if self.dice.random() < 0.9:
            number = SALTS.index(place.salt) * PLACES + place.number + self.counts["reset"]
        return self.approximate[number % len(self.approximate)]

    def _next_turn(self, place: Place, edited: list[range]) -> list[int]:
        self.counts["turn of a conversation"] += 1
        history = self._histories[place]
        if self.dice.random() < 0.5:
            history = self._with_document(history, edited)
        return history + self._words(40)

    def _prompt(self, edited: list[range]) -> list[int]:
        if self.ended and self.dice.random() < 0.2:
            self.counts["asked before"] += 1
            known, answer = self.ended[self.dice.integers(len(self.ended))]
            return [*known.prompt, *answer.tokens, *self._words(40)]
        prompt = self._words(60)
        for _ in range(self.dice.integers(1, 2 + len(self.documents) // 3)):
            prompt = self._with_document(prompt, edited) + self._words(60)
        return prompt

    def _with_document(self, prompt: list[int], edited: list[range]) -> list[int]:
        """And behind it one that many know, or a near-duplicate of it that has no block in common
        with it."""
        text = list(self.documents[self.dice.integers(len(self.documents))])
        if self.dice.random() < 0.2:
            self.counts["edited document"] += 1
            edits = range(int(self.dice.integers(30)), len(text), 30)
            text[edits.start :: edits.step] = words(len(edits), int(self.dice.integers(1000)))
            edited.append(range(len(prompt), len(prompt) + len(text)))
        return prompt + text

    def _words(self, most: int) -> list[int]:
        return words(int(self.dice.integers(1, most)), int(self.dice.integers(1000)))

    def _step(self) -> None:
        self.host.step()
        self._collect()
        if self._alive and self.dice.random() < 0.05:
            self._abort()
        if self.dice.random() < 0.05:
            pool = self.host.manager.block_pool.blocks
            self.host.poison(
                [
                    b.block_id
                    for b in pool
                    if not b.ref_cnt and b.block_hash is None and not b.is_null
                ]
            )
        if self.dice.random() < 0.01:
            was_reset = self.host.llm.reset_prefix_cache()
            self.counts["reset" if was_reset else "reset refused, since requests run"] += 1

    def _abort(self) -> None:
        """Somebody goes away; rather while a recovery is under way."""
        recovering = [name for name in self._alive if self.host.state(name).recovering]
        name = str(self.dice.choice(recovering or list(self._alive)))
        self.counts["aborted in its recovery" if name in recovering else "aborted"] += 1
        self.host.abort(name)
        del self._alive[name]

    def _collect(self) -> None:
        outputs = self.host.outputs
        for name in [name for name in self._alive if name in outputs and outputs[name].finished]:
            sent, [answer] = self._alive.pop(name), self.host.finish(name)
            self._histories[sent.place] = [*sent.ask.prompt, *answer.tokens]
            self._recent = [*self._recent[-1:], sent.place]
            self._count(sent, answer.report)
            if sent.ask.options in self.exact:
                self.ended.append((sent.ask, answer))

    def _count(self, sent: Sent, report: dict[str, Any]) -> None:
        ask = sent.ask
        size = next(size for size in (200, 400, MAX_LENGTH) if len(ask.prompt) <= size)
        depth = self.host.known.index.max_depth
        for what in (
            f"options {ask.options}",
            f"namespace {ask.salt}",
            f"up to {size} tokens",
            f"max_depth {depth}",
            f"outcome {report['outcome']}",
            f"depth {report['depth']}",
        ):
            self.counts[what] += 1
        self.counts["went on with approximate KV"] += report["continued_tokens"] > 0
        self.counts["began with exact KV"] += report["prefix_tokens"] > 0
        grafted = [range(start, stop) for start, stop, kind in report["spans"] if kind == "grafted"]
        found = any(
            max(a.start, b.start) < min(a.stop, b.stop) for a in grafted for b in sent.edited
        )
        self.counts["graft of a near-duplicate"] += found
