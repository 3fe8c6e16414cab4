"""An agent's steps under one condition: what is asked, what it took, what stays behind."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvgraft.core.prompt import Part
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill.context import Policy
from research.cross_query.conditions import Condition
from research.cross_query.loop import GREEDY, paper_sampling

RUN = 8  # tokens of a stretch that counts as known text: as many as are worth a graft
_STEPS = 64  # an episode has fewer


class KnownText:
    """Text that earlier prompts have held, found token by token."""

    def __init__(self) -> None:
        self._windows: set[bytes] = set()

    def known(self, tokens: Sequence[int]) -> np.ndarray:
        """bool [T]: tokens in a run of at least RUN that stands in an earlier prompt."""
        found = np.zeros(len(tokens), bool)
        for at, window in enumerate(_windows(tokens)):
            if window in self._windows:
                found[at : at + RUN] = True
        return found

    def add(self, tokens: Sequence[int]) -> None:
        self._windows.update(_windows(tokens))


def _windows(tokens: Sequence[int]) -> list[bytes]:
    if len(tokens) < RUN:
        return []
    return [window.tobytes() for window in sliding_window_view(np.asarray(tokens, np.int32), RUN)]


class Agent:
    """Answers steps under a condition, one episode after the other; its engine remembers what the
    condition lets it.

    Attributes:
        took: for each step since the list was emptied, seconds until the answer was there, and
            tokens of the prompt that earlier ones held, if the condition counts them.
    """

    def __init__(self, condition: Condition, engine: Engine) -> None:
        self.condition, self.engine = condition, engine
        self.took: list[tuple[float, int]] = []
        self._text = KnownText()

    def ask(
        self, parts: Sequence[Part], sampling: SamplingParams = GREEDY, policy: Policy | None = None
    ) -> Result:
        """The answer; `policy` stands in for the condition's, to watch it."""
        condition, engine = self.condition, self.engine
        if condition.store:
            engine.clear_cache()
        start = time.perf_counter()
        request = Request(parts, policy or condition.policy, sampling, remember=condition.remembers)
        matched = self._count_text(engine.token_ids(request)) if condition.counts_text else 0
        [result] = engine.generate([request])
        self.took.append((time.perf_counter() - start, matched))
        if condition.store and not result.error:
            engine.clear_cache()
            engine.generate([Request(parts, "full", replace(GREEDY, max_tokens=1))])
        return result

    def _count_text(self, tokens: Sequence[int]) -> int:
        matched = int(self._text.known(tokens).sum())
        self._text.add(tokens)
        return matched


def sampling_of(name: str, seed: int, episode: int, turn: int, step: int) -> SamplingParams:
    """How a step decodes: `greedy`, or `paper` (temperature 0.2, top-p 0.95), equal draws for all
    conditions.

    Raises:
        ValueError: neither of these.
    """
    if name == "greedy":
        return GREEDY
    if name != "paper":
        raise ValueError(f"unknown sampling {name!r}: choose from greedy, paper")
    return paper_sampling(((seed * 1000 + episode) * 1000 + turn) * _STEPS + step)
