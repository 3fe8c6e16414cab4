"""Statistics of all comparisons: bootstrap intervals, paired differences and exact tests.

`scipy.stats` takes a second to load, so functions import it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np

RESAMPLES = 2000
PERMUTATIONS = 10_000
LEVEL = 0.95
DRAWN = 10_000_000  # numbers that are drawn at a time: memory


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; NaN where no interval can be computed."""

    value: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    of: Callable[[np.ndarray], float] = np.mean,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic, by default of the mean.

    Args:
        values: observations.
        clusters: cluster of each value (questions about one text, episodes of one cache), drawn
            together. None makes each value its own cluster. The interval of fewer than two clusters
            is NaN.
        of: statistic.
        seed: seed of the resamples.
    """
    groups = _group(values, range(len(values)) if clusters is None else clusters)
    if len(groups) < 2:
        return nan, nan
    if of is np.mean:  # computes all resamples at once, as arrays
        sums, counts = (
            np.array([function(group) for group in groups], float) for function in (np.sum, len)
        )
        return _resampled_ratio(sums, counts, seed)

    def any_statistic(drawn: np.ndarray) -> float:
        return of(np.concatenate([groups[int(number)] for number in drawn]))

    return _resampled((np.arange(len(groups)),), any_statistic, at_once=False, seed=seed)


def bootstrap_share(
    values: Sequence[float], clusters: Sequence[Hashable], least: float = 0.0, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of a mean of shares, or of differences of shares (from `least` to
    1).

    It is the wider one of `bootstrap` by cluster and by value. A resample contains only observed
    values. If no value is the least one, or none is 1, the interval is extended. The number of such
    values is then bounded by Wilson's interval of 0 observations.
    """
    low, high = bootstrap(values, clusters, seed=seed)
    if isnan(low):
        return nan, nan
    below, above = bootstrap(values, seed=seed)
    mean, unseen = float(np.mean(values)), wilson(0, len(values))[1]
    if min(values) > least:
        low = min(low, mean - unseen)
    if max(values) < 1:
        high = max(high, mean + unseen)
    return min(low, below), max(high, above)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """Return the mean of ours - theirs over pairs, with its interval (see `bootstrap`)."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    return Estimate(float(np.mean(differences)), *bootstrap(differences, clusters))


def paired_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Estimate:
    """Return the mean of ours divided by the mean of theirs, with its interval.

    Both sides of a pair are drawn together (see `bootstrap`). NaN if theirs are all 0.
    """
    whole = range(len(ours)) if clusters is None else clusters
    tops, bottoms = (
        np.array([group.sum() for group in _group(side, whole)]) for side in (ours, theirs)
    )
    if not bottoms.any():
        return Estimate(nan, nan, nan)
    interval = _resampled_ratio(tops, bottoms, seed) if len(tops) > 1 else (nan, nan)
    return Estimate(float(tops.sum() / bottoms.sum()), *interval)


def paired_p(
    ours: Sequence[float],
    theirs: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> float:
    """Return the two-sided p of a permutation test that pairs differ only by chance.

    The sides of each cluster (of each pair, if None) are exchanged at random. 1 if no pair differs.
    """
    from scipy import stats

    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    groups = _group(differences, range(len(differences)) if clusters is None else clusters)
    sums = np.array([group.sum() for group in groups])
    if not sums.any():
        return 1.0
    found = stats.permutation_test(
        (sums,), lambda drawn, axis: drawn.sum(axis), permutation_type="samples", vectorized=True,
        n_resamples=PERMUTATIONS, batch=max(1, DRAWN // len(sums)), rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(found.pvalue)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    from scipy import stats

    found = stats.binomtest(successes, count).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided p of McNemar's exact test for the pairs that differ.

    It is the probability of a split at least this uneven if both sides are equally likely.
    """
    from scipy import stats

    return float(stats.binomtest(won, lost + won).pvalue) if lost + won else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p of each of several tests, corrected for their number (Holm, 1979).

    All corrected values below a level together have at most that risk of one false finding.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, greatest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(order):
        greatest = max(greatest, (len(p_values) - rank) * p_values[number])
        corrected[number] = min(1.0, greatest)
    return corrected


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's coefficient. NaN for fewer than three pairs, or if one side is constant."""
    from scipy import stats

    if len(left) < 3 or len(set(left)) < 2 or len(set(right)) < 2:
        return nan
    return float(stats.spearmanr(left, right).statistic)


def _resampled_ratio(tops: np.ndarray, bottoms: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the interval of the sum of `tops` divided by that of `bottoms`, [clusters] each."""

    def ratio(tops: np.ndarray, bottoms: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(tops.sum(axis) / bottoms.sum(axis))

    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have only zeros in theirs
        return _resampled((tops, bottoms), ratio, at_once=True, seed=seed)


def _resampled(
    data: tuple[np.ndarray, ...], of: Callable[..., Any], *, at_once: bool, seed: int
) -> tuple[float, float]:
    """Return the percentile interval of a statistic of arrays [clusters], which are drawn
    together.
    """
    from scipy import stats

    found = stats.bootstrap(
        data,
        of,
        n_resamples=RESAMPLES,
        batch=max(1, DRAWN // len(data[0])),
        confidence_level=LEVEL,
        method="percentile",
        paired=True,
        vectorized=at_once,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def _group(values: Sequence[float], clusters: Sequence[Hashable]) -> list[np.ndarray]:
    """Return the values of each cluster."""
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    return [np.array(group) for group in groups.values()]
