"""Estimated seconds of prefill for the tokens of a trace, by the cost model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import Costs, count_pairs
from kvgraft_lab.traffic.origins import Origin, Stretches


@dataclass(frozen=True)
class Seconds:
    """Estimated prefill seconds of some requests, one after another: computed in full, and by
    side.
    """

    full: float
    sides: dict[str, float]

    def saved(self, side: str) -> float:
        """Return the seconds that a side saves; below 0 if it takes longer."""
        return self.full - self.sides[side]


def price(answers: Iterable[Sequence[Stretches]], sides: Sequence[str], costs: Costs) -> Seconds:
    """Estimate the seconds of requests; each answer has the stretches of every side."""
    full, sums = 0.0, dict.fromkeys(sides, 0.0)
    for prompts in answers:
        num_tokens = int(prompts[0].lengths.sum())
        full += float(costs.computing(num_tokens, count_pairs(0, num_tokens)))
        for side, prompt in zip(sides, prompts, strict=True):
            sums[side] += prefill_seconds(prompt, costs)
    return Seconds(full, sums)


def prefill_seconds(prompt: Stretches, costs: Costs) -> float:
    """Estimate the prefill seconds of one prompt, by the same rule for every system.

    New tokens are computed and see every token before them, so their pairs are exact. Prefix and
    continued tokens cost nothing. Grafted tokens, including near-duplicates, are copied, and a
    share `WORK` of them is recomputed. A replay does not know which tokens, so that share of all
    their pairs is counted. The cost model assumes the same before a policy runs. Not included are a
    policy's selection, copies from a chunk store outside the pool, and waiting for other requests.
    """
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
