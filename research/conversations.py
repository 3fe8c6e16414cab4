"""Answers along conversations: score and KL to full recomputation by turn and by depth.

    python -m research.conversations                             the bundled model: scores and KL
    python -m research.conversations --model DIR --sessions 6    any other model: KL over real text

Two kinds of conversation of twelve turns. `growing`: each turn brings a new document and two
earlier ones again, and a question; all of it stays. `moving`: each prompt holds a new document
somewhere among the last ones, in new order, and a question. A condition is a policy, how the engine
reuses, and how much it reads anew between turns; all of them answer the same prompts."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any, Literal, get_args

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.core.refresh import Allowance
from kvgraft.guard.distances import first_token
from kvgraft_lab.evaluate.metrics import contains_all
from kvgraft_lab.evaluate.plots import COLOURS, STYLE, save
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.statistics import bootstrap, paired_difference
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.documents import Facts, make_documents
from kvgraft_lab.testbed.tasks import read

Kind = Literal["growing", "moving"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TURNS = 12
AGAIN = 2  # earlier documents of a growing conversation's turn
WINDOW = 8  # documents of a moving conversation's prompt
WORDS = 90  # of a document of the testbed
CHARACTERS = 700  # of one of real text
FACTS = Facts(needle=24, variable=48, hop=24)
SEED = 3000
PLAIN = "depth 4"  # the condition that reading anew is compared with
DEEP = 99  # a depth that nothing reaches


@dataclass(frozen=True)
class Condition:
    """`refresh`: tokens that are read anew between turns, at most this share of those of the
    prompts so far."""

    policy: str
    engine: dict[str, Any] = field(default_factory=dict)
    refresh: float = 0.0


CONDITIONS: Mapping[str, Condition] = {
    "depth 0": Condition("transitive", {"max_depth": 0}),
    "depth 1": Condition("transitive", {"max_depth": 1}),
    "depth 2": Condition("transitive", {"max_depth": 2}),
    PLAIN: Condition("transitive", {"max_depth": 4}),
    "depth 4, read anew 5 %": Condition("transitive", {"max_depth": 4}, 0.05),
    "depth 4, read anew": Condition("transitive", {"max_depth": 4}, 1.0),
    "any depth": Condition("transitive", {"max_depth": DEEP}),
    "any depth, grafted anew": Condition("transitive", {"continuation": False, "max_depth": DEEP}),
    "depth 4, spread": Condition("spread", {"max_depth": 4}),
    "any depth, naive": Condition("naive", {"max_depth": DEEP}),
}


@dataclass(frozen=True)
class Turn:
    """A prompt as texts, the last of which is the question, and its answer if that is known."""

    segments: tuple[str, ...]
    answer: str | None


@dataclass(frozen=True)
class TurnRow:
    """One prompt under one condition; `score` is None where no answer is known, shares are of its
    tokens. `read_anew` is what was read after its answer."""

    kind: str
    session: int
    turn: int
    condition: str
    score: float | None
    kl: float
    depth: int
    prefix: float
    continued: float
    grafted: float
    computed: float
    read_anew: float


def conversation(
    kind: Kind, rng: Random, documents: Sequence[str], questions: bool
) -> Iterator[Turn]:
    """The turns of one conversation over these documents, of which the first are known to begin
    with."""
    history: list[str] = ["instruction : read this ."]
    known = len(documents) - TURNS
    window = list(documents[:known])[-WINDOW:]
    for turn in range(TURNS):
        new = documents[known + turn]
        if kind == "growing":
            history += rng.sample([new, *rng.sample(documents[: known + turn], AGAIN)], 1 + AGAIN)
            base = history
        else:
            window = [*window, new][-WINDOW:]
            base = [history[0], *rng.sample(window, len(window))]
        asked = ask(rng, base, testbed=questions)
        yield Turn((*base, asked[0]), asked[1])
        history += [asked[0] + " " + (asked[1] or "it is said above .")]


def ask(rng: Random, base: Sequence[str], *, testbed: bool) -> tuple[str, str | None]:
    """A question about these texts, and its answer if it is known: about facts of the testbed."""
    return _question(rng, base) if testbed else _real_question(rng, base)


def _question(rng: Random, base: Sequence[str]) -> tuple[str, str | None]:
    """Every other one takes facts of several texts, if there are any such."""
    known = read(base)
    crossing = [question for question in known if question.crosses]
    found = rng.choice(crossing if crossing and rng.random() < 0.5 else known)
    return found.text, found.answer


def _real_question(rng: Random, base: Sequence[str]) -> tuple[str, str | None]:
    words = rng.choice(base[1:]).split()
    start = rng.randrange(max(1, len(words) - 8))
    return (
        f'Question: explain what is meant by "{" ".join(words[start : start + 8])}". Answer:',
        None,
    )


def make_sessions(
    count: int, seed: int, *, testbed: bool
) -> list[tuple[Kind, int, list[str], list[Turn]]]:
    """(kind, number, the documents that are known at first, turns); as many of each kind."""
    made = []
    for kind, number in product(KINDS, range(count)):
        rng = Random(f"{kind} {seed} {number}")  # noqa: S311
        total = WINDOW + TURNS
        if testbed:
            written = make_documents(
                rng, FACTS, orders=[tuple(range(total))], num_tokens=total * WORDS
            )
            documents = list(written)
        else:
            texts = rng.sample(
                [text for text in sorted(topics.values()) if len(text) > 2 * CHARACTERS], total
            )
            documents = [" ".join(text[CHARACTERS : 2 * CHARACTERS].split()) for text in texts]
        turns = list(conversation(kind, rng, documents, testbed))
        made.append((kind, number, documents[:WINDOW], turns))
    return made


def answers(
    engine: Engine, condition: Condition, known: Sequence[str], turns: Iterable[Turn]
) -> Iterator[tuple[str, Tensor, Any, int]]:
    """Text, first logits and report of every turn of a conversation, whose first documents are read
    alone before, and the tokens that were read anew after it."""
    engine.clear_cache()
    allowance = Allowance(condition.refresh)
    for text in known:
        engine.generate(
            [Request(as_parts(("instruction :", text, "")), "full", SamplingParams(max_tokens=1))]
        )
    for turn in turns:
        most = len((turn.answer or "").split()) or 1
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        request = Request(
            as_parts(turn.segments, ()), condition.policy, sampling, return_logits=True
        )
        [result] = engine.generate([request])
        if result.first_logits is None:
            raise RuntimeError(result.error)
        allowance.num_brought += result.report.prompt_tokens
        num_read = engine.idle_refresh(max(allowance.left, 0))
        allowance.num_read += num_read
        yield result.text, result.first_logits, result.report, num_read


def run(model: Path, count: int, seed: int, conditions: Sequence[str]) -> list[TurnRow]:
    """All conditions over the same prompts, each on an engine of its own."""
    sessions, rows = make_sessions(count, seed, testbed=model == MODEL_DIR), []
    truth: dict[tuple[str, int, int], Tensor] = {}
    with progress_bar(Console(stderr=True), "conversations") as on_progress:
        for place, name in enumerate(("full", *conditions)):
            condition = CONDITIONS.get(name, Condition("full"))
            engine = Engine(model, dtype="float32", **condition.engine)
            for at, (kind, number, known, turns) in enumerate(sessions):
                answered = answers(engine, condition, known, turns)
                for turn, (text, logits, report, num_read) in enumerate(answered, 1):
                    expected = truth.setdefault((kind, number, turn), logits)
                    answer = turns[turn - 1].answer
                    score = None if answer is None else contains_all(text, answer.split())
                    kl, total = first_token(logits, expected)["kl"], report.prompt_tokens
                    rows.append(
                        TurnRow(
                            kind, number, turn, name, score, kl, report.depth,
                            report.prefix_tokens / total,
                            report.continued_tokens / total, report.grafted_tokens / total,
                            report.computed_share,
                            num_read / total,
                        )
                    )  # fmt: skip
                on_progress(place * len(sessions) + at + 1, (len(conditions) + 1) * len(sessions))
    return rows


def trend(rows: Sequence[TurnRow], of: str) -> tuple[float, float, float]:
    """Change a turn, the mean slope of conversations, with a 95 % interval."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.session].append((row.turn, getattr(row, of)))
    slopes = []
    for pairs in groups.values():
        turns, values = np.array(pairs, float).T
        slopes.append(float(np.polyfit(turns, values, 1)[0]))
    return float(np.mean(slopes)), *bootstrap(slopes)


