"""Evaluation of flows in stages: retrieval first, and more tasks for flows that pass it.

The prompt's text is prefilled densely, but its question is decoded token by token under the flow,
like the answer. Otherwise most information for a short answer would be known before the flow runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import mean

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import SamplingParams
from kvgraft.flows import DENSE, parse_flow
from kvgraft_lab.evaluate.jsonl import read_lines
from kvgraft_lab.evaluate.metrics import SCORES
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.tasks import GENERATED, Ask, Item, Shape

ROWS = "flows.jsonl"


@dataclass(frozen=True)
class FlowStage:
    """Tasks that a flow must pass before the next stage.

    Attributes:
        name: name of the stage.
        tasks: tasks of each suite.
        items: texts of each task, with up to four questions.
        passes: share of dense attention's score that a flow needs to pass.
    """

    name: str
    tasks: Mapping[str, tuple[str, ...]]
    items: int
    passes: float = 0.0

    def texts(self, seed: int, length: int) -> Iterator[tuple[str, Item]]:
        """Yield items with their tasks. Equal arguments give equal items."""
        shape = Shape(length, patterns=("alone",))
        for suite, tasks in self.tasks.items():
            for item in GENERATED[suite].items(seed, self.items, shape):
                if item.phase_2 and item.phase_2[0].task in tasks:
                    yield f"{suite}/{item.phase_2[0].task}", item


STAGES = (
    FlowStage("retrieval", {"ruler": ("needles",), "multidoc": ("distractors",)}, 2, 0.75),
    FlowStage("reasoning", {"ruler": ("variable",), "multihop": ("hop", "hop_reversed"),
    "multidoc": ("chain",)}, 2, 0.5),
    FlowStage("all", {"ruler": ("common", "frequent"), "chat": ("coreference", "needle",
    "glossary"),
                  "agents": ("judge", "react"), "stress": ("poll", "chain")}, 2),
)  # fmt: skip


class FlowRow(msgspec.Struct, frozen=True):
    """One answer."""

    stage: str
    task: str
    text: int
    number: int
    flow: str
    score: float
    answer: str


class FlowScore(msgspec.Struct, frozen=True):
    """Scores of one flow, as shares of 1. `of_dense` compares with dense attention on the same
    questions.

    Attributes:
        low, high: 95 % bootstrap interval of the score, drawn by text; None for a single text.
        passed: stages with answers; the flow may have failed the last one.
        tokens_per_s, faster: speed of decode steps of one sequence, see `decoding.speedups`; 0 if
            not measured.
    """

    flow: str
    score: float
    low: float | None
    high: float | None
    of_dense: float
    stages: dict[str, float]
    tasks: dict[str, float]
    passed: tuple[str, ...]
    tokens_per_s: float = 0.0
    faster: float = 0.0


def evaluate(
    engine: Engine,
    flows: Sequence[str],
    out: Path,
    *,
    seed: int = 1000,
    length: int = 4096,
    stages: Sequence[FlowStage] = STAGES,
    scale: int = 1,
    on_progress: OnProgress | None = None,
) -> list[FlowRow]:
    """Run all flows through the stages. `dense` runs first, through all of them. Answers in `out`
    are not computed again.

    Args:
        scale: factor of the number of texts in each stage.

    Raises:
        ValueError: an invalid flow; nothing is asked then.
    """
    for flow in flows:
        found = parse_flow(flow)
        if found is not None:
            engine.scheduler.flows.program(found)

    out.mkdir(parents=True, exist_ok=True)
    rows = {
        (row.stage, row.text, row.number, row.flow): row for row in read_lines(out / ROWS, FlowRow)
    }
    left = [DENSE, *(flow for flow in dict.fromkeys(flows) if flow != DENSE)]

    with (out / ROWS).open("ab") as file:
        for place, stage in enumerate(stages):
            wanted = FlowStage(stage.name, stage.tasks, stage.items * scale, stage.passes)
            texts = list(wanted.texts(seed, length))
            for text, (task, item) in enumerate(texts):
                for row in _answers(engine, stage.name, task, text, item, left, rows):
                    rows[row.stage, row.text, row.number, row.flow] = row
                    file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                if on_progress is not None:
                    on_progress(place * 1000 + 1000 * (text + 1) // len(texts), 1000 * len(stages))
            scores = _scores(row for row in rows.values() if row.stage == stage.name)
            left = [
                flow
                for flow in left
                if flow == DENSE or scores[flow] >= stage.passes * scores[DENSE]
            ]

    return [row for row in rows.values() if row.flow in {DENSE, *flows}]


def _answers(
    engine: Engine,
    stage: str,
    task: str,
    text: int,
    item: Item,
    flows: Sequence[str],
    known: Mapping[tuple[str, int, int, str], FlowRow],
) -> Iterator[FlowRow]:
    """Yield the missing answers. The first flow prefills the text, and the others reuse it."""
    engine.clear_cache()
    for number, ask in enumerate(item.phase_2):
        for flow in flows:
            if (stage, text, number, flow) in known:
                continue
            answer = _answer(engine, ask, flow)
            yield FlowRow(
                stage, task, text, number, flow, SCORES[ask.metric](answer, ask.answers), answer
            )


def _answer(engine: Engine, ask: Ask, flow: str) -> str:
    """Answer a question under a flow.

    Pages are shared if the flow allows it, and copied otherwise. They are exact, because the text
    was prefilled densely.
    """
    *parts, question = as_parts(ask.segments, ())
    given = engine.encode(str(question))  # decoded under the flow
    sampling = SamplingParams(max_tokens=len(given) + ask.max_tokens)
    [result] = engine.generate([Request(parts, "naive", sampling, flow=flow, forced_output=given)])
    if result.error:
        raise ValueError(f"the engine cannot answer a prompt: {result.error}")
    return str(engine.tokenizer.decode(result.token_ids[len(given) :], skip_special_tokens=True))


def _scores(rows: Iterable[FlowRow]) -> dict[str, float]:
    by_flow: dict[str, list[float]] = {}
    for row in rows:
        by_flow.setdefault(row.flow, []).append(row.score)
    return {flow: mean(scores) for flow, scores in by_flow.items()}


def summarise(
    rows: Sequence[FlowRow], speed: Mapping[str, tuple[float, float]] | None = None
) -> list[FlowScore]:
    """Return one score per flow, best first: by the number of stages, then by score."""
    dense = {(row.stage, row.text, row.number): row.score for row in rows if row.flow == DENSE}
    found = []

    for flow in dict.fromkeys(row.flow for row in rows):
        own = [row for row in rows if row.flow == flow]
        score = mean(row.score for row in own)
        low, high = bootstrap([row.score for row in own], [(row.stage, row.text) for row in own])
        truth = mean(dense[row.stage, row.text, row.number] for row in own)
        by_stage, by_task = (
            {
                name: mean(row.score for row in own if getattr(row, key) == name)
                for name in dict.fromkeys(names)
            }
            for key, names in (
                ("stage", [row.stage for row in own]),
                ("task", [row.task for row in own]),
            )
        )
        rates = (speed or {}).get(flow, (0.0, 0.0))
        of_dense = score / max(truth, 1e-9)
        least, most = (None, None) if isnan(low) else (low, high)
        found.append(
            FlowScore(
                flow, score, least, most, of_dense, by_stage, by_task, tuple(by_stage), *rates
            )
        )

    return sorted(found, key=lambda one: (-len(one.passed), -one.score, one.flow))


def frontier(found: Sequence[FlowScore]) -> list[FlowScore]:
    """Return the flows that no other flow beats in both score (in all stages) and speed, fastest
    first.
    """
    whole = [one for one in found if len(one.passed) == max(len(other.passed) for other in found)]
    return sorted(
        (
            one
            for one in whole
            if not any(
                other.score >= one.score and other.faster >= one.faster and other != one
                for other in whole
            )
        ),
        key=lambda one: -one.faster,
    )  # fmt: skip


def as_json(found: Sequence[FlowScore]) -> str:
    """Return the scores as JSON."""
    return msgspec.json.format(msgspec.json.encode(list(found)), indent=2).decode() + "\n"


def render(found: Sequence[FlowScore]) -> RenderableType:
    """Return a line for each flow. Flows of the frontier are marked."""
    stages = list(dict.fromkeys(name for one in found for name in one.stages))
    table = Table()
    table.add_column("flow", overflow="fold", min_width=14)
    for name in ("score", "95 %", *stages, "faster"):
        table.add_column(name, justify="right", no_wrap=True)

    best = frontier(found)

    for one in found:
        by_stage = [f"{one.stages[name]:.3f}" if name in one.stages else "-" for name in stages]
        table.add_row(
            one.flow + " *" * (one in best), f"{one.score:.3f}",
            "-" if one.low is None else f"{one.low:.2f}-{one.high:.2f}", *by_stage,
            f"{one.faster:.2f}x" if one.faster else "-",
        )  # fmt: skip

    legend = (
        "score: mean of the stages that the flow has reached; *: no other flow is both better and "
        "faster"
    )
    return Group(table, Text(legend))
