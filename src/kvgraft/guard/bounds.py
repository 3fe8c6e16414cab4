"""What scored answers say of all: a bound on their mean that holds at any time, and when it has
become too great.

Both bet against a hypothesis, with wealth that cannot be expected to grow while it is true. So they
may be looked at after every answer. All values are shares, in [0, 1]."""

import numpy as np

from kvgraft.methods import require_share

BETS = np.geomspace(0.005, 0.95, 12)[:, None]  # [b, 1]: of the wealth, that a bet may lose at most
# [m]
MEANS = np.concatenate(
    [np.geomspace(1e-4, 0.1, 90, endpoint=False), np.linspace(0.1, 1, 90, endpoint=False)]
)


class ConfidenceSequence:
    """Bounds of a mean, all of which hold together with probability 1 - alpha, however long it goes
    on.

    A grid of means is bet against from above and from below, each with the mean wealth of twelve
    constant bets (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", 2024: section 4, with a mixture in place of a predicted bet); a mean stays in the
    interval until either wealth reaches 2 / alpha.

    Where the mean changes, `low` is a bound of the greatest that it has been, and `high` of the
    least."""

    def __init__(self, alpha: float = 0.05) -> None:
        require_share("alpha", alpha)
        self.alpha, self.count, self._sum = alpha, 0, 0.0
        # log of the wealth that bets on more than the mean
        self._greater = np.zeros((len(BETS), len(MEANS)))
        self._less = np.zeros_like(self._greater)

    def add(self, value: float) -> None:
        """One more answer."""
        require_share("value", value)
        self.count += 1
        self._sum += value
        self._greater += np.log1p(BETS * (value / MEANS - 1))
        self._less += np.log1p(BETS * (MEANS - value) / (1 - MEANS))

    @property
    def mean(self) -> float:
        """Of the values so far; 0 of none."""
        return self._sum / max(self.count, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """`low` and `high`; 0 and 1 until something is known."""
        limit = np.log(2 / self.alpha)
        low = MEANS[_log_mean(self._greater) >= limit].max(initial=0.0)
        return float(low), float(MEANS[_log_mean(self._less) >= limit].min(initial=1.0))


class Alarm:
    """Whether the mean has come to lie above a target, at any time and for any reason.

    Bets that were begun at every answer are added up (a Shiryaev-Roberts e-detector; Shin, Ramdas
    and Rinaldo, "E-detectors", 2024, section 2), so that what went well for long does not hide what
    goes wrong now.

    Args:
        target: as long as no answer can be expected to exceed it, there are at least `apart`
            answers, on average, until the alarm is raised.
    """

    def __init__(self, target: float, apart: float) -> None:
        if not 0 < target < 1:
            raise ValueError(f"target must be between 0 and 1, got {target}")
        self._target, self._apart = target, apart
        self._wealth = np.zeros(len(BETS))  # of all bets together, by what they lose at most
        self._gained = np.zeros(len(BETS))  # log of what a bet has gained since it last had nothing
        # of values since then
        self._counts, self._sums = np.zeros_like(self._gained), np.zeros_like(self._gained)

    def add(self, value: float) -> None:
        """One more answer."""
        require_share("value", value)
        factors, goes_on = 1 + BETS[:, 0] * (value / self._target - 1), self._gained > 0
        self._wealth = (self._wealth + 1) * factors
        self._gained = self._gained * goes_on + np.log(factors)
        self._counts, self._sums = self._counts * goes_on + 1, self._sums * goes_on + value

    @property
    def latest(self) -> tuple[int, float]:
        """Answers since it seems to have gone wrong (where the best bet began to gain: CUSUM), and
        their mean."""
        best = int(self._gained.argmax())
        return int(self._counts[best]), float(self._sums[best] / max(self._counts[best], 1))

    @property
    def raised(self) -> bool:
        """Whether the mean is too great, by all that is known now."""
        return bool(self._wealth.mean() >= self._apart)


def _log_mean(logarithms: np.ndarray) -> np.ndarray:
    """Logarithm of the mean over the first axis, of what these [b, m] are logarithms of: [m]."""
    return np.logaddexp.reduce(logarithms, 0) - np.log(len(logarithms))
