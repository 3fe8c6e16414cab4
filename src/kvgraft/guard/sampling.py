"""Which answers are scored again: the same share of every kind, so that their mean is that of
all."""

from collections.abc import Hashable
from random import Random

from kvgraft.methods import require_share

MOST_TRIALS = 0.1  # of the requests
# requests are watched for each that is scored: what kind an answer is of is known when it ends
DRAWN = 4


class Sampling:
    """Draws requests when they arrive, and of those that were drawn an equal share of every kind
    when they end.

    Args:
        share: of the answers of every kind, that are scored.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        require_share("guard", share)
        self.share, self._rng = share, Random(seed)  # noqa: S311
        self._drawn = min(1.0, DRAWN * share)
        self._due: dict[Hashable, float] = {}  # by kind: scored if this reaches 1

    def draw(self) -> bool:
        """Whether to watch the next request."""
        return self._rng.random() < self._drawn

    def tries(self) -> bool:
        """Whether a watched request may be one of a trial: as many as are scored else, at most
        MOST_TRIALS of all."""
        return self._rng.random() < min(self.share, MOST_TRIALS) / self._drawn

    def choose(self, kind: Hashable) -> bool:
        """Whether the answer of a watched request is scored: every so-manieth of a kind, beginning
        anywhere."""
        due = self._due.get(kind)
        due = (self._rng.random() if due is None else due) + self.share / self._drawn
        self._due[kind] = due % 1.0
        return due >= 1.0
