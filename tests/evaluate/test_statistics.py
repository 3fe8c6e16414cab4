"""Statistics against values worked out by hand."""

import math
from itertools import product
from math import isnan

import numpy as np
import pytest

from kvgraft_lab.evaluate.statistics import (
    bootstrap,
    bootstrap_share,
    holm,
    mcnemar,
    paired_difference,
    paired_p,
    paired_ratio,
    rank_correlation,
    wilson,
)

UNSEEN = 1.96**2 / (30 + 1.96**2)  # Wilson's upper bound of 0 in 30


def test_the_bootstrap_of_three_values_is_that_of_all_their_resamples():
    # 27, equally likely
    means = np.sort([np.mean(drawn) for drawn in product([0.0, 1.0, 5.0], repeat=3)])
    low, high = bootstrap([0.0, 1.0, 5.0])
    assert (low, high) == (means[0], means[-1]), "each end has 1 / 27, more than 2.5 %"
    low, high = bootstrap([0.0, 1.0, 5.0], of=np.median)
    assert (low, high) == (0.0, 5.0)


def test_an_interval_of_many_values_is_as_wide_as_their_standard_error_says():
    values = np.random.default_rng(0).normal(3, 2, 400).tolist()
    low, high = bootstrap(values)
    half = 1.96 * np.std(values) / 20
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.03)
    assert bootstrap(values) == (low, high), "equal calls give equal intervals"
    low, high = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0], of=np.median)
    assert 1.0 <= low < 3.0 < high <= 100.0
    assert bootstrap([2.0] * 5) == bootstrap([2.0] * 5, of=np.median) == (2.0, 2.0)


def test_what_is_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    values = np.random.default_rng(0).normal(0, 1, 50).tolist()
    found = bootstrap(values)
    monkeypatch.setattr("kvgraft_lab.evaluate.statistics.DRAWN", 100)
    assert bootstrap(values) == found


def test_clusters_are_drawn_whole():
    rng = np.random.default_rng(1)
    values = [float(rng.random() < mean) for mean in rng.random(40) for _ in range(4)]
    numbers = [place // 4 for place in range(len(values))]
    for low, high in (bootstrap(values), bootstrap(values, numbers)):
        assert low < np.mean(values) < high
    # four times the same answer is one answer
    copies = [value for value in values[::4] for _ in range(4)]
    low, high = bootstrap(copies, numbers)
    narrow = bootstrap(copies)
    assert (high - low) / (narrow[1] - narrow[0]) == pytest.approx(2, rel=0.1)
    assert (low, high) == pytest.approx(
        bootstrap(copies, numbers, of=lambda drawn: float(drawn.mean())), abs=0.02
    )
    assert bootstrap([0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1]) == (0.0, 1.0), (
        "clusters weigh by their values"
    )


@pytest.mark.parametrize("clusters", [["one", "one"], [7, 7]])
def test_of_one_cluster_nothing_can_be_said(clusters: list[object]):
    assert all(map(isnan, bootstrap([1.0, 2.0], clusters)))  # type: ignore[arg-type]
    assert all(map(isnan, bootstrap_share([0.0, 1.0], clusters)))  # type: ignore[arg-type]
    assert all(map(isnan, bootstrap([1.0])))


def test_shares_may_be_what_was_not_seen():
    assert bootstrap_share([1.0] * 30, list(range(30))) == pytest.approx(
        (1 - UNSEEN, 1.0), abs=1e-4
    )
    assert bootstrap_share([0.0] * 30, list(range(30)), least=-1.0) == pytest.approx(
        (-UNSEEN, UNSEEN), abs=1e-4
    )
    won = bootstrap_share([0.0] * 29 + [1.0], list(range(30)), least=-1.0)
    assert won[0] == pytest.approx(1 / 30 - UNSEEN, abs=1e-4)
    even = bootstrap_share(
        [0.0] * 28 + [1.0, -1.0], [number % 2 for number in range(28)] + [0, 0], least=-1.0
    )
    assert even[0] < -0.03 < 0.03 < even[1]  # though no cluster differs from any other


def test_differences_are_of_pairs():
    spread = [0.0, 10.0, 20.0, 30.0] * 5
    found = paired_difference([value + 1 for value in spread], spread)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0), (
        "however far apart the pairs are"
    )
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0])


def test_ratios_are_of_sums_drawn_together():
    theirs = [1.0, 2.0, 3.0, 10.0, 0.0, 7.0]
    found = paired_ratio([2 * value for value in theirs], theirs)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0), (
        "however far apart the pairs are"
    )
    ours = [1.0, 5.0, 0.0, 9.0, 1.0, 2.0]
    numbers = [0, 0, 1, 1, 2, 2]
    by_cluster = paired_ratio(ours, theirs, numbers)
    sums = [(6.0, 3.0), (9.0, 13.0), (3.0, 7.0)]
    drawn = np.sort(
        [sum(a for a, _ in three) / sum(b for _, b in three) for three in product(sums, repeat=3)]
    )
    assert by_cluster.value == sum(ours) / sum(theirs)
    assert (by_cluster.low, by_cluster.high) == pytest.approx((drawn[0], drawn[-1])), (
        "each end has 1 / 27"
    )
    assert by_cluster == paired_ratio(ours, theirs, numbers)


def test_nothing_is_a_multiple_of_nothing():
    assert isnan(paired_ratio([1.0, 2.0], [0.0, 0.0]).value)
    one = paired_ratio([1.0, 2.0], [2.0, 4.0], ["same", "same"])
    assert (one.value, isnan(one.low), isnan(one.high)) == (0.5, True, True)


def test_the_permutation_test_exchanges_the_sides_of_clusters():
    assert paired_p([1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 5) == pytest.approx(2 / 2**5), (
        "all of them, as there are few"
    )
    assert paired_p([1.0] * 6, [0.0] * 6, [0, 0, 1, 1, 2, 2]) == pytest.approx(2 / 2**3)
    assert paired_p([0.3, 0.5], [0.3, 0.5]) == 1
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(0, 1, (2, 400))
    same, better = paired_p(list(ours), list(theirs)), paired_p(list(ours + 0.3), list(theirs))
    assert same > 0.05
    assert better < 0.001
    assert paired_p(list(ours), list(theirs)) == same, "drawn alike"


@pytest.mark.parametrize(
    ("successes", "count", "expected"),
    # the last one: Newcombe, 1998
    [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (81, 263, (0.2553, 0.3662))],
)
def test_wilson(successes: int, count: int, expected: tuple[float, float]):
    assert wilson(successes, count) == pytest.approx(expected, abs=1e-4)


def test_mcnemar():
    assert mcnemar(0, 5) == mcnemar(5, 0) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 9], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2), (
        "ties share a rank"
    )
    assert isnan(rank_correlation([1, 2], [1, 2]))
    assert isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
