"""What to graft: seconds that are saved, against what becomes approximate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgraft.methods import require_share
from kvgraft.prefill.costs import TOKENS, Costs, count_pairs
from kvgraft.reuse import EXACTNESS_WEIGHT
from kvgraft.segments.matches import Match

WORK = 0.15  # assumed of a policy that has not run yet
POLICIES = 256  # of which it is known what they compute: requests may ask for any options
PRIOR = 0.2  # weight of what is assumed, in recoveries
MEMORY = 0.95  # weight that is left of earlier recoveries when there is a new one
DOUBT = 0.95  # and when they have spoken against a graft, so that it is tried again some time


@dataclass(frozen=True)
class CostEstimate:
    """Seconds until the first token without grafts and with them; and why nothing of what is known
    is grafted, or None."""

    full_s: float
    reuse_s: float
    reason: str | None = None


class Work:
    """What a policy computes beside what is new, in tokens of all layers: a share of what is
    grafted, and a share of what is new once more (some compute the first layers of it twice). Least
    squares over its recoveries, the last of which count most.

    Args:
        assumed: of what is grafted, before there was any.
    """

    def __init__(self, assumed: float = WORK) -> None:
        self._assumed = np.array([assumed, 0.0])
        self._squares, self._products = np.zeros((2, 2)), np.zeros(2)

    def learn(self, num_recovered: float, num_grafted: int, num_new: int) -> None:
        """A recovery has computed as much as num_recovered tokens in all layers, beside what was
        new."""
        row = np.array([num_grafted, num_new]) / (num_grafted + num_new)
        self._squares = MEMORY * self._squares + np.outer(row, row)
        self._products = MEMORY * self._products + row * max(num_recovered, 0) / (
            num_grafted + num_new
        )

    def doubt(self) -> None:
        """What was learned counts less."""
        self._squares, self._products = DOUBT * self._squares, DOUBT * self._products

    @property
    def shares(self) -> tuple[float, float]:
        """(of what is grafted, of what is new), at least 0."""
        squares, products = (
            self._squares + PRIOR * np.eye(2),
            self._products + PRIOR * self._assumed,
        )
        of_grafted, of_new = np.linalg.solve(squares, products)
        if of_grafted < 0 or of_new < 0:
            of_grafted, of_new = (
                (0.0, products[1] / squares[1, 1])
                if of_grafted < 0
                else (products[0] / squares[0, 0], 0.0)
            )
        return float(of_grafted), float(of_new)


@dataclass
class CostModel:
    """Decides which of its matches a prompt is better off with.

    What is read behind a graft is approximate: others cannot have it as a prefix, nor may every
    prompt graft from it. That costs a share `exactness_weight` of what it takes to compute it. A
    graft in front of much new text must therefore save more than one behind it.

    Attributes:
        work: what each policy computes; learned.
    """

    costs: Costs = TOKENS
    exactness_weight: float = EXACTNESS_WEIGHT
    work: dict[str, Work] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_share("exactness_weight", self.exactness_weight)

    def choose(
        self,
        matches: Sequence[Match],
        num_tokens: int,
        num_known: int,
        policy: str,
        *,
        approximate: bool = False,
    ) -> tuple[list[Match], CostEstimate]:
        """The matches that are worth it, all from some one on or none, and what is expected of
        them.

        Args:
            matches: disjoint, by their place in the prompt.
            num_tokens: of the prompt, the first num_known of which are there already.
            approximate: whether these are approximate, so that nothing behind them can be exact
                anyway.
        """
        active = num_tokens - num_known
        starts = np.array([match.start for match in matches], np.int64)
        lengths = np.array([match.length for match in matches], np.int64)
        pairs = count_pairs(starts, starts + lengths)
        # from each one on
        grafted, grafted_pairs = (values[::-1].cumsum()[::-1] for values in (lengths, pairs))
        all_pairs = count_pairs(num_known, num_tokens)
        full = float(self.costs.computing(active, all_pairs))
        if not matches:
            return [], CostEstimate(full, full)
        work = self.work.get(policy, Work())
        of_grafted, of_new = work.shares
        new, new_pairs = (
            (1 + of_new) * (active - grafted),
            (1 + of_new) * (all_pairs - grafted_pairs),
        )
        reuse = self.costs.grafting(new, new_pairs, grafted, grafted_pairs, of_grafted)
        behind = num_tokens - starts - grafted  # new text that becomes approximate
        lost = (
            self.costs.computing(behind, count_pairs(starts, num_tokens) - grafted_pairs)
            - self.costs.pass_s
        )
        gain = full - reuse - (0.0 if approximate else self.exactness_weight) * lost
        best = int(gain.argmax())
        if gain[best] <= 0:
            work.doubt()
            return [], CostEstimate(
                full, full, "too_short" if reuse.min() >= full else "too_little_known"
            )
        return list(matches[best:]), CostEstimate(full, float(reuse[best]))

    def learn(self, policy: str, num_recovered: float, num_grafted: int, num_new: int) -> None:
        """A recovery of num_grafted tokens has computed as much, beside num_new, as so many tokens
        in all layers. By TOKENS alone all policies are alike."""
        if num_grafted and self.costs != TOKENS:
            self.work[policy] = work = self.work.pop(policy, Work())
            work.learn(num_recovered, num_grafted, num_new)
            if len(self.work) > POLICIES:
                del self.work[next(iter(self.work))]
