"""Anything at any time in a small pool: whatever the grafted requests do, exact ones stay exact, and nothing leaks."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engines import EVERYTHING, MAX_LENGTH, NAIVE, NUM_BLOCKS, OFF, Ask, words
from hosts import Host
from processes import HostProcess

EXACT: list[dict[str, Any]] = [OFF, EVERYTHING, {"policy": "sparsex", "boundary_layers": 0, "recompute_share": 1.0}]
APPROXIMATE: list[dict[str, Any] | None] = [None, NAIVE, {"policy": "sparsex", "boundary_layers": 1}]
SALTS = [None, None, "a", "b"]
DOCUMENTS = [words(length, length) for length in (70, 110, 150, 230, 330, 400)]


@dataclass
class Traffic:
    """Requests that come, run, and are given up, by the dice.

    Attributes:
        alive: what is running, by the name of its request.
        ended: exact requests that ran to their end, with what they generated.
        num_aborted_recovering: aborted requests whose recovery was under way.
    """

    host: Host
    dice: np.random.Generator
    alive: dict[str, Ask] = field(default_factory=dict)
    ended: list[tuple[Ask, list[int]]] = field(default_factory=list)
    num_grafted: int = 0
    num_aborted_recovering: int = 0

    def run(self, num_requests: int) -> None:
        """Let so many come, more until one has been preempted (at most four times as many), and the last of them go."""
        for number in range(4 * num_requests):
            if number >= num_requests and self.host.num_preemptions:
                break
            ask = self._ask()
            self.alive[self.host.add(ask)] = ask
            while len(self.alive) > self.dice.integers(1, 9):
                self._step()
        self.host.step_until(self._is_over)

    def _is_over(self) -> bool:
        self._collect()
        return not self.alive

    def _ask(self) -> Ask:
        """Documents in any order between other text; often what somebody has asked before."""
        if self.ended and self.dice.random() < 0.15:
            known, tokens = self.ended[self.dice.integers(len(self.ended))]
            prompt = [*known.prompt, *tokens, *words(int(self.dice.integers(1, 40)), int(self.dice.integers(1000)))]
        else:
            order = self.dice.permutation(len(DOCUMENTS))[: self.dice.integers(1, 5)]
            texts = [
                words(int(self.dice.integers(1, 60)), int(self.dice.integers(1000))) for _ in range(len(order) + 1)
            ]
            prompt = texts[0]
            for number, text in zip(order, texts[1:], strict=True):
                prompt = prompt + DOCUMENTS[number] + text
        choices = EXACT if self.dice.random() < 0.5 else APPROXIMATE
        options = choices[self.dice.integers(len(choices))]
        length = int(self.dice.choice([1, 4, 20, 60, 150]))
        return Ask(prompt[: MAX_LENGTH - length], options, SALTS[self.dice.integers(len(SALTS))], length)

    def _step(self) -> None:
        self.host.step()
        self._collect()
        if self.alive and self.dice.random() < 0.05:
            self._abort()
        if self.dice.random() < 0.05:
            pool = self.host.manager.block_pool.blocks
            self.host.poison([b.block_id for b in pool if not b.ref_cnt and b.block_hash is None and not b.is_null])

    def _abort(self) -> None:
        """Somebody goes away; rather while a recovery is under way."""
        recovering = [name for name in self.alive if self.host.state(name).recovering]
        name = str(self.dice.choice(recovering or list(self.alive)))
        self.num_aborted_recovering += name in recovering
        self.host.abort(name)
        del self.alive[name]

    def _collect(self) -> None:
        for name in [name for name in self.alive if name in self.host.outputs and self.host.outputs[name].finished]:
            ask, [answer] = self.alive.pop(name), self.host.finish(name)
            self.num_grafted += answer.grafted > 0
            if ask.options in EXACT:
                self.ended.append((ask, answer.tokens))


def check(host: Host, plain: HostProcess, seed: int, num_requests: int) -> None:
    traffic = Traffic(host, np.random.default_rng(seed))
    traffic.run(num_requests)
    host.settle()
    assert host.problems() == []
    assert host.num_preemptions > 0
    assert host.num_evictions > NUM_BLOCKS
    assert traffic.num_grafted > num_requests / 5
    assert traffic.num_aborted_recovering > 0
    asks, tokens = zip(*traffic.ended, strict=True)
    truth = plain.ask(*[Ask(ask.prompt, max_tokens=ask.max_tokens) for ask in asks])
    wrong = [ask for ask, mine, theirs in zip(asks, tokens, truth, strict=True) if mine != theirs.tokens]
    assert not wrong, f"{len(wrong)} of {len(asks)} exact answers are wrong, first {wrong[0].options}"
    again = [Ask(ask.prompt, OFF, salt, ask.max_tokens) for ask in asks[-10:] for salt in SALTS[1:]]
    assert [answer.tokens for answer in host.ask(*again)] == [
        answer.tokens for answer in truth[-10:] for _ in SALTS[1:]
    ]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_traffic(host: Host, plain: HostProcess, seed: int):
    check(host, plain, seed, num_requests=80)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(10, 14), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(14, 20))]
)
def test_random_traffic_at_length(host: Host, plain: HostProcess, seed: int):
    check(host, plain, seed, num_requests=500)
