"""Sessions without an end: what is computed in each turn, and what answers are worth, over forty
turns.

    python -m research.endless                                   the bundled model: scores and KL
    python -m research.endless --model DIR --sessions 2          any other model: KL over real text

Six shapes, by what happens to the history: the oldest group of a turn is dropped at a budget
(`dropping`) or goes into a summary (`summary`), a clock stands in front of everything (`clock`),
what a model thought is left out of later prompts (`thinking`), tools come in another order
(`tools`), documents of a window do (`window`). A group is a document, a question and its answer.
Nothing is frozen, and the idle refresh is off as in a server by default, but for the condition that
names it."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Literal, get_args

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.stats import theilslopes
from torch import Tensor

from kvgraft import Engine
from kvgraft.cli.progress import progress_bar
from kvgraft.guard.distances import first_token
from kvgraft_lab.evaluate.metrics import contains_all
from kvgraft_lab.evaluate.plots import COLOURS, STYLE, save
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.documents import make_documents
from kvgraft_lab.testbed.tasks import read
from kvgraft_lab.testbed.vocabulary import NUMBERS
from research.conversations import DEEP, FACTS, Condition, Turn, answers, ask

Shape = Literal["dropping", "summary", "clock", "thinking", "tools", "window"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
TURNS = 40
EARLY, LATE = range(4, 10), range(10, TURNS + 1)  # turns that are compared
MOST_MEAN, MOST_TURN = 1.15, 2.0  # what late turns may compute, of the mean of early ones
WINDOW = 6  # groups of a prompt that drops them, or documents of a window
GROUPS, SUMMARISED = 10, 5  # groups at which so many of the oldest ones are summarised
# of a document of the testbed: where prompts stay short, and where they grow
WORDS = {"long": 90, "short": 45}
CHARACTERS = {"long": 700, "short": 260}  # of one of real text
GROWING: tuple[Shape, ...] = ("clock", "thinking", "tools")
NUM_TOOLS = 6
MOST_ATTEMPTS = 50  # to write documents of which the first one can be asked about
NOISE = "order noise"
REFRESHED = "any depth, read anew 5 %"
ALONE = "read alone"  # each new text was read on its own before: what grafts of depth 1 are worth

CONDITIONS: Mapping[str, Condition] = {
    "default": Condition("spread"),
    "depth 4": Condition("spread", {"max_depth": 4}),
    "depth 16": Condition("spread", {"max_depth": 16}),
    "any depth": Condition("spread", {"max_depth": DEEP}),
    ALONE: Condition("spread", {"max_depth": 0}),
    REFRESHED: Condition("spread", {"max_depth": DEEP}, 0.05),
    "any depth, recompute 5 %": Condition("spread:recompute_share=0.05", {"max_depth": DEEP}),
    "any depth, naive": Condition("naive", {"max_depth": DEEP}),
    NOISE: Condition("full"),
}


@dataclass(frozen=True)
class Row:
    """One prompt under one condition; `score` is None where no answer is known. `computed` is a
    share of its tokens, what was read anew after its answer included."""

    shape: Shape
    session: int
    turn: int
    condition: str
    score: float | None
    kl: float
    depth: int
    tokens: int
    computed: float


def session(
    shape: Shape, rng: Random, documents: Sequence[str], *, testbed: bool
) -> Iterator[Turn]:
    """The turns of one session, each of which brings the next document."""
    tools: list[str] = []
    groups: list[tuple[str, str]] = []
    summary = thought = ""
    documents, given = documents[NUM_TOOLS:], documents[:NUM_TOOLS]
    if shape == "tools":
        tools = [f"tool {number} : {text}" for number, text in enumerate(given)]
    for turn in range(TURNS):
        front = ["instruction : read this ."]
        if shape == "clock":
            front = [f"instruction : it is {NUMBERS[turn]} ."]
        if shape == "tools":
            front += rng.sample(tools, len(tools))
        if shape in ("dropping", "window"):
            groups = groups[1 - WINDOW :]
        if shape == "summary" and len(groups) >= GROUPS:
            old, groups = groups[:SUMMARISED], groups[SUMMARISED:]
            summary = " ".join(["so far :", *(" ".join(text.split()[:12]) for text, _ in old)])
        if shape == "window":
            shown = [*(text for text, _ in rng.sample(groups, len(groups))), documents[turn]]
        else:
            shown = [text for text, said in groups for text in (text, said)]
            shown += [*([thought] if shape == "thinking" and thought else []), documents[turn]]
        base = [*front, *([summary] if summary else []), *shown]
        question, answer = ask(rng, base, testbed=testbed)
        yield Turn((*base, question), answer)
        groups.append((documents[turn], f"{question} {answer or 'it is said above .'}"))
        thought = "let me see : " + " ".join(documents[turn].split()[-30:])


def in_another_order(turn: Turn, rng: Random) -> Turn:
    """The same prompt with its texts, but for the first and the question, in another order."""
    first, *texts, question = turn.segments
    return Turn((first, *rng.sample(texts, len(texts)), question), turn.answer)


def pieces(characters: int) -> list[str]:
    """Texts of so many characters of Python's documentation."""
    texts = (" ".join(text.split()) for _, text in sorted(topics.items()))
    return [
        text[at : at + characters]
        for text in texts
        for at in range(0, len(text) - characters, characters)
    ]


