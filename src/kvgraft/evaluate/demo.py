"""The demonstration: three applications, each under three policies, on the bundled model or one of the user's own."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.segments.prompt import Segment
from kvgraft.testbed.scenarios import Item, make_scenarios

POLICIES = ("full", "naive", "sparsex")
MAX_TOKENS = 4  # enough for the first word of an answer in a subword vocabulary


@dataclass(frozen=True)
class Outcomes:
    """One prompt: the right answer, and the result of every policy."""

    answer: str
    results: Mapping[str, Result]


@dataclass(frozen=True)
class PolicyRow:
    """What one policy did on `num_prompts` prompts.

    Attributes:
        ttft_ms: median time to the first token, in milliseconds.
        speedup: median over prompts of the time of `full` divided by the time of this policy.
        reused: grafted tokens as a share of the prompt tokens.
        recomputed: tokens computed again in the last layer, as a share of the grafted tokens.
        right: answers whose first word is the expected one, whatever their case.
        same_as_full: answers whose first word is that of `full`.
        fallbacks: prompts whose grafts were found and not used.
    """

    policy: str
    num_prompts: int
    ttft_ms: float
    speedup: float
    reused: float
    recomputed: float
    right: int
    same_as_full: int
    fallbacks: int


@dataclass(frozen=True)
class ScenarioTable:
    """One row per policy, in the order of `POLICIES`."""

    name: str
    description: str
    rows: tuple[PolicyRow, ...]


@dataclass(frozen=True)
class DemoReport:
    """All tables, the rows over all scenarios together, and one sentence that says what they show."""

    seed: int
    items: int
    tables: tuple[ScenarioTable, ...]
    overall: tuple[PolicyRow, ...]
    summary: str


def run_demo(
    engine: Engine, *, seed: int = 0, items: int = 10, on_progress: Callable[[int, int], None] | None = None
) -> DemoReport:
    """Run every scenario under every policy.

    Each item begins with an empty cache and a full reading of the prompts of phase 1. The prompts of phase 2 leave
    nothing behind, so that all policies reuse the same pages; on each prompt they take turns.

    Args:
        engine: on the bundled model, or on another one, whose answers may be wrong.
        seed: of the scenarios.
        items: of each scenario.
        on_progress: called after each item with the number of items done, and of all items.

    Raises:
        ValueError: `items` is below 1, or the model cannot take a prompt; the message says why.
        RuntimeError: the engine gave up a prompt; the message says why.
    """
    scenarios = make_scenarios(seed, items)
    done, total = 0, items * len(scenarios)
    _run_item(engine, scenarios[0].items[0])  # warm-up
    outcomes: list[list[Outcomes]] = []
    for scenario in scenarios:
        outcomes.append([])
        for item in scenario.items:
            outcomes[-1] += _run_item(engine, item)
            done += 1
            if on_progress is not None:
                on_progress(done, total)
    tables = tuple(
        ScenarioTable(scenario.name, scenario.description, _rows(prompts))
        for scenario, prompts in zip(scenarios, outcomes, strict=True)
    )
    overall = _rows(list(chain.from_iterable(outcomes)))
    return DemoReport(seed, items, tables, overall, _summary(overall))


def _run_item(engine: Engine, item: Item) -> list[Outcomes]:
    engine.clear_cache()
    for segments in item.phase_1:
        _send(engine, segments, "full", remember=True)
    outcomes = []
    for number, prompt in enumerate(item.phase_2):
        first = number % len(POLICIES)
        turns = POLICIES[first:] + POLICIES[:first]
        results = {policy: _send(engine, prompt.segments, policy, remember=False) for policy in turns}
        outcomes.append(Outcomes(prompt.question.answer, results))
    return outcomes


def _send(engine: Engine, segments: Sequence[str], policy: str, *, remember: bool) -> Result:
    parts = [Segment(f"{segment}\n") for segment in segments[:-1]]
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    [result] = engine.generate([Request([*parts, segments[-1]], policy, sampling, remember=remember)])
    if result.error:
        raise RuntimeError(f"the engine gave up a prompt of the demo: {result.error}")
    return result


def _rows(prompts: Sequence[Outcomes]) -> tuple[PolicyRow, ...]:
    return tuple(_row(policy, prompts) for policy in POLICIES)


def _row(policy: str, prompts: Sequence[Outcomes]) -> PolicyRow:
    reports = [outcome.results[policy].report for outcome in prompts]
    full = [outcome.results["full"] for outcome in prompts]
    words = [_first_word(outcome.results[policy].text) for outcome in prompts]
    grafted = sum(report.grafted_tokens for report in reports)
    return PolicyRow(
        policy=policy,
        num_prompts=len(prompts),
        ttft_ms=1000 * median(report.ttft_s for report in reports),
        speedup=median(other.report.ttft_s / report.ttft_s for other, report in zip(full, reports, strict=True)),
        reused=grafted / sum(report.prompt_tokens for report in reports),
        recomputed=sum(report.recomputed_tokens for report in reports) / max(1, grafted),
        right=sum(word == outcome.answer for word, outcome in zip(words, prompts, strict=True)),
        same_as_full=sum(word == _first_word(other.text) for word, other in zip(words, full, strict=True)),
        fallbacks=sum(report.fallback is not None for report in reports),
    )


def _first_word(text: str) -> str:
    word = re.search(r"\w+", text)
    return word.group().casefold() if word else ""


def _summary(overall: Sequence[PolicyRow]) -> str:
    full, naive, sparsex = overall
    return (
        f"You saw {full.num_prompts} prompts whose text the model had read at other positions: sparsex reused "
        f"{sparsex.reused:.0%} of their tokens, recomputed {sparsex.recomputed:.0%} of those, gave the first token "
        f"{sparsex.speedup:.1f} times as fast as full recomputation (naive reuse: {naive.speedup:.1f} times) and "
        f"answered {sparsex.right} questions right, full recomputation {full.right}, naive reuse {naive.right}."
    )


def render(report: DemoReport) -> RenderableType:
    """The tables, under each the gap to full recomputation, and the closing sentence, for a rich console."""
    return Group(*(_table(table) for table in report.tables), Text(report.summary))


def _table(scenario: ScenarioTable) -> Table:
    table = Table(title=f"{scenario.name}: {scenario.description}", title_justify="left", caption_justify="left")
    table.add_column("policy")
    for name in ("TTFT ms", "speed-up", "reused", "recomputed", "right", "same as full"):
        table.add_column(name, justify="right")
    for row in scenario.rows:
        table.add_row(
            row.policy,
            f"{row.ttft_ms:.1f}",
            f"{row.speedup:.2f}",
            f"{row.reused:.1%}",
            f"{row.recomputed:.1%}",
            f"{row.right}/{row.num_prompts}",
            f"{row.same_as_full}/{row.num_prompts}",
        )
    full, *others = scenario.rows
    gaps = [f"{row.policy} {full.right - row.right:+d} of {row.num_prompts}" for row in others]
    fallbacks = [f"{row.policy} {row.fallbacks}" for row in others if row.fallbacks]
    table.caption = f"fewer right answers than full: {', '.join(gaps)}"
    if fallbacks:
        table.caption += f"; prompts that fell back to full: {', '.join(fallbacks)}"
    return table


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on `console`; gives the `on_progress` for `run_demo`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("demo", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
