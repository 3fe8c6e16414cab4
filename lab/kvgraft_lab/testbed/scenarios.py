"""Three applications in which a model reads known text again, at another position.

An item has two phases. The model first reads some prompts. Later prompts hold the same segments at
other positions, behind another instruction, and end in another question. The answers follow from
the later prompts alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

from kvgraft_lab.testbed.documents import Facts, Order, make_documents, make_glossary
from kvgraft_lab.testbed.tasks import Question, Task, read
from kvgraft_lab.testbed.vocabulary import COLOURS

Segments = tuple[str, ...]
FACTS = Facts(needle=12, variable=36, hop=10, glossary=10, coreference=16)
# tokens of the reused segments of one item
NUM_TOKENS = 1700
QUESTIONS_PER_READING = 2


@dataclass(frozen=True)
class Prompt:
    """Segments; the last one is the text of `question`."""

    segments: Segments
    question: Question


@dataclass(frozen=True)
class ScenarioItem:
    """Prompts that the model reads first (`phase_1`), and prompts with their segments that it
    answers (`phase_2`).
    """

    phase_1: tuple[Segments, ...]
    phase_2: tuple[Prompt, ...]


@dataclass(frozen=True)
class Scenario:
    """Items of one application. `description` is a phrase for a table."""

    name: str
    description: str
    items: tuple[ScenarioItem, ...]


def _rag(rng: Random) -> Iterator[ScenarioItem]:
    tasks: Iterator[Task] = cycle(
        ("needle", "variable", "coreference", "needle", "hop", "glossary")
    )
    while True:
        count = rng.randint(6, 10)
        before, *orders = (tuple(rng.sample(range(count), count)) for _ in range(3))
        glossaries, documents = _write(rng, orders)
        earlier, *later = (
            (glossary, *(documents[number] for number in order))
            for glossary, order in zip(glossaries, (before, *orders), strict=False)
        )
        earlier_question = rng.choice(read(earlier)).text
        yield ScenarioItem(
            ((*earlier, earlier_question),), _ask(rng, later, tasks, earlier_question)
        )


def _chat(rng: Random) -> Iterator[ScenarioItem]:
    tasks: Iterator[Task] = cycle(("needle", "glossary", "variable", "glossary"))
    while True:
        glossaries, turns = _write(rng, [tuple(range(rng.randint(12, 18)))])
        earlier, *later = ((glossary, *turns) for glossary in glossaries[:3])
        yield ScenarioItem((earlier,), _ask(rng, later, tasks))


def _agents(rng: Random) -> Iterator[ScenarioItem]:
    tasks: Iterator[Task] = cycle(("needle", "variable", "coreference", "hop"))
    while True:
        glossaries, (one, two) = _write(rng, [(0, 1), (1, 0)])
        judged = ((glossaries[2], one, two), (glossaries[3], two, one))
        yield ScenarioItem(((glossaries[0], one), (glossaries[1], two)), _ask(rng, judged, tasks))


def _write(rng: Random, orders: Sequence[Order]) -> tuple[Segments, Segments]:
    """Return four instructions of different lengths, and documents that can be read in `orders`."""
    colours = rng.sample(COLOURS, 8)
    glossaries = tuple(make_glossary(rng, colours, count) for count in rng.sample(range(4, 9), 4))
    return glossaries, make_documents(
        rng, FACTS, orders=orders, num_tokens=NUM_TOKENS, colours=colours
    )


def _ask(
    rng: Random, readings: Sequence[Segments], tasks: Iterator[Task], but: str = ""
) -> tuple[Prompt, ...]:
    """Return prompts of the next `tasks`, without the question `but`. Facts are in several segments
    if task and reading allow it.
    """
    asked: dict[str, Prompt] = {}
    for segments in readings:
        answerable = read(segments)
        for task in islice(tasks, QUESTIONS_PER_READING):
            new = [question for question in answerable if question.text not in {*asked, but}]
            fitting = [question for question in new if question.task == task]
            question = rng.choice(
                [question for question in fitting if question.crosses] or fitting or new
            )
            asked[question.text] = Prompt((*segments, question.text), question)
    return tuple(asked.values())


_SCENARIOS = (
    ("rag", "retrieved documents in another order, behind another instruction", _rag),
    ("chat", "a chat history replayed behind a new instruction", _chat),
    ("agents", "a judge reads what two agents wrote behind instructions of their own", _agents),
)


def make_scenarios(seed: int, num_items: int) -> tuple[Scenario, ...]:
    """Return the three scenarios with `num_items` items each. Equal arguments give equal scenarios.

    Raises:
        ValueError: `num_items` is below 1.
    """
    if num_items < 1:
        raise ValueError(f"num_items must be at least 1, got {num_items}")
    return tuple(
        Scenario(name, description, tuple(islice(make(Random(f"{name} {seed}")), num_items)))  # noqa: S311
        for name, description, make in _SCENARIOS
    )
