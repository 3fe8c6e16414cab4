"""What to graft: seconds that are saved, against what becomes approximate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgraft.methods import require_share
from kvgraft.prefill.costs import TOKENS, Costs, count_pairs
from kvgraft.segments.matches import Match

EXACT_VALUE = 0.1
WORK = 0.15  # assumed of a policy that has not run yet
POLICIES = 256  # of which it is known what they compute: requests may ask for any options
MEMORY = 0.8  # what is left of earlier recoveries when there is a new one


@dataclass(frozen=True)
class Estimate:
    """Seconds until the first token without grafts and with them."""

    full_s: float
    reuse_s: float


@dataclass
class CostModel:
    """Decides which of its matches a prompt is better off with.

    What is read behind a graft is approximate: others cannot have it as a prefix, nor may every prompt graft from it.
    That costs a share `exact_value` of what it takes to compute it. A graft in front of much new text must therefore
    save more than one behind it.

    Attributes:
        work: by policy, (token, layer) pairs that it computes of what is grafted, as a share; learned.
    """

    costs: Costs = TOKENS
    exact_value: float = EXACT_VALUE
    work: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_share("exact_value", self.exact_value)

    def choose(
        self, matches: Sequence[Match], num_tokens: int, num_known: int, policy: str, *, approximate: bool = False
    ) -> tuple[list[Match], Estimate]:
        """The matches that are worth it, all from some one on or none, and what is expected of them.

        Args:
            matches: disjoint, by their place in the prompt.
            num_tokens: of the prompt, the first num_known of which are there already.
            approximate: whether these are approximate, so that nothing behind them can be exact anyway.
        """
        active = num_tokens - num_known
        starts = np.array([match.start for match in matches], np.int64)
        lengths = np.array([match.length for match in matches], np.int64)
        pairs = count_pairs(starts, starts + lengths)
        grafted, grafted_pairs = (values[::-1].cumsum()[::-1] for values in (lengths, pairs))  # from each one on
        all_pairs = count_pairs(num_known, num_tokens)
        full = float(self.costs.computing(active, all_pairs))
        if not matches:
            return [], Estimate(full, full)
        share = self.work.get(policy, WORK)
        new, new_pairs = active - grafted, all_pairs - grafted_pairs
        reuse = self.costs.grafting(new, new_pairs, grafted, grafted_pairs, share)
        behind = num_tokens - starts - grafted  # new text that becomes approximate
        lost = self.costs.computing(behind, count_pairs(starts, num_tokens) - grafted_pairs) - self.costs.pass_s
        gain = full - reuse - (0.0 if approximate else self.exact_value) * lost
        best = int(gain.argmax())
        if gain[best] <= 0:
            return [], Estimate(full, full)
        return list(matches[best:]), Estimate(full, float(reuse[best]))

    def learn(self, policy: str, num_recovered: float, num_grafted: int) -> None:
        """A recovery of num_grafted tokens has computed as much, beside new text, as so many tokens in all layers. By
        TOKENS alone all policies are alike."""
        if num_grafted and self.costs != TOKENS:
            share = min(max(num_recovered, 0) / num_grafted, 1)
            self.work[policy] = MEMORY * self.work.pop(policy, share) + (1 - MEMORY) * share
            if len(self.work) > POLICIES:
                del self.work[next(iter(self.work))]
