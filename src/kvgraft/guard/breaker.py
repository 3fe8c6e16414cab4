"""The breaker: when answers on approximate KV have become too bad, requests get a larger budget,
then exact KV.

A level is left upwards when its alarm is raised, for exact KV at once if answers are hopeless.
After a while some requests whose answers are all scored try the level below, and if enough of them
are good, all others follow; each time that fails the while is doubled."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvgraft.guard.bounds import Alarm

# scored answers between false alarms, at least, of a policy that is as bad as is allowed
APART = 2000.0
TRIED = 40  # answers of a trial, at least
UNSCORED = 100  # answers that tried, and have not been scored: that ends a trial, too
GOOD = 0.8  # of the target, that the mean of a trial may reach
HOPELESS = 5.0  # times the target: answers as bad as that are not mended by a larger budget
# good answers that are added before that is said of those that have raised the alarm: they were bad
# ones
DOUBTS = 6
WAIT_S, LONGEST_S = 300.0, 86_400.0  # before a trial: at first, and at most
SETTLED = 10.0  # times as long as it waited, at the lowest level: then it waits as at first


class Level(IntEnum):
    """How the requests of a policy are answered."""

    AS_ASKED = 0
    LARGER_BUDGET = 1
    EXACT = 2


@dataclass(frozen=True)
class Transition:
    """A change of level, with what was known of it: `answers` have raised the alarm, or tried the
    new level."""

    before: Level
    after: Level
    reason: str  # alarm, trial_passed, trial_failed
    answers: int
    mean: float  # of their values, as shares


class Breaker:
    """Of one policy.

    Args:
        target: what the mean of the answers' values may be, a share.
        levels: those that the policy has; the first one is AS_ASKED, the last one EXACT.
        clock: seconds, from any moment on.
        on_transition: called with every change of level, and with trials that failed.
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
        self._wait = WAIT_S / 2  # doubled when the first alarm is raised

    @property
    def is_tripped(self) -> bool:
        """Whether requests are answered otherwise than they ask for."""
        return self.level != self._levels[0]

    @property
    def is_trying(self) -> bool:
        """Whether some requests try the level below."""
        return self.is_tripped and self._clock() >= self._entered + self._wait

    def level_of(self, *, tries: bool) -> Level:
        """At which the next request is answered; `tries`: it may try, and its answer will be
        scored."""
        return self._below if tries and self.is_trying else self.level

    def tried(self) -> None:
        """An answer on approximate KV has ended that has tried the level below, and is to be
        scored."""
        self._tried += 1
        if self.is_trying and self._tried - len(self._trial) > UNSCORED:
            self._fail()

    def add(self, level: Level, value: float) -> None:
        """An answer of this level has been scored; those of levels that have been left tell nothing
        any more."""
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
        return self._levels[self._levels.index(self.level) - 1]

    def _judge(self) -> None:
        """End the trial, if it is clear how."""
        answers, mean = len(self._trial), sum(self._trial) / len(self._trial)
        if self._trial_alarm.raised or answers >= 4 * TRIED:
            self._fail()
        elif answers >= TRIED and mean <= GOOD * self._target:
            self._move(self._below, "trial_passed", answers, mean)

    def _fail(self) -> None:
        self._lengthen()
        answers = len(self._trial)
        self._move(self.level, "trial_failed", answers, sum(self._trial) / max(answers, 1))

    def _lengthen(self) -> None:
        settled = not self.is_tripped and self._clock() >= self._entered + SETTLED * self._wait
        self._wait = WAIT_S if settled else min(2 * self._wait, LONGEST_S)

    def _move(self, level: Level, reason: str, answers: int, mean: float) -> None:
        before, self.level, self._entered = self.level, level, self._clock()
        self._begin()
        self._tell(Transition(before, level, reason, answers, mean))

    def _begin(self) -> None:
        """Nothing is known of answers at this level, nor of a trial."""
        self._alarm, self._trial_alarm = Alarm(self._target, APART), Alarm(self._target, APART)
        self._trial: list[float] = []
        self._tried = 0
