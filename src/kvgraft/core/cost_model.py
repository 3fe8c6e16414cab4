"""Cost model of grafting: the seconds that grafts save, against the loss of exact KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgraft.core import EXACTNESS_WEIGHT
from kvgraft.core.costs import TOKENS, Costs, count_pairs
from kvgraft.core.matches import Match
from kvgraft.methods import require_share

# Recomputed share that is assumed for a policy that has not run yet.
WORK = 0.15
# Policies whose work is remembered. Requests may choose any options, so there must be a limit.
POLICIES = 256
# Weight of the assumed work, in recoveries.
PRIOR = 0.2
# Each new recovery multiplies the weight of the earlier ones by this.
MEMORY = 0.95
# A refused graft does the same, so that grafts are tried again later.
DOUBT = 0.95


@dataclass(frozen=True)
class CostEstimate:
    """Estimated seconds until the first token without and with grafts. `reason` says why nothing is
    grafted, or is None."""

    full_s: float
    reuse_s: float
    reason: str | None = None


class Work:
    """Work of a policy in addition to the new tokens, in tokens of all layers.

    It is a share of the grafted tokens plus a share of the new tokens (some policies compute their
    first layers twice). Both shares are a least-squares fit over its recoveries, weighted to the
    recent ones.

    Args:
        assumed: share of the grafted tokens before the first recovery.
    """

    def __init__(self, assumed: float = WORK) -> None:
        self._assumed = np.array([assumed, 0.0])
        self._squares, self._products = np.zeros((2, 2)), np.zeros(2)

    def learn(self, num_recovered: float, num_grafted: int, num_new: int) -> None:
        """Add a recovery that computed num_recovered tokens in all layers, in addition to the new
        ones."""
        row = np.array([num_grafted, num_new]) / (num_grafted + num_new)
        self._squares = MEMORY * self._squares + np.outer(row, row)
        self._products = MEMORY * self._products + row * max(num_recovered, 0) / (
            num_grafted + num_new
        )

    def doubt(self) -> None:
        """Reduce the weight of earlier recoveries."""
        self._squares, self._products = DOUBT * self._squares, DOUBT * self._products

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the grafted and of the new tokens, each at least 0."""
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
    """Decides which of its matches a prompt should graft.

    Text behind a graft is approximate: others cannot reuse it as an exact prefix, and not every
    prompt may graft from it. That costs a share `exactness_weight` of the time to compute it. A
    graft in front of much new text must therefore save more than one behind it.

    Attributes:
        work: learned work of each policy.
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
        """Return the matches that are worth grafting, and the estimate for them.

        The result is either empty or all matches from one position of the prompt on.

        Args:
            matches: disjoint, ordered by their place in the prompt.
            num_tokens: tokens of the prompt; the first num_known are cached already.
            approximate: whether those cached tokens are approximate, so that later text cannot be
                exact.
        """
        active = num_tokens - num_known
        starts = np.array([match.start for match in matches], np.int64)
        lengths = np.array([match.length for match in matches], np.int64)
        pairs = count_pairs(starts, starts + lengths)
        # sums from each match on
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
        # New text behind the first graft becomes approximate.
        behind = num_tokens - starts - grafted
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
        """Add a recovery of num_grafted tokens that computed num_recovered tokens in all layers, in
        addition to num_new.

        Nothing is learned with TOKENS, where all policies cost the same.
        """
        if num_grafted and self.costs != TOKENS:
            self.work[policy] = work = self.work.pop(policy, Work())
            work.learn(num_recovered, num_grafted, num_new)
            if len(self.work) > POLICIES:
                del self.work[next(iter(self.work))]
