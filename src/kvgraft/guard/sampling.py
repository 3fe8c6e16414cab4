"""Sampling of the answers to score: an equal share of every kind, so that their mean is
unbiased."""

from collections.abc import Hashable
from random import Random

from kvgraft.methods import require_share

# greatest share of the requests that are trials
MOST_TRIALS = 0.1
# watched requests per scored answer; more are watched than scored because the kind of an answer is
# known only when it ends
DRAWN = 4


class Sampling:
    """Sampling in two steps: draw requests when they arrive, then an equal share of every kind.

    Args:
        share: share of the answers of every kind that are scored, from 0 to 1.
        seed: of the random numbers.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        require_share("guard", share)
        self.share, self._rng = share, Random(seed)  # noqa: S311
        self._drawn = min(1.0, DRAWN * share)
        # by kind; an answer is scored when this reaches 1
        self._due: dict[Hashable, float] = {}

    def draw(self) -> bool:
        """Return whether to watch the next request."""
        return self._rng.random() < self._drawn

    def tries(self) -> bool:
        """Return whether a watched request may be a trial.

        Trials are the same share of all requests as scored answers otherwise, and at most
        MOST_TRIALS.
        """
        return self._rng.random() < min(self.share, MOST_TRIALS) / self._drawn

    def choose(self, kind: Hashable) -> bool:
        """Return whether to score the answer of a watched request.

        Answers of a kind are chosen at equal distances, from a random start.
        """
        due = self._due.get(kind)
        due = (self._rng.random() if due is None else due) + self.share / self._drawn
        self._due[kind] = due % 1.0
        return due >= 1.0
