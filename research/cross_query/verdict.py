"""From figures to verdicts: bootstrap intervals, exact tests, bars."""

from collections.abc import Callable, Hashable, Sequence
from math import comb, inf, nan

import msgspec
import numpy as np

RESAMPLES = 2000
HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"


class Verdict(msgspec.Struct, frozen=True):
    """One claim about one condition.

    Attributes:
        value, low, high: the figure and its 95 % interval, NaN where it has none.
        bar: what it must be.
        verdict: `holds` if the whole interval is on the right side of the bar, `fails` if it is on the other, else
            `undecided`.
        count: what the figure is of: episodes, segments, proposals.
        details: figures beside it.
    """

    hypothesis: str
    claim: str
    condition: str
    variation: str
    value: float
    low: float
    high: float
    bar: str
    verdict: str
    count: int
    details: dict[str, float | str]


def bootstrap(
    values: Sequence[float], clusters: Sequence[Hashable], of: Callable[[np.ndarray], float] = np.mean, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a statistic. What belongs to one cluster (a world: one cache, one set of pages) is drawn
    together; of a single cluster nothing can be said (NaN)."""
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    if len(groups) < 2:
        return nan, nan
    arrays = [np.array(group) for group in groups.values()]
    drawn = np.random.default_rng(seed).integers(len(arrays), size=(RESAMPLES, len(arrays)))
    found = [of(np.concatenate([arrays[index] for index in row])) for row in drawn]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def bootstrap_share(
    values: Sequence[float], clusters: Sequence[Hashable], least: float = 0.0, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a mean of shares, or of differences of shares (from `least` to 1): the wider one of `bootstrap`
    by cluster and value by value. Resamples hold nothing that was not seen; so where no value is the least, or none is
    1, 3 / n of all may be that (rule of three)."""
    count, mean = len(values), float(np.mean(values))
    low, high = bootstrap(values, clusters, seed=seed)
    kinds, counts = np.unique(values, return_counts=True)
    means = np.random.default_rng(seed).multinomial(count, counts / count, RESAMPLES) @ kinds / count
    below, above = np.percentile(means, [2.5, 97.5])
    unseen_low, unseen_high = (3 / count if unseen else 0.0 for unseen in (kinds[0] > least, kinds[-1] < 1))
    return min(low, float(below), mean - unseen_low), max(high, float(above), mean + unseen_high)


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of McNemar's exact test: so uneven a split of the pairs that differ, if both sides are equally
    likely."""
    count, least = lost + won, min(lost, won)
    return min(1.0, 2 * sum(comb(count, k) for k in range(least + 1)) / 2**count)


def judge(low: float, high: float, *, below: float = inf, above: float = -inf) -> str:
    """What an interval says of a bar."""
    if low > below or high < above:
        return FAILS
    return HOLDS if high <= below and low >= above else UNDECIDED


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's coefficient, ties in any order; NaN of fewer than three pairs."""
    if len(left) < 3:
        return nan
    ranks = np.argsort(np.argsort([left, right], axis=1), axis=1)
    return float(np.corrcoef(ranks)[0, 1])
