from collections.abc import Callable

import numpy as np
import pytest

from kvgraft.guard.breaker import LONGEST_S, TRIED, UNSCORED, WAIT_S, Breaker, Level, Transition

TARGET = 0.01
ALL, NO_BUDGET = tuple(Level), (Level.AS_ASKED, Level.EXACT)
# mean share of a level's answers, seconds since the beginning
Quality = Callable[[Level, float], float]


class Simulation:
    """Requests that arrive every second, of which every tenth is scored at once."""

    def __init__(self, quality: Quality, levels: tuple[Level, ...] = ALL, seed: int = 0) -> None:
        self.now, self.told = 0.0, list[tuple[float, Transition]]()
        self.breaker = Breaker(
            TARGET, levels, lambda: self.now, lambda one: self.told.append((self.now, one))
        )
        self._quality, self._rng = quality, np.random.default_rng(seed)

    def run(self, seconds: int) -> list[Level]:
        """The levels at which requests are answered."""
        levels = []
        for _ in range(seconds):
            self.now += 1
            drawn = bool(self._rng.random() < 0.1)
            levels.append(self.breaker.level_of(tries=drawn))
            if drawn and levels[-1] is not Level.EXACT:
                mean = self._quality(levels[-1], self.now)
                self.breaker.add(levels[-1], float(self._rng.beta(5 * mean, 5 * (1 - mean))))
        return levels


def test_good_answers_change_nothing():
    for seed in range(20):
        simulation = Simulation(lambda *_: 0.004, seed=seed)
        assert set(simulation.run(20_000)) == {Level.AS_ASKED}
        assert not simulation.told


def test_bad_answers_get_a_larger_budget_and_then_exact_kv():
    simulation = Simulation(lambda *_: 0.03)
    simulation.run(20_000)
    moves = [one for _, one in simulation.told if one.reason == "alarm"]
    assert [one.after for one in moves] == [Level.LARGER_BUDGET, Level.EXACT]
    assert all(one.mean > TARGET for one in moves)


def test_hopeless_answers_get_exact_kv_at_once():
    simulation = Simulation(lambda *_: 0.3)
    simulation.run(int(WAIT_S))
    [(_, transition)] = simulation.told
    assert (transition.before, transition.after) == (Level.AS_ASKED, Level.EXACT)


def test_what_becomes_hopeless_is_judged_by_what_it_has_become():
    simulation = Simulation(lambda _, now: 0.001 if now < 20_000 else 0.5)
    simulation.run(20_200)
    [(now, transition)] = simulation.told
    assert now < 20_100
    assert (transition.before, transition.after) == (Level.AS_ASKED, Level.EXACT)
    assert transition.mean == pytest.approx(0.5, abs=0.2)
    assert transition.answers <= 10


def test_a_policy_without_a_budget_gets_exact_kv():
    simulation = Simulation(lambda *_: 0.3, NO_BUDGET)
    simulation.run(int(WAIT_S))
    assert [(one.before, one.after) for _, one in simulation.told] == [NO_BUDGET]


def test_where_the_larger_budget_helps_it_stays():
    simulation = Simulation(lambda level, _: 0.03 if level is Level.AS_ASKED else 0.002)
    levels = simulation.run(50_000)
    assert simulation.breaker.level is Level.LARGER_BUDGET
    assert Level.EXACT not in levels
    assert levels.count(Level.AS_ASKED) < 1000


def test_only_drawn_requests_try_the_level_below_and_not_at_once():
    simulation = Simulation(lambda *_: 0.3, NO_BUDGET)
    simulation.run(200)
    assert simulation.breaker.is_tripped
    assert not simulation.breaker.is_trying
    assert simulation.breaker.level_of(tries=True) is Level.EXACT
    simulation.now += WAIT_S
    assert simulation.breaker.is_trying
    assert simulation.breaker.level_of(tries=False) is Level.EXACT
    assert simulation.breaker.level_of(tries=True) is Level.AS_ASKED