def make_sessions(
    shapes: Sequence[Shape], count: int, seed: int, *, testbed: bool
) -> Iterator[tuple[Shape, int, list[Turn]]]:
    """(shape, number, turns); `count` of each shape."""
    for number, shape in product(range(count), shapes):
        for attempt in range(MOST_ATTEMPTS):
            rng = Random(f"{shape} {seed} {number} {attempt}")  # noqa: S311
            total, size = NUM_TOOLS + TURNS, "short" if shape in GROWING else "long"
            if testbed:
                num_tokens, orders = total * WORDS[size], [tuple(range(total))]
                written = make_documents(rng, FACTS, orders=orders, num_tokens=num_tokens)
                documents = list(written)
            else:
                documents = rng.sample(pieces(CHARACTERS[size]), total)
            if not testbed or read(documents[NUM_TOOLS : NUM_TOOLS + 1]):
                break  # the first turn has something to ask for
        yield shape, number, list(session(shape, rng, documents, testbed=testbed))


def run(
    model: Path,
    sessions: Sequence[tuple[Shape, int, list[Turn]]],
    conditions: Sequence[str],
    dtype: str,
) -> Iterator[list[Row]]:
    """The rows of one session after another: all conditions over the same prompts, each on an
    engine of its own."""
    names = ("full", *conditions)
    engines = {name: Engine(model, dtype=dtype, **condition(name).engine) for name in names}
    with progress_bar(Console(stderr=True), "sessions") as on_progress:
        for place, (shape, number, turns) in enumerate(sessions):
            truth: list[Tensor] = []
            rows: list[Row] = []
            for done, name in enumerate(names, place * len(names) + 1):
                rng = Random(f"{shape} {number}")  # noqa: S311
                asked = [in_another_order(turn, rng) for turn in turns] if name == NOISE else turns
                known = [turn.segments[-2] for turn in turns] if name == ALONE else []
                answered = answers(engines[name], condition(name), known, asked)
                for turn, (text, logits, report, num_read) in enumerate(answered, 1):
                    truth += [logits] if name == "full" else []
                    answer = turns[turn - 1].answer
                    score = None if answer is None else contains_all(text, answer.split())
                    kl, total = first_token(logits, truth[turn - 1])["kl"], report.prompt_tokens
                    share = report.computed_share + num_read / total
                    rows.append(
                        Row(shape, number, turn, name, score, kl, report.depth, total, share)
                    )
                on_progress(done, len(sessions) * len(names))
            yield rows


def condition(name: str) -> Condition:
    """The one of that name; `full` is no condition that can be chosen, since all are compared with
    it."""
    return CONDITIONS.get(name, Condition("full"))


def by_turn(rows: Sequence[Row], of: str, turns: Sequence[int]) -> list[float]:
    """Means over sessions."""
    return [
        float(np.mean([getattr(row, of) for row in rows if row.turn == turn])) for turn in turns
    ]


