"""The experiment: agents under all conditions in turn, one line of JSON for each step, resumable.

The cache of a condition is a part of it, so the unit that is repeated after an interruption is a
seed: its episodes are read again, in order, and only steps that the file does not hold yet are
written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import Part
from kvgraft.engine.config import load_config
from kvgraft.engine.request import Result
from kvgraft_lab.evaluate.jsonl import check_config, read_lines
from research.cross_query.asking import Agent, sampling_of
from research.cross_query.conditions import Condition
from research.cross_query.episodes import SUITES, Episode, make_episodes
from research.cross_query.loop import EpisodeResult, run_episode
from research.cross_query.variation import Variation

CONFIG, ROWS = "agents.json", "steps.jsonl"
PLAIN, ADVERSARIAL = "plain", "adversarial"
VARIATIONS = {PLAIN: Variation(), ADVERSARIAL: Variation(changed_notes=1.0)}
"""How prompts nearly repeat; `adversarial` ones change every note, so that all facts that depend on
one do, too."""

Series = tuple[str, str, int]
"""(suite, variation, seed): what an engine and its cache live for."""


@dataclass(frozen=True)
class ExperimentSettings:
    """What is run. All but seeds, episodes, rounds and conditions must be what it was when a
    directory is continued.

    Attributes:
        rounds: times that a seed is run, each with empty caches; sampled rounds draw differently.
        num_pages: of each engine's pool; what does not fit is evicted, least recently used first.

    Raises:
        ValueError: an unknown name, a number below 1, or nothing to run.
    """

    suites: tuple[str, ...]
    seeds: tuple[int, ...]
    conditions: tuple[Condition, ...]
    episodes: int = 10
    rounds: int = 1
    variations: tuple[str, ...] = (PLAIN,)
    sampling: str = "greedy"
    num_pages: int = 4096

    def __post_init__(self) -> None:
        for name, given, known in (
            ("suite", self.suites, SUITES),
            ("variation", self.variations, tuple(VARIATIONS)),
        ):
            if unknown := [one for one in given if one not in known]:
                raise ValueError(f"unknown {name} {unknown[0]!r}: choose from {', '.join(known)}")
        for name in ("suites", "seeds", "conditions", "variations"):
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(
                    f"{name} must be one or more, none of them twice, got {getattr(self, name)}"
                )
        for name in ("episodes", "rounds", "num_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        sampling_of(self.sampling, 0, 0, 0, 0)

    @property
    def series(self) -> list[Series]:
        """All that is run, in order."""
        return list(product(self.suites, self.variations, self.seeds))

    def describe(self) -> dict[str, Any]:
        """What a directory can hold one kind of only."""
        depths = {condition.max_depth for condition in self.conditions}
        return {"sampling": self.sampling, "num_pages": self.num_pages, "max_depth": sorted(depths)}


class StepRow(msgspec.Struct, frozen=True):
    """One step. Tokens as in `Report`; `matched` ones stand in earlier prompts.

    Attributes:
        round: from 0; each began with empty caches.
        expected, answer, right, error: as in `StepOutcome`.
        last, success: whether it ends the episode; whether the episode's final answer is right.
        seconds: until the answer was there, matching included.
        rejected: tokens that a probe did not trust.
        probed_segments, rejected_segments: that a probe has looked at, and of these.
    """

    suite: str
    variation: str
    seed: int
    episode: int
    step: int
    condition: str
    round: int
    task: str
    expected: str
    answer: str
    right: bool
    error: bool
    last: bool
    success: bool
    prompt: int
    prefix: int
    grafted: int
    recomputed: int
    fresh: int
    matched: int
    computed: float
    flops: int
    ttft_s: float
    seconds: float
    stages: dict[str, float]
    rejected: int
    probed_segments: int
    rejected_segments: int
    restored_blocks: int
    fallback: str | None

    @property
    def series(self) -> Series:
        return self.suite, self.variation, self.seed

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.series, self.round, self.condition, self.episode, self.step)


def run(
    settings: ExperimentSettings,
    model: Path,
    directory: Path,
    on_progress: OnProgress | None = None,
    **engine: Any,
) -> list[StepRow]:
    """Run what the directory does not hold yet, and return all rows of it. Conditions answer in
    turns, episode by episode, and every episode begins with another one, so that whatever else the
    machine does hits all alike.

    Args:
        engine: arguments of all engines.

    Raises:
        ValueError: the directory holds an experiment with other settings, or a prompt cannot be
            answered.
    """
    check_settings(settings, model, directory, engine)
    rows = {row.key: row for row in read_rows(directory)}
    units = list(product(settings.series, range(settings.rounds)))
    total = len(units) * settings.episodes
    with (directory / ROWS).open("ab") as file:
        for unit, (series, turn) in enumerate(units):
            left = [
                c for c in settings.conditions if not _is_complete(rows, settings, series, turn, c)
            ]
            agents = [Agent(c, c.open(model, num_pages=settings.num_pages, **engine)) for c in left]
            for number in range(settings.episodes):
                for row in _episode(settings, series, turn, number, agents) if agents else ():
                    if row.key not in rows:
                        rows[row.key] = row
                        file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                if on_progress is not None:
                    on_progress(unit * settings.episodes + number + 1, total)
            for agent in agents:
                agent.engine.close()
    return list(rows.values())


def read_rows(directory: Path) -> list[StepRow]:
    """The rows of an experiment."""
    return read_lines(directory / ROWS, StepRow)


def episodes_of(series: Series, count: int) -> tuple[Episode, ...]:
    """The episodes of a series."""
    suite, variation, seed = series
    return make_episodes(suite, seed, count, VARIATIONS[variation])


def check_settings(
    settings: ExperimentSettings, model: Path, directory: Path, engine: Mapping[str, Any]
) -> None:
    """Note what a directory is of; ValueError if it is of something else."""
    described = {**settings.describe(), "model": load_config(model).identity, **engine}
    check_config(directory / CONFIG, described)


def _is_complete(
    rows: dict[tuple[object, ...], StepRow],
    settings: ExperimentSettings,
    series: Series,
    turn: int,
    one: Condition,
) -> bool:
    """Whether the file holds the last step of every episode of one condition."""
    episodes = episodes_of(series, settings.episodes)
    return all(
        (*series, turn, one.name, n, len(e.plan.steps) - 1) in rows for n, e in enumerate(episodes)
    )


def _episode(
    settings: ExperimentSettings, series: Series, turn: int, number: int, agents: Sequence[Agent]
) -> Iterator[StepRow]:
    """One episode under all conditions that are left."""
    episode, first = episodes_of(series, settings.episodes)[number], (number + turn) % len(agents)
    for agent in (*agents[first:], *agents[:first]):

        def answer(parts: Sequence[Part], step: int, agent: Agent = agent) -> Result:
            return agent.ask(parts, sampling_of(settings.sampling, series[2], number, turn, step))

        agent.took.clear()
        result = run_episode(answer, episode)
        yield from _rows(result, (*series, number, agent.condition.name, turn), agent.took)


def _rows(
    result: EpisodeResult, where: tuple[Any, ...], took: Sequence[tuple[float, int]]
) -> Iterator[StepRow]:
    suite, variation, seed, number, condition, turn = where
    for step, (one, (seconds, matched)) in enumerate(zip(result.steps, took, strict=True)):
        if one.result is None:
            raise TypeError(f"step {step} of {result.name} was not answered by an engine")
        report = one.result.report
        counts = report.counts
        yield StepRow(
            suite, variation, seed, number, step, condition, turn, result.task, one.expected,
            one.answer, one.right,
            one.error, step == len(result.steps) - 1, result.success, report.prompt_tokens,
            report.prefix_tokens,
            report.grafted_tokens, report.recomputed_tokens, report.fresh_tokens, matched,
            report.computed_share,
            report.flops, report.ttft_s, seconds, report.stages, counts["rejected_tokens"],
            counts["probed_segments"],
            counts["rejected_segments"], counts["restored_blocks"], report.fallback,
        )  # fmt: skip