def table(rows: Sequence[TurnRow], kind: str) -> Table:
    """Lines of a condition: score and KL by stretches of turns, their trend, what was reused, what
    was computed, the mean depth of what answers rest on, what was read anew."""
    found = Table(title=kind, box=box.MARKDOWN)
    columns = (
        "condition",
        "1-3",
        "4-6",
        "7-9",
        "10-12",
        "all (95 %)",
        "a turn (95 %)",
        "reused",
        "computed",
        "depth",
    )
    for name in (*columns, "read anew"):
        found.add_column(name, justify="left" if name == "condition" else "right")
    for condition in dict.fromkeys(row.condition for row in rows):
        mine = [row for row in rows if (row.kind, row.condition) == (kind, condition)]
        reused = [
            np.mean([getattr(row, name) for row in mine])
            for name in ("prefix", "continued", "grafted")
        ]
        means = [
            np.mean([getattr(row, name) for row in mine])
            for name in ("computed", "depth", "read_anew")
        ]
        for of in ("kl",) if rows[0].score is None else ("score", "kl"):
            values = [getattr(row, of) for row in mine]
            by_turn = np.array(values).reshape(-1, 4, TURNS // 4).mean((0, 2))
            low, high = bootstrap(values, [row.session for row in mine])
            slope, least, most = trend(mine, of)
            found.add_row(
                f"{condition}: {of}", *(f"{value:.3f}" for value in by_turn),
                f"{np.mean(values):.3f} ({low:.3f}-{high:.3f})",
                f"{slope:+.4f} ({least:+.4f} to {most:+.4f})",
                " + ".join(f"{share:.2f}" for share in reused),
                *(f"{value:.3f}" for value in means),
            )  # fmt: skip
    return found


def depth_table(rows: Sequence[TurnRow]) -> Table:
    """Score and KL by the depth of what an answer rests on, of the condition that knows no
    limit."""
    found = Table("depth", "prompts", "score", "KL", title="by depth (any depth)", box=box.MARKDOWN)
    mine = [row for row in rows if row.condition == "any depth"]
    for depth in sorted({row.depth for row in mine}):
        here = [row for row in mine if row.depth == depth]
        score = "-" if here[0].score is None else f"{np.mean([row.score for row in here]):.3f}"
        found.add_row(str(depth), str(len(here)), score, f"{np.mean([row.kl for row in here]):.3f}")
    return found


def refresh_table(rows: Sequence[TurnRow]) -> Table:
    """What reading anew changes, prompt by prompt, with intervals over conversations."""
    found = Table(
        "kind",
        "condition",
        "score",
        "KL",
        "computed",
        "depth",
        title=f"less {PLAIN}",
        box=box.MARKDOWN,
    )
    for kind, name in product(
        KINDS, (name for name, condition in CONDITIONS.items() if condition.refresh)
    ):
        mine, plain = (
            [row for row in rows if (row.kind, row.condition) == (kind, c)] for c in (name, PLAIN)
        )
        if not (mine and plain):
            continue
        cells = []
        for of in ("score", "kl", "computed", "depth"):
            ours, theirs = ([getattr(row, of) for row in side] for side in (mine, plain))
            if ours[0] is None:
                cells.append("-")
                continue
            difference = paired_difference(ours, theirs, [row.session for row in mine])
            cells.append(
                f"{difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"
            )
        found.add_row(kind, name, *cells)
    return found


def draw(rows: Sequence[TurnRow], path: Path) -> None:
    """Score or KL by turn, a line for each condition."""
    of = "kl" if rows[0].score is None else "score"
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(KINDS), figsize=(9.6, 3.8), sharey=True)
        for axis, kind in zip(axes, KINDS, strict=True):
            for number, condition in enumerate(dict.fromkeys(row.condition for row in rows)):
                mine = [row for row in rows if (row.kind, row.condition) == (kind, condition)]
                turns = range(1, TURNS + 1)
                means = [
                    np.mean([getattr(row, of) for row in mine if row.turn == turn])
                    for turn in turns
                ]
                axis.plot(
                    turns,
                    means,
                    marker="o",
                    markersize=3,
                    color=COLOURS[number % len(COLOURS)],
                    label=condition,
                )
            axis.set_title(kind)
            axis.set_xlabel("turn")
        axes[0].set_ylabel("KL to full, nats" if of == "kl" else of)
        axes[-1].legend(fontsize=7)
        save(figure, path)


def main() -> None:
    """Measure, and write rows, tables and a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--sessions", type=int, default=24, help="of each kind")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--conditions", default=";".join(CONDITIONS), help="by semicolons")
    parser.add_argument("--out", type=Path, default=Path("results/conversations"))
    arguments = parser.parse_args()
    conditions = [name.strip() for name in arguments.conditions.split(";")]
    if unknown := [name for name in conditions if name not in CONDITIONS]:
        parser.error(f"unknown conditions {unknown}: choose from {'; '.join(CONDITIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = run(arguments.model, arguments.sessions, arguments.seed, conditions)
    (arguments.out / "rows.jsonl").write_text(
        "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    )
    console = Console(width=190, record=True)
    for kind in KINDS:
        console.print(table(rows, kind))
    for extra in (depth_table(rows), refresh_table(rows)):
        if extra.row_count:
            console.print(extra)
    (arguments.out / "tables.md").write_text(console.export_text())
    draw(rows, arguments.out / "turns.png")


if __name__ == "__main__":
    main()