def test_a_trial_ends_whose_answers_are_never_scored():
    simulation = Simulation(lambda *_: 0.3, NO_BUDGET)
    simulation.run(200)
    simulation.now += WAIT_S
    for number in range(UNSCORED + 1):
        assert simulation.breaker.is_trying, number
        simulation.breaker.tried()
    assert not simulation.breaker.is_trying
    assert (simulation.told[-1][1].reason, simulation.told[-1][1].answers) == ("trial_failed", 0)
    simulation.now += WAIT_S
    assert not simulation.breaker.is_trying, "it waits twice as long"
    simulation.now += WAIT_S
    assert simulation.breaker.is_trying


def test_what_gets_well_is_trusted_again_step_by_step():
    simulation = Simulation(lambda _, now: 0.3 if now < 2000 else 0.001)
    simulation.run(30_000)
    assert simulation.breaker.level is Level.AS_ASKED
    passed = [one for _, one in simulation.told if one.reason == "trial_passed"]
    assert [one.after for one in passed[-2:]] == [Level.LARGER_BUDGET, Level.AS_ASKED]
    assert all(one.answers >= TRIED for one in passed)


@pytest.mark.parametrize(
    "quality",
    [
        pytest.param(lambda *_: 0.3, id="broken for good"),
        pytest.param(lambda *_: 0.012, id="a little too bad"),
        pytest.param(lambda _, now: 0.002 + now / 5e6, id="a slow leak"),
        pytest.param(lambda _, now: 0.3 if now % 7000 < 1000 else 0.002, id="comes and goes"),
    ],
)
def test_it_does_not_flap(quality: Quality):
    """In a day and a half few changes, the less the longer it lasts; what is bad is tried ever more
    seldom."""
    simulation = Simulation(quality)
    simulation.run(130_000)
    moves = [now for now, one in simulation.told if one.before != one.after]
    assert len(moves) <= 30
    assert sum(now > 65_000 for now in moves) <= len(moves) / 2


def test_a_slow_leak_is_found():
    simulation = Simulation(lambda _, now: 0.002 + now / 1e6)
    simulation.run(60_000)
    [(first, transition), *_] = simulation.told
    assert transition.after is Level.LARGER_BUDGET
    assert 0.002 + first / 1e6 < 4 * TARGET


def test_a_poisoned_segment_is_found():
    """All is well but for the prompts that hold it, one in twenty."""
    for seed in range(20):
        rng = np.random.default_rng(1000 + seed)
        simulation = Simulation(
            lambda *_, rng=rng: 0.8 if rng.random() < 0.05 else 0.001, NO_BUDGET, seed
        )
        simulation.run(10_000)
        assert simulation.told, seed
        assert simulation.told[0][1].reason == "alarm"
        assert simulation.told[0][0] < 6000, "600 scored answers"


def test_waiting_is_doubled_up_to_a_day():
    simulation = Simulation(lambda *_: 0.5, NO_BUDGET)
    waits = []
    for _ in range(14):
        told = len(simulation.told)
        while len(simulation.told) == told:
            simulation.run(20)
        since = simulation.now
        while not simulation.breaker.is_trying:
            simulation.now += 50
        waits.append(simulation.now - since)
    assert waits[:4] == pytest.approx([WAIT_S, 2 * WAIT_S, 4 * WAIT_S, 8 * WAIT_S], abs=50)
    assert waits[-1] == pytest.approx(LONGEST_S, abs=50)


def test_answers_of_a_level_that_was_left_tell_nothing():
    simulation = Simulation(lambda *_: 0.3, NO_BUDGET)
    simulation.run(200)
    told = len(simulation.told)
    for _ in range(100):  # were on their way when it tripped
        simulation.breaker.add(Level.AS_ASKED, 1.0)
    assert len(simulation.told) == told