def trend(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Change of the KL in ten turns, from the fourth on: Sen's slope of the means by turn, with its
    95 % interval."""
    turns = range(EARLY.start, TURNS + 1)
    slope, _, low, high = theilslopes(by_turn(rows, "kl", turns), turns)
    return 10 * float(slope), 10 * float(low), 10 * float(high)


def table(rows: Sequence[Row], shape: Shape) -> Table:
    """What is computed, and the score and KL of answers, in early and late turns. Condition by
    condition. The unit of KL is the mean of order noise, if that was measured."""
    noise = [
        row.kl
        for row in rows
        if (row.shape, row.condition) == (shape, NOISE) and row.turn >= EARLY.start
    ]
    unit = float(np.mean(noise)) if noise else 1.0
    found = Table(
        title=f"{shape}, order noise {unit:.3f} nats" if noise else shape, box=box.MARKDOWN
    )
    columns = ("condition", "tokens", "computed, early", "late", "late / early",
    "most of a turn / early", "level",
               "right, early", "late", "KL, early", "late", "KL in ten turns (95 %)",
               "depth")  # fmt: skip
    for name in columns:
        found.add_column(name, justify="left" if name == "condition" else "right")
    for condition in dict.fromkeys(row.condition for row in rows):
        mine = [row for row in rows if (row.shape, row.condition) == (shape, condition)]
        early, late = (by_turn(mine, "computed", turns) for turns in (EARLY, LATE))
        share, most = np.mean(late) / np.mean(early), max(late) / np.mean(early)
        right = ["-", "-"]
        if mine[0].score is not None:
            right = [f"{np.mean(by_turn(mine, 'score', turns)):.3f}" for turns in (EARLY, LATE)]
        slope, low, high = trend(mine)
        found.add_row(
            condition, f"{np.mean([row.tokens for row in mine]):.0f}", f"{np.mean(early):.3f}",
            f"{np.mean(late):.3f}",
            f"{share:.2f}", f"{most:.2f}",
            "yes" if share <= MOST_MEAN and most <= MOST_TURN else "NO", *right,
            *(f"{np.mean(by_turn(mine, 'kl', turns)) / unit:.3f}" for turns in (EARLY, LATE)),
            f"{slope / unit:+.3f} ({low / unit:+.3f} to {high / unit:+.3f})",
            f"{np.mean([row.depth for row in mine]):.1f}",
        )  # fmt: skip
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Computed share and KL by turn, a line for each condition."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(shapes), figsize=(2.7 * len(shapes) + 1, 5.6), sharex=True, squeeze=False
        )
        for column, shape in zip(axes.T, shapes, strict=True):
            for number, condition in enumerate(
                dict.fromkeys(row.condition for row in rows if row.condition != "full")
            ):
                mine = [row for row in rows if (row.shape, row.condition) == (shape, condition)]
                turns = range(1, TURNS + 1)
                for axis, of in zip(column, ("computed", "kl"), strict=True):
                    axis.plot(
                        turns,
                        by_turn(mine, of, turns),
                        color=COLOURS[number % len(COLOURS)],
                        label=condition,
                    )
            column[0].set_title(shape)
            column[0].set_ylim(0, 1)
            column[1].set_xlabel("turn")
        axes[0, 0].set_ylabel("computed share")
        axes[1, 0].set_ylabel("KL to full, nats")
        axes[0, -1].legend(fontsize=7)
        save(figure, path)


def main() -> None:
    """Measure the sessions that `rows.jsonl` does not have yet, and write tables and a picture of
    all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sessions", type=int, default=4, help="of each shape")
    parser.add_argument("--seed", type=int, default=3500)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="by commas")
    parser.add_argument("--conditions", default=";".join(CONDITIONS), help="by semicolons")
    parser.add_argument("--out", type=Path, default=Path("results/endless"))
    arguments = parser.parse_args()
    shapes, conditions = arguments.shapes.split(","), arguments.conditions.split(";")
    for names, known in ((shapes, SHAPES), (conditions, tuple(CONDITIONS))):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown {unknown}: choose from {', '.join(known)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "rows.jsonl"
    rows = (
        [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    )
    done = {(row.shape, row.session) for row in rows}
    made = make_sessions(
        shapes, arguments.sessions, arguments.seed, testbed=arguments.model == MODEL_DIR
    )
    missing = [one for one in made if one[:2] not in done]
    for found in run(arguments.model, missing, conditions, arguments.dtype) if missing else ():
        rows += found
        with path.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    console = Console(width=200, record=True)
    for shape in shapes:
        console.print(table(rows, shape))
    (arguments.out / "tables.md").write_text(console.export_text())
    draw(rows, arguments.out / "turns.png")


if __name__ == "__main__":
    main()
