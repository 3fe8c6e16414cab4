"""Demonstration of three applications, each under several policies, on the bundled model or another
one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.testbed.scenarios import ScenarioItem, make_scenarios

POLICIES = ("full", "naive", "sparsex", DEFAULT_POLICY)
# tokens of an answer: enough for its first word in a subword vocabulary
MAX_TOKENS = 4


@dataclass(frozen=True)
class _Outcome:
    """Right answer of one prompt, and the result of every policy."""

    answer: str
    results: Mapping[str, Result]


@dataclass(frozen=True)
class PolicyRow:
    """Result of one policy on `num_prompts` prompts.

    Attributes:
        ttft_ms: median time to the first token, in milliseconds.
        speedup: median over prompts of the time of `full` divided by the time of this policy.
        reused: grafted tokens as a share of the prompt tokens.
        recomputed: tokens recomputed in the last layer, as a share of the grafted tokens.
        work: computed (token, layer) pairs, as a share of those of full recomputation.
        right: answers whose first word is the expected one, in any case.
        same_as_full: answers whose first word is that of `full`.
        fallbacks: prompts with known grafts that were not used.
    """

    policy: str
    num_prompts: int
    ttft_ms: float
    speedup: float
    reused: float
    recomputed: float
    work: float
    right: int
    same_as_full: int
    fallbacks: int


@dataclass(frozen=True)
class ScenarioTable:
    """One row per policy, that of `full` first."""

    name: str
    description: str
    rows: tuple[PolicyRow, ...]


@dataclass(frozen=True)
class DemoReport:
    """All tables, the rows over all scenarios together, and a summary in one sentence."""

    setup: str
    tables: tuple[ScenarioTable, ...]
    overall: tuple[PolicyRow, ...]
    summary: str


def run_demo(
    engine: Engine,
    *,
    seed: int = 0,
    items: int = 8,
    policies: Sequence[str] = POLICIES,
    on_progress: OnProgress | None = None,
) -> DemoReport:
    """Run every scenario under every policy.

    Each item begins with an empty cache and a full prefill of the prompts of phase 1. The prompts
    of phase 2 store nothing, so all policies reuse the same pages. Policies take turns on each
    prompt.

    Args:
        engine: engine on the bundled model, or on another one, whose answers may be wrong.
        seed: seed of the scenarios.
        items: items of each scenario.
        policies: names with or without options; the first is `full`, the reference of the others.
        on_progress: called after each prompt of phase 2 with the number of finished and of all
            prompts.

    Raises:
        ValueError: `items` is below 1, `policies` does not begin with `full`, or the engine cannot
            serve a policy or a prompt (for example, too long for the model); the message says why.
    """
    if not policies or policies[0] != "full":
        raise ValueError(f"policies must begin with full, got {policies}")

    scenarios = make_scenarios(seed, items)
    next(_outcomes(engine, scenarios[0].items[0], policies))  # warm-up
    total = sum(len(item.phase_2) for scenario in scenarios for item in scenario.items)
    tables: list[ScenarioTable] = []
    outcomes: list[_Outcome] = []

    for scenario in scenarios:
        start = len(outcomes)
        for outcome in chain.from_iterable(
            _outcomes(engine, item, policies) for item in scenario.items
        ):
            outcomes.append(outcome)
            if on_progress is not None:
                on_progress(len(outcomes), total)
        tables.append(ScenarioTable(scenario.name, scenario.description, _rows(outcomes[start:])))

    overall = _rows(outcomes)
    setup = f"{_describe(engine)}, seed {seed}, {items} items a scenario"
    return DemoReport(setup, tuple(tables), overall, _summary(overall))


def _describe(engine: Engine) -> str:
    config, decoder = engine.config, engine.decoder
    return (
        f"{config.architecture}, {config.num_layers} layers, {decoder.dtype} on {decoder.device}, "
        f"{torch.get_num_threads()} threads"
    )


def _outcomes(engine: Engine, item: ScenarioItem, policies: Sequence[str]) -> Iterator[_Outcome]:
    engine.clear_cache()
    for segments in item.phase_1:
        _send(engine, segments, "full", remember=True)
    for number, prompt in enumerate(item.phase_2):
        first = number % len(policies)
        turns = (*policies[first:], *policies[:first])
        results = {
            policy: _send(engine, prompt.segments, policy, remember=False) for policy in turns
        }
        yield _Outcome(prompt.question.answer, {policy: results[policy] for policy in policies})


def _send(engine: Engine, segments: Sequence[str], policy: str, *, remember: bool) -> Result:
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    [result] = engine.generate([Request(as_parts(segments), policy, sampling, remember=remember)])
    if result.error:
        raise ValueError(f"the engine cannot answer a prompt of the demo: {result.error}")
    return result


def _rows(outcomes: Sequence[_Outcome]) -> tuple[PolicyRow, ...]:
    return tuple(_row(policy, outcomes) for policy in outcomes[0].results)


def _row(policy: str, outcomes: Sequence[_Outcome]) -> PolicyRow:
    pairs = [(outcome.results[policy], outcome.results["full"]) for outcome in outcomes]
    words = [_first_word(result.text) for result, _ in pairs]
    reports = [result.report for result, _ in pairs]
    grafted = sum(report.grafted_tokens for report in reports)
    return PolicyRow(
        policy=policy,
        num_prompts=len(outcomes),
        ttft_ms=1000 * median(report.ttft_s for report in reports),
        speedup=median(full.report.ttft_s / result.report.ttft_s for result, full in pairs),
        reused=grafted / sum(report.prompt_tokens for report in reports),
        recomputed=sum(report.recomputed_tokens for report in reports) / max(1, grafted),
        work=mean(report.computed_share for report in reports),
        right=sum(word == outcome.answer for word, outcome in zip(words, outcomes, strict=True)),
        same_as_full=sum(
            word == _first_word(full.text) for word, (_, full) in zip(words, pairs, strict=True)
        ),
        fallbacks=sum(report.fallback is not None for report in reports),
    )


def _first_word(text: str) -> str:
    word = re.search(r"\w+", text)
    return word.group().casefold() if word else ""


def _summary(overall: Sequence[PolicyRow]) -> str:
    full, *others = overall
    reuse = "; ".join(
        f"{row.policy} reused {row.reused:.0%} of their tokens, computed {row.recomputed:.0%} of "
        "those again, gave the "
        f"first token {row.speedup:.1f} times as fast, and answered {row.right} right"
        for row in others
    )
    return (
        f"You saw {full.num_prompts} prompts made of text that the model had read at other "
        "positions: full "
        f"recomputation answered {full.right} right; {reuse}."
    )


def render(report: DemoReport) -> RenderableType:
    """Return the tables, each with the gap to full recomputation, and the summary, for a rich
    console.
    """
    legend = (
        "reused: share of the prompt grafted; redone: share of that computed again in the last "
        "layer; "
        "work: tokens x layers computed; same: first word as under full."
    )
    notes = (Text(f"{report.setup}. {legend}", style="dim"), Text(report.summary))
    return Group(*(_table(table) for table in report.tables), *notes)


def _table(scenario: ScenarioTable) -> Table:
    table = Table(
        title=f"{scenario.name}: {scenario.description}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("policy", overflow="fold")
    for name in ("TTFT ms", "speed-up", "reused", "redone", "work", "right", "same"):
        table.add_column(name, justify="right")

    for row in scenario.rows:
        table.add_row(
            row.policy,
            f"{row.ttft_ms:.1f}",
            f"{row.speedup:.2f}",
            f"{row.reused:.1%}",
            f"{row.recomputed:.1%}",
            f"{row.work:.1%}",
            f"{row.right}/{row.num_prompts}",
            f"{row.same_as_full}/{row.num_prompts}",
        )

    full, *others = scenario.rows
    gaps = ", ".join(f"{row.policy} {row.right - full.right:+d}" for row in others)
    fallbacks = ", ".join(f"{row.policy} {row.fallbacks}" for row in others if row.fallbacks)
    table.caption = f"right answers against full: {gaps}"
    if fallbacks:
        table.caption += f"; prompts that fell back to full: {fallbacks}"

    return table
