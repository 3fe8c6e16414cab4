"""Circuit breaker of a policy: bad answers lead to a larger budget, then to exact KV.

An alarm moves the breaker one level up, or directly to exact KV if the answers are far too bad for
a larger budget. After a waiting time some requests try the level below, and all their answers are
scored. If enough are good, the breaker moves down. Each alarm or failed trial doubles the waiting
time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvgraft.guard.bounds import Alarm

# mean number of scored answers until a false alarm, at least, for a policy exactly at the target
APART = 2000.0
# minimum number of scored answers of a trial
TRIED = 40
# trial answers without a score that end a trial
UNSCORED = 100
# greatest mean of a passed trial, as a multiple of the target
GOOD = 0.8
# multiple of the target above which a larger budget does not help
HOPELESS = 5.0
# Good answers that are added before that comparison. The answers that raised an alarm are a
# selection of bad ones, so their mean alone is too high.
DOUBTS = 6
# waiting time before a trial: first and longest
WAIT_S, LONGEST_S = 300.0, 86_400.0
# after this multiple of the last waiting time at the lowest level, it starts again at WAIT_S
SETTLED = 10.0


# reasons of a change of level
REASONS = ("alarm", "trial_passed", "trial_failed")


class Level(IntEnum):
    """Level at which the requests of a policy are answered."""

    AS_ASKED = 0
    LARGER_BUDGET = 1
    EXACT = 2


@dataclass(frozen=True)
class Transition:
    """Change of a breaker's level, or a failed trial.

    Attributes:
        before: the level before.
        after: the level after; the same for a failed trial.
        reason: one of `REASONS`.
        answers: number of answers that raised the alarm, or of scored trial answers.
        mean: mean of their values, as shares.
    """

    before: Level
    after: Level
    reason: str
    answers: int
    mean: float


class Breaker:
    """Circuit breaker of one policy.

    Args:
        target: greatest mean of the answers' values, a share.
        levels: levels that the policy supports, from AS_ASKED to EXACT.
        clock: returns seconds.
        on_transition: called with every change of level and every failed trial.
    """

    def __init__(
        self,
        target: float,
        levels: tuple[Level, ...],
        clock: Callable[[], float],
        on_transition: Callable[[Transition], None],
    ) -> None:
        self._target, self._levels, self._clock, self._tell = target, levels, clock, on_transition
        self.level, self._entered = levels[0], clock()
        self._begin()
        # doubled when the first alarm is raised
        self._wait = WAIT_S / 2

    @property
    def is_tripped(self) -> bool:
        """Return whether requests are answered at a level above AS_ASKED."""
        return self.level != self._levels[0]

    @property
    def is_trying(self) -> bool:
        """Return whether some requests try the level below."""
        return self.is_tripped and self._clock() >= self._entered + self._wait

    def level_of(self, *, tries: bool) -> Level:
        """Return the level of the next request.

        Args:
            tries: whether the request may be a trial; its answer will then be scored.
        """
        return self._below if tries and self.is_trying else self.level

    def tried(self) -> None:
        """Count a trial answer on approximate KV that has ended and will be scored."""
        self._tried += 1
        if self.is_trying and self._tried - len(self._trial) > UNSCORED:
            self._fail()

    def add(self, level: Level, value: float) -> None:
        """Add the value of a scored answer.

        Answers at levels that the breaker has left are ignored.
        """
        if level == self.level:
            self._alarm.add(value)
            if self._alarm.raised:
                self._lengthen()
                answers, mean = self._alarm.latest
                hopeless = mean * answers >= HOPELESS * self._target * (answers + DOUBTS)
                above = self._levels[-1 if hopeless else self._levels.index(level) + 1]
                self._move(above, "alarm", answers, mean)
        elif self.is_trying and level == self._below:
            self._trial_alarm.add(value)
            self._trial.append(value)
            self._judge()

    @property
    def _below(self) -> Level:
        """Next lower level."""
        return self._levels[self._levels.index(self.level) - 1]

    def _judge(self) -> None:
        """End the trial if its result is clear."""
        answers, mean = len(self._trial), sum(self._trial) / len(self._trial)
        if self._trial_alarm.raised or answers >= 4 * TRIED:
            self._fail()
        elif answers >= TRIED and mean <= GOOD * self._target:
            self._move(self._below, "trial_passed", answers, mean)

    def _fail(self) -> None:
        """End the trial as failed, and wait longer before the next one."""
        self._lengthen()
        answers = len(self._trial)
        self._move(self.level, "trial_failed", answers, sum(self._trial) / max(answers, 1))

    def _lengthen(self) -> None:
        """Double the waiting time, or start again if the policy was good for long."""
        settled = not self.is_tripped and self._clock() >= self._entered + SETTLED * self._wait
        self._wait = WAIT_S if settled else min(2 * self._wait, LONGEST_S)

    def _move(self, level: Level, reason: str, answers: int, mean: float) -> None:
        """Change the level, and report the transition."""
        before, self.level, self._entered = self.level, level, self._clock()
        self._begin()
        self._tell(Transition(before, level, reason, answers, mean))

    def _begin(self) -> None:
        """Forget what is known of the answers at this level and of the trial."""
        self._alarm, self._trial_alarm = Alarm(self._target, APART), Alarm(self._target, APART)
        self._trial: list[float] = []
        self._tried = 0
