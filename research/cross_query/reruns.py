"""Output stability: how much the answers of sampled reruns differ, with reuse and without."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import log
from statistics import mean

import msgspec
from rapidfuzz.distance import Levenshtein

from kvgraft_lab.evaluate.statistics import bootstrap
from research.cross_query.conditions import NONE
from research.cross_query.figures import EpisodeRun, episodes
from research.cross_query.runner import StepRow

RERUNS = 5


class RerunStability(msgspec.Struct, frozen=True):
    """Reruns of the episodes of one condition, with equal draws for all conditions.

    Attributes:
        distance, low, high: Levenshtein distance of the answers of two reruns, as a share of the
            longer ones, mean over pairs of reruns, with its 95 % interval (drawn by series).
        from_none: the same to the rerun under `none` that has drawn as this one has.
        entropy: of the answers to a step over its reruns, in nats, mean over steps.
        success: of all reruns.
    """

    condition: str
    variation: str
    episodes: int
    reruns: int
    distance: float
    low: float
    high: float
    from_none: float | None
    entropy: float
    success: float


def compare(rows: Iterable[StepRow]) -> list[RerunStability]:
    """One line for each variation and condition.

    Raises:
        ValueError: there are no two rounds to compare.
    """
    found = episodes(rows)
    if all(ran.round == 0 for mine in found.values() for ran in mine):
        raise ValueError("stability needs reruns: at least 2 rounds of an experiment")
    return [_stability(key, mine, found.get((key[0], NONE), ())) for key, mine in found.items()]


def _stability(
    key: tuple[str, str], mine: Sequence[EpisodeRun], base: Sequence[EpisodeRun]
) -> RerunStability:
    variation, condition = key
    reruns: dict[object, list[EpisodeRun]] = {}
    for ran in mine:
        reruns.setdefault((ran.series, ran.episode), []).append(ran)
    pairs = [(one, other) for group in reruns.values() for one, other in combinations(group, 2)]
    distances = [_distance(one, other) for one, other in pairs]
    low, high = bootstrap(distances, [one.series for one, _ in pairs])
    theirs = {ran.pair: ran for ran in base}
    apart = [_distance(ran, theirs[ran.pair]) for ran in mine if ran.pair in theirs]
    return RerunStability(
        condition, variation, len(reruns), max(map(len, reruns.values())), mean(distances), low,
        high,
        mean(apart) if apart else None,
        mean(_entropy(answers) for group in reruns.values() for answers in zip(*map(_answers,
        group), strict=True)),
        mean(ran.success for ran in mine),
    )  # fmt: skip


def _answers(ran: EpisodeRun) -> list[str]:
    return [row.answer for row in ran.rows]


def _distance(one: EpisodeRun, other: EpisodeRun) -> float:
    return Levenshtein.normalized_distance(" ".join(_answers(one)), " ".join(_answers(other)))


def _entropy(answers: Sequence[str]) -> float:
    shares = [count / len(answers) for count in Counter(answers).values()]
    return -sum(share * log(share) for share in shares)
