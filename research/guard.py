"""How soon the guard finds damage, and how far its estimate is from the truth.

Many prompts are answered under a policy, and once more with KV that is damaged on purpose; every
answer is scored. Then streams of requests are drawn from these, of which the guard sees its share:

shift    keys stand one position further on than they should
values   values are those of text a segment further on
token    every source differs by one word from what it is taken for, somewhere
fact     likewise, by a word that stands in the answer (where one does)

# answers, scored: minutes to hours
python -m research.guard measure --model bundled --suite all --items 10
# what the guard makes of them: seconds
python -m research.guard streams --share 0.01 --target flips=0.05
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated, Any, ClassVar, cast

import msgspec
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.guard.breaker import Level
from kvgraft.guard.guard import MEASURES, Guard
from kvgraft.guard.native import score
from kvgraft.guard.target import Measure, Target, as_share
from kvgraft.models import find_model
from kvgraft.policies import DEFAULT_POLICY, parse_policy
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft_lab.evaluate.jsonl import check_config, read_lines
from kvgraft_lab.evaluate.prompts import as_parts, find_chat
from kvgraft_lab.evaluate.scoring import send
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.tasks import PATTERNS, Ask, Item, Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR

HEALTHY = "healthy"
DAMAGED_GRAFTS = ("shift", "values")
DAMAGES = (*DAMAGED_GRAFTS, "token", "fact")
ROWS, CONFIG = "rows.jsonl", "config.json"
SHORT = 32  # tokens of an answer
TRIES = 300  # words that are tried in the place of another
MEASURED = (  # of the streams of a condition
    "answers", "flips", "KL, at most 1 nat", "alarm raised", "after requests", "exact KV",
    "after requests",
    "flips: bias, covered", "KL: bias, covered",
)  # fmt: skip
_WORD = re.compile(r"\w+")

app = typer.Typer(add_completion=False)


class ScoredAnswer(msgspec.Struct, frozen=True):
    """One prompt under one condition; distances as `distances.along`, along the answer that was
    given."""

    suite: str
    pattern: str
    condition: str
    depth: int
    grafted_share: float
    distances: dict[str, float]


@dataclass(frozen=True)
class Damaged(Policy):
    """A policy whose host damages what it grafts."""

    name: ClassVar[str] = "damaged"

    policy: Policy
    how: str

    def recover(self, ctx: PrefillContext) -> Hidden:
        """As the policy, on damaged grafts."""
        return self.policy.recover(cast(PrefillContext, _Damaging(ctx, self.how)))


class _Damaging:
    """A host whose grafts are not what they should be; all else is another's."""

    def __init__(self, ctx: PrefillContext, how: str) -> None:
        self._ctx, self._how = ctx, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def graft(self, layers: range) -> None:
        """Graft, and damage."""
        self._ctx.graft(layers)
        where = self._ctx.plan.grafted
        one = torch.ones(int(where.sum()), dtype=torch.long)
        further = self._ctx.rotate_keys(one)
        for index in layers:
            keys, values = self._ctx.kv(index, where)
            if self._how == "shift":
                self._ctx.add(index, where, further(index, keys) - keys, torch.zeros_like(values))
            else:
                others = values.roll(-max(1, len(one) // 4), 0)
                self._ctx.add(index, where, torch.zeros_like(keys), others - values)


@dataclass(frozen=True)
class Case:
    """Prompts of an item under one condition, with texts that are read in place of others."""

    condition: str
    asks: tuple[Ask, ...]
    changed: Mapping[str, str] = field(default_factory=dict)


def cases(engine: Engine, item: Item, rng: Random) -> Iterator[Case]:
    """An item under every condition; those that share a reading follow each other."""
    texts, asks = sorted({text for read in item.phase_1 for text in read}), item.phase_2
    for condition in (HEALTHY, *DAMAGED_GRAFTS):
        yield Case(condition, asks)
    yield Case("token", asks, _with_other_words(engine, texts, rng))
    for ask in asks:
        answer = {word for text in ask.answers for word in _WORD.findall(text)}
        if facts := _with_other_words(engine, texts, rng, answer):
            yield Case("fact", (ask,), facts)


def answers(
    engine: Engine, item: Item, policy: Policy, seed: str, conditions: Collection[str]
) -> Iterator[ScoredAnswer]:
    """Those of an item's prompts that rest on grafts, under these conditions, scored."""
    chat = find_chat(engine.tokenizer) if item.chat else None
    one_token = SamplingParams(max_tokens=1, ignore_eos=True)
    for case in cases(engine, item, Random(seed)):  # noqa: S311
        if case.condition not in conditions:
            continue
        changed = case.changed
        if case.condition not in DAMAGED_GRAFTS:
            engine.clear_cache()
            for read in item.phase_1:
                send(
                    engine,
                    Request(
                        as_parts([changed.get(text, text) for text in read], chat=chat),
                        "full",
                        one_token,
                    ),
                )
        damaged = Damaged(policy, case.condition) if case.condition in DAMAGED_GRAFTS else policy
        known = {*changed.values(), *(text for read in item.phase_1 for text in read)}
        for ask in case.asks:
            asked, true = (
                Request(
                    as_parts([texts.get(part, part) for part in ask.segments], known, chat,
                    ask.begun), damaged,
                    SamplingParams(max_tokens=min(SHORT, ask.max_tokens)), remember=False,
                    return_logits=True,
                )
                for texts in (changed, {})
            )  # fmt: skip
            result = send(engine, asked)
            if (report := result.report).depth:
                grafted = report.grafted_tokens / report.prompt_tokens
                distances = score(engine, true, result)
                yield ScoredAnswer(
                    ask.task, item.pattern, case.condition, report.depth, grafted, distances
                )


def _with_other_words(
    engine: Engine, texts: Sequence[str], rng: Random, of: Collection[str] = ()
) -> dict[str, str]:
    """The texts, each with one word (`of` these, if there are any) replaced by another one of it,
    of as many tokens; without those of which none can be."""
    changed = {}
    for text in texts:
        spans = [match.span() for match in _WORD.finditer(text) if not of or match.group() in of]
        words, length = sorted(set(_WORD.findall(text))), len(engine.encode(text))
        for start, stop in rng.choices(spans, k=TRIES) if spans else ():
            other = text[:start] + rng.choice(words) + text[stop:]
            if other != text and len(engine.encode(other)) == length:
                changed[text] = other
                break
    return changed


@app.command()
def measure(
    model: Annotated[Path, typer.Option(help="Directory or name of a model.")] = MODEL_DIR,
    suite: Annotated[str, typer.Option(help="As of `kvgraft eval`.")] = "all",
    policy: str = DEFAULT_POLICY,
    items: Annotated[int, typer.Option(help="Texts of each task.")] = 8,
    length: int = 1024,
    segments: Annotated[
        int, typer.Option(help="Reused segments of a prompt.")
    ] = Shape.num_segments,
    patterns: Annotated[str, typer.Option(help="Ways of reuse, by commas.")] = ",".join(PATTERNS),
    seed: int = 5000,
    conditions: Annotated[
        str, typer.Option(help="By commas; the first one is healthy.")
    ] = ",".join((HEALTHY, *DAMAGES)),
    out: Path = Path("results/guard"),
) -> None:
    """Answer and score, under all conditions; go on where it was stopped."""
    engine = Engine(find_model(model, fetch=True), dtype="float32", continuation=False)
    shape = Shape(length, segments, tuple(patterns.split(",")))  # type: ignore[arg-type]
    made = [
        (one.name, number, replace(item, chat=one.real_text))
        for one in find_suites(suite)
        for number, item in enumerate(one.items(seed, items, shape))
    ]
    check_config(out / CONFIG, {"model": engine.config.identity, "suite": suite, "policy": policy,
    "items": items,
                                "length": length, "segments": segments, "patterns": patterns,
                                "seed": seed,
                                "conditions": conditions})  # fmt: skip
    done = len(read_lines(out / "done.jsonl", list[Any]))
    with (
        (out / ROWS).open("ab") as rows,
        (out / "done.jsonl").open("ab") as finished,
        progress_bar(Console(stderr=True), "scoring") as on_progress,
    ):
        for count, (name, number, item) in enumerate(made[done:], done + 1):
            for row in answers(
                engine, item, parse_policy(policy), f"{seed} {name} {number}", conditions.split(",")
            ):
                rows.write(msgspec.json.encode(row) + b"\n")
            rows.flush()
            finished.write(msgspec.json.encode([name, number]) + b"\n")
            finished.flush()
            on_progress(count, len(made))


@dataclass(frozen=True)
class Stream:
    """What became of one stream of requests.

    Attributes:
        alarm, exact: requests until the guard raised its first alarm, and until it gave exact KV;
            None: it did not.
        bounds: when it ended, mean, low and high of each measure.
    """

    alarm: int | None
    exact: int | None
    bounds: Mapping[Measure, Mapping[str, float]]

    def covers(self, measure: Measure, truth: float) -> bool:
        """Whether the truth lies between the bounds."""
        return self.bounds[measure]["low"] <= truth <= self.bounds[measure]["high"]


def stream(
    rows: Sequence[ScoredAnswer],
    share: float,
    target: Target | None,
    requests: int,
    seed: int,
    before: Sequence[ScoredAnswer] = (),
) -> Stream:
    """So many requests that are drawn from these answers, behind as many that are drawn from
    others, if there are some; as the guard sees them. It ends with exact KV. What is counted begins
    with the first one of these."""
    rng, policy = np.random.default_rng(seed), parse_policy(DEFAULT_POLICY)
    guard = Guard(share, target, default=policy, seed=seed)
    reached: dict[Level, int] = {}
    for number in range(1 - requests * bool(before), requests + 1):
        drawn_from = rows if number > 0 else before
        row, ticket = drawn_from[int(rng.integers(len(drawn_from)))], guard.admit(policy)
        reached.setdefault(ticket.level, number)
        if ticket.level is Level.EXACT:
            break
        if guard.chooses(ticket, row.depth, row.grafted_share):
            guard.add(ticket, "all", row.distances)
    found = guard.policy_view(ticket.name).get("as_asked", {})
    unknown = {"mean": 0.0, "low": 0.0, "high": 1.0}
    bounds = {measure: found.get(measure, unknown) for measure in MEASURES}
    alarm = min(
        (number for level, number in reached.items() if level is not Level.AS_ASKED), default=None
    )
    return Stream(alarm, reached.get(Level.EXACT), bounds)


@app.command()
def streams(
    results: Annotated[Path, typer.Option(help="Where `measure` has put its answers.")] = Path(
        "results/guard"
    ),
    share: Annotated[float, typer.Option(help="Of the answers, that are scored.")] = 0.01,
    target: str = "flips=0.02",
    requests: int = 5000,
    seeds: int = 20,
    later: Annotated[
        bool, typer.Option("--later", help="As many healthy requests come first.")
    ] = False,
) -> None:
    """Streams of requests of each condition: when the guard acts; and, without a target, what it
    estimates."""
    rows = read_lines(results / ROWS, ScoredAnswer)
    # every stream that is stopped would say so
    logging.getLogger("kvgraft").setLevel(logging.ERROR)
    columns: dict[str, list[str]] = {}
    for condition in (HEALTHY, *DAMAGES):
        if mine := [row for row in rows if row.condition == condition]:
            before = [row for row in rows if row.condition == HEALTHY] if later else []
            acted = [
                stream(mine, share, Target.parse(target), requests, seed, before)
                for seed in range(seeds)
            ]
            free = [stream(mine, share, None, requests, seed) for seed in range(seeds)]
            truth = {one: [as_share(one, row.distances) for row in mine] for one in MEASURES}
            columns[condition] = [
                str(len(mine)), *(_with_bounds(truth[one]) for one in MEASURES),
                *_reached([one.alarm for one in acted]), *_reached([one.exact for one in acted]),
                *(_against(free, one, mean(truth[one])) for one in MEASURES),
            ]  # fmt: skip

    table = Table(
        title=f"{seeds} streams of {requests:,} requests, {share:.1%} scored, {target}",
        title_justify="left",
    )
    table.add_column("condition")
    for condition in columns:
        table.add_column(condition, justify="right")
    for name, *cells in zip(MEASURED, *columns.values(), strict=True):
        table.add_row(name, *cells)
    Console().print(table)


def _with_bounds(values: Sequence[float]) -> str:
    return "{:.4f} ({:.4f}-{:.4f})".format(mean(values), *bootstrap(values))


def _reached(after: Sequence[int | None]) -> tuple[str, str]:
    """(in how many streams, median and greatest number of requests until then)."""
    found = [one for one in after if one is not None]
    return (
        f"{len(found)} of {len(after)}",
        f"{median(found):,.0f}, at most {max(found):,}" if found else "-",
    )


def _against(free: Sequence[Stream], measure: Measure, truth: float) -> str:
    bias = mean(one.bounds[measure]["mean"] for one in free) - truth
    return f"{bias:+.4f}, {sum(one.covers(measure, truth) for one in free)} of {len(free)}"


if __name__ == "__main__":
    app()
