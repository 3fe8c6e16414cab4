"""Bounds on the mean of all answers from the scored ones, and an alarm for a mean above a target.

Both bet against a hypothesis. If the hypothesis is true, the expected wealth does not grow. Both
can therefore be checked after every answer. All values are shares in [0, 1].
"""

import numpy as np

from kvgraft.methods import require_share

# [b, 1]; greatest share of the wealth that a bet may lose
BETS = np.geomspace(0.005, 0.95, 12)[:, None]
# [m]; grid of means
MEANS = np.concatenate(
    [np.geomspace(1e-4, 0.1, 90, endpoint=False), np.linspace(0.1, 1, 90, endpoint=False)]
)


class ConfidenceSequence:
    """Bounds of a mean that, with probability 1 - alpha, hold after every answer.

    Each mean of a grid is tested from above and from below, with the mean wealth of twelve constant
    bets. A mean stays in the interval until one of the two wealths reaches 2 / alpha. Source:
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024,
    section 4, with a mixture in place of a predicted bet.

    If the mean changes over time, `low` is a lower bound of its greatest value, and `high` an upper
    bound of its least.
    """

    def __init__(self, alpha: float = 0.05) -> None:
        require_share("alpha", alpha)
        self.alpha, self.count, self._sum = alpha, 0, 0.0
        # log wealth of the bets that the true mean is greater, [b, m]
        self._greater = np.zeros((len(BETS), len(MEANS)))
        self._less = np.zeros_like(self._greater)

    def add(self, value: float) -> None:
        """Add the value of one answer."""
        require_share("value", value)
        self.count += 1
        self._sum += value
        self._greater += np.log1p(BETS * (value / MEANS - 1))
        self._less += np.log1p(BETS * (MEANS - value) / (1 - MEANS))

    @property
    def mean(self) -> float:
        """Mean of the values so far; 0 without values."""
        return self._sum / max(self.count, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds `low` and `high`; 0 and 1 before anything is known."""
        limit = np.log(2 / self.alpha)
        low = MEANS[_log_mean(self._greater) >= limit].max(initial=0.0)
        return float(low), float(MEANS[_log_mean(self._less) >= limit].min(initial=1.0))


class Alarm:
    """Sequential test of whether the mean of the answers has risen above a target.

    A new bet begins at every answer, and the wealth of all bets is added up. A long good period
    therefore does not hide a recent bad one. Source: a Shiryaev-Roberts e-detector, Shin, Ramdas
    and Rinaldo, "E-detectors", 2024, section 2.

    Args:
        target: greatest acceptable mean, between 0 and 1.
        apart: mean number of answers until a false alarm, at least, while no answer's expected
            value exceeds the target.
    """

    def __init__(self, target: float, apart: float) -> None:
        if not 0 < target < 1:
            raise ValueError(f"target must be between 0 and 1, got {target}")
        self._target, self._apart = target, apart
        # sum of the wealth of all bets, by the share that they may lose
        self._wealth = np.zeros(len(BETS))
        # log gain of each bet since that gain was last zero or less (CUSUM)
        self._gained = np.zeros(len(BETS))
        # number and sum of the values since then
        self._counts, self._sums = np.zeros_like(self._gained), np.zeros_like(self._gained)

    def add(self, value: float) -> None:
        """Add the value of one answer."""
        require_share("value", value)
        factors, goes_on = 1 + BETS[:, 0] * (value / self._target - 1), self._gained > 0
        self._wealth = (self._wealth + 1) * factors
        self._gained = self._gained * goes_on + np.log(factors)
        self._counts, self._sums = self._counts * goes_on + 1, self._sums * goes_on + value

    @property
    def latest(self) -> tuple[int, float]:
        """Number and mean of the answers since quality seems to have changed.

        The change is where the best bet began to gain (CUSUM).
        """
        best = int(self._gained.argmax())
        return int(self._counts[best]), float(self._sums[best] / max(self._counts[best], 1))

    @property
    def raised(self) -> bool:
        """Return whether the mean is above the target, by the present evidence."""
        return bool(self._wealth.mean() >= self._apart)


def _log_mean(logarithms: np.ndarray) -> np.ndarray:
    """Return the log of the mean over the first axis, [m], for values with these logs, [b, m]."""
    return np.logaddexp.reduce(logarithms, 0) - np.log(len(logarithms))
