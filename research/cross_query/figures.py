"""Figures of an experiment, by condition: what its agents got right, what was reused, what it
took."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import mean, median

import msgspec

from kvgraft_lab.evaluate.statistics import bootstrap_share
from research.cross_query.conditions import NONE
from research.cross_query.runner import Series, StepRow


@dataclass(frozen=True)
class EpisodeRun:
    """One episode under one condition."""

    series: Series
    episode: int
    round: int
    rows: tuple[StepRow, ...]

    @property
    def pair(self) -> tuple[Series, int, int]:
        """What it has in common with the same episode under another condition."""
        return self.series, self.episode, self.round

    @property
    def success(self) -> bool:
        return self.rows[-1].success

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def ttft_s(self) -> float:
        return sum(row.ttft_s for row in self.rows)

    @property
    def reused(self) -> float:
        """Grafted tokens and exact hits, as a share of all."""
        return sum(row.grafted + row.prefix for row in self.rows) / sum(
            row.prompt for row in self.rows
        )


class Figures(msgspec.Struct, frozen=True):
    """Some episodes of one condition. Shares are of 1.

    Attributes:
        success, low, high: of episodes, with the 95 % bootstrap interval (drawn by series).
        right: of steps, whose answer is what their prompt says.
        prefix, grafted, matched: of prompt tokens; exact hits, grafts, known text that is only
            counted.
        computed: mean over steps, (token, layer) pairs of those of full recomputation, probes
            included.
        flops: of those of `none` in the same episodes.
        ttft_ms: median over steps; `faster`, `ttft_faster`: median over episodes of none's seconds
            divided by this one's, of the whole step and to its first token.
        probed, rejected: segments that a probe has looked at, mean per step; of these, not trusted.
        fallbacks: steps whose grafts were given up.
    """

    condition: str
    variation: str
    episodes: int
    success: float
    low: float
    high: float
    right: float
    prefix: float
    grafted: float
    matched: float
    computed: float
    flops: float
    ttft_ms: float
    faster: float
    ttft_faster: float
    probed: float
    rejected: float
    fallbacks: int


def episodes(rows: Iterable[StepRow]) -> dict[tuple[str, str], list[EpisodeRun]]:
    """Whole episodes by (variation, condition)."""
    steps: dict[tuple[object, ...], list[StepRow]] = {}
    for row in rows:
        steps.setdefault((*row.series, row.condition, row.episode, row.round), []).append(row)
    found: dict[tuple[str, str], list[EpisodeRun]] = {}
    for mine in steps.values():
        ordered = tuple(sorted(mine, key=lambda row: row.step))
        first, last = ordered[0], ordered[-1]
        if last.last and len(ordered) == last.step + 1:
            ran = EpisodeRun(first.series, first.episode, first.round, ordered)
            found.setdefault((first.variation, first.condition), []).append(ran)
    return found


def paired(
    mine: Sequence[EpisodeRun], others: Sequence[EpisodeRun]
) -> list[tuple[EpisodeRun, EpisodeRun]]:
    """The episodes that both have."""
    theirs = {ran.pair: ran for ran in others}
    return [(ran, theirs[ran.pair]) for ran in mine if ran.pair in theirs]


def summarise(rows: Iterable[StepRow]) -> list[Figures]:
    """One line for each variation and condition."""
    found = episodes(rows)
    return [_figures(key, mine, found.get((key[0], NONE), [])) for key, mine in found.items()]


def _figures(
    key: tuple[str, str], mine: Sequence[EpisodeRun], base: Sequence[EpisodeRun]
) -> Figures:
    variation, condition = key
    pairs = paired(mine, base)
    steps = [row for ran in mine for row in ran.rows]
    prompt = sum(row.prompt for row in steps)
    successes = [float(ran.success) for ran in mine]
    probed = sum(row.probed_segments for row in steps)

    def faster(seconds: Callable[[EpisodeRun], float]) -> float:
        return median(seconds(none) / seconds(ran) for ran, none in pairs) if pairs else nan

    def flops(ran: Iterable[EpisodeRun]) -> int:
        return sum(row.flops for one in ran for row in one.rows)

    low, high = bootstrap_share(successes, [ran.series for ran in mine])
    return Figures(
        condition, variation, len(mine), mean(successes), max(0.0, low), min(1.0, high),
        right=mean(row.right for row in steps),
        prefix=sum(row.prefix for row in steps) / prompt,
        grafted=sum(row.grafted for row in steps) / prompt,
        matched=sum(row.matched for row in steps) / prompt,
        computed=mean(row.computed for row in steps),
        flops=flops(ran for ran, _ in pairs) / flops(none for _, none in pairs) if pairs else nan,
        ttft_ms=1000 * median(row.ttft_s for row in steps),
        faster=faster(lambda ran: ran.seconds),
        ttft_faster=faster(lambda ran: ran.ttft_s),
        probed=probed / len(steps),
        rejected=sum(row.rejected_segments for row in steps) / probed if probed else nan,
        fallbacks=sum(row.fallback is not None for row in steps),
    )  # fmt: skip
