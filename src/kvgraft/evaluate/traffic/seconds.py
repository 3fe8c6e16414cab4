"""Tokens of a trace as seconds of prefill, by the cost model's own costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.evaluate.traffic.origins import Origin, Stretches
from kvgraft.prefill.costs import Costs, count_pairs
from kvgraft.reuse.cost import WORK


@dataclass(frozen=True)
class Seconds:
    """Estimated seconds of prefill of some requests, one after another: if everything is computed,
    and by side."""

    full: float
    sides: dict[str, float]

    def saved(self, side: str) -> float:
        """Those that a side saves; below 0 if it takes longer."""
        return self.full - self.sides[side]


def price(answers: Iterable[Sequence[Stretches]], sides: Sequence[str], costs: Costs) -> Seconds:
    """Of requests, each of them as every side has it."""
    full, sums = 0.0, dict.fromkeys(sides, 0.0)
    for prompts in answers:
        num_tokens = int(prompts[0].lengths.sum())
        full += float(costs.computing(num_tokens, count_pairs(0, num_tokens)))
        for side, prompt in zip(sides, prompts, strict=True):
            sums[side] += prefill_seconds(prompt, costs)
    return Seconds(full, sums)


def prefill_seconds(prompt: Stretches, costs: Costs) -> float:
    """Of one prompt, by a rule that knows nothing of the system that found its tokens.

    New tokens are computed, and see every token before them, so their pairs are exact. Prefix and
    continued tokens cost nothing. Grafted tokens, near-duplicates among them, are copied, and of
    them a share `WORK` is computed again: which ones no replay knows, so the pairs of that share
    are the same share of all their pairs. That is what the cost model assumes of a policy that has
    not run yet. What a policy chooses by, and the copying of a system that keeps its chunks
    elsewhere than in the pool, are left out; so is waiting for other requests."""
    stops = np.cumsum(prompt.lengths, dtype=np.int64)
    pairs = count_pairs(stops - prompt.lengths, stops)
    new, grafted = prompt.origins == Origin.NEW, prompt.origins >= Origin.SIMILAR
    num_new, new_pairs = int(prompt.lengths[new].sum()), pairs[new].sum()
    if not grafted.any():
        return float(costs.computing(num_new, new_pairs))
    return float(
        costs.grafting(
            num_new, new_pairs, int(prompt.lengths[grafted].sum()), pairs[grafted].sum(), WORK
        )
    )
