from functools import partial

import numpy as np
import pytest

from kvgraft.guard.bounds import BETS, MEANS, Alarm, ConfidenceSequence

RUNS, ANSWERS, ALPHA = 10_000, 300, 0.05


def shares(kind: str, mean: float, rng: np.random.Generator, count: int) -> np.ndarray:
    """Values in [0, 1] of this mean."""
    if kind == "all or nothing":
        return rng.binomial(1, mean, count).astype(float)
    return rng.beta(5 * mean, 5 * (1 - mean), count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all or nothing", "shares"])
@pytest.mark.parametrize("mean", [0.002, 0.01, 0.05, 0.3])
def test_the_mean_is_within_the_bounds_at_all_times(kind: str, mean: float):
    """Of as many runs as the interval may miss, hardly more ever leave it: the wealth of both bets
    against the truth, of all runs together."""
    rng, missed = np.random.default_rng(7), np.zeros(RUNS, bool)
    greater, less = np.zeros((len(BETS), RUNS)), np.zeros((len(BETS), RUNS))
    for _ in range(ANSWERS):
        values = shares(kind, mean, rng, RUNS)
        greater += np.log1p(BETS * (values / mean - 1))
        less += np.log1p(BETS * (mean - values) / (1 - mean))
        for wealth in (greater, less):
            missed |= np.exp(wealth).mean(0) >= 2 / ALPHA
    assert missed.mean() <= ALPHA


@pytest.mark.parametrize("mean", [0.01, 0.3])
def test_bounds_close_in_on_the_mean(mean: float):
    rng, sequence, widths = np.random.default_rng(0), ConfidenceSequence(ALPHA), []
    for value in shares("shares", mean, rng, 2000):
        sequence.add(float(value))
        low, high = sequence.interval
        assert low <= sequence.mean <= high or sequence.count < 50
        widths.append(high - low)
    low, high = sequence.interval
    assert low < mean < high < 1.5 * mean
    assert widths[0] > 0.9
    assert widths[100] > widths[500] > widths[1999]


def test_nothing_is_known_of_nothing():
    sequence = ConfidenceSequence()
    assert (sequence.mean, sequence.interval) == (0.0, (0.0, 1.0))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_bounds_of_the_least_and_the_greatest(value: float):
    sequence = ConfidenceSequence(ALPHA)
    for _ in range(500):
        sequence.add(value)
    low, high = sequence.interval
    assert low <= value <= high
    assert high - low < 0.03


def test_the_bounds_are_the_means_that_no_bet_refutes():
    rng, sequence = np.random.default_rng(3), ConfidenceSequence(ALPHA)
    values = shares("shares", 0.2, rng, 200)
    for value in values:
        sequence.add(float(value))

    def refuted(mean: float) -> bool:
        greater = np.exp(np.log1p(BETS * (values / mean - 1)).sum(1)).mean()
        less = np.exp(np.log1p(BETS * (mean - values) / (1 - mean)).sum(1)).mean()
        return max(greater, less) >= 2 / ALPHA

    low, high = sequence.interval
    assert [mean for mean in MEANS if low < mean < high] == [
        mean for mean in MEANS if not refuted(mean)
    ]


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(wrong: float):
    for add in (ConfidenceSequence().add, Alarm(0.1, 100).add, partial(Alarm, apart=100)):
        with pytest.raises(ValueError, match=r"target|value"):
            add(wrong)


def answers_until_alarm(target: float, values: np.ndarray, apart: float = 1000.0) -> int | None:
    alarm = Alarm(target, apart)
    for number, value in enumerate(values, 1):
        alarm.add(float(value))
        if alarm.raised:
            return number
    return None


@pytest.mark.parametrize("good", [0, 1000])
def test_a_mean_that_becomes_too_great_raises_the_alarm(good: int):
    """As soon after a thousand good answers as at once."""
    rng, found = np.random.default_rng(1), []
    for _ in range(20):
        values = np.concatenate(
            [shares("shares", 0.002, rng, good), shares("shares", 0.2, rng, 100)]
        )
        number = answers_until_alarm(0.01, values)
        assert number is not None
        found.append(number - good)
    assert min(found) >= 1
    assert max(found) <= 20


def test_false_alarms_are_as_far_apart_as_promised():
    """Of answers that are as bad as is allowed."""
    rng, apart = np.random.default_rng(2), 100.0
    found = [
        answers_until_alarm(0.05, shares("all or nothing", 0.05, rng, 5000), apart) or 5000
        for _ in range(100)
    ]
    assert np.mean(found) >= apart
