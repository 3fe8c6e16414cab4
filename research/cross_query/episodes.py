"""Episodes: an agent's task, its tools, and the prompt of each step, given the answers to the steps
before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

from kvgraft.core.prompt import Part, Segment
from kvgraft_lab.testbed import tasks, vocabulary
from research.cross_query.pages import Page, edit, make_page
from research.cross_query.plans import PLANS, SHOWN, Draft, Step, TaskPlan
from research.cross_query.tools import BY_WORD, Tool, ToolError
from research.cross_query.variation import Variation
from research.cross_query.world import World, make_world

SUITES = tuple(PLANS)
NUM_TOOLS = 8  # in the preamble, of which some are not needed
_CALCULATIONS = 3  # of others, in the observation of a tool that computes
_CALCULATION_WORDS = 40


@dataclass(frozen=True)
class Observation:
    """What a tool says: passages, or one that says what is wrong."""

    passages: tuple[str, ...]
    error: bool = False


@dataclass(frozen=True)
class Prompt:
    """The prompt of one step.

    Attributes:
        action, observation: what the step has done before it asks.
        expected: the right answer by what the prompt says, or nothing where it says nothing.
    """

    parts: tuple[Part, ...]
    action: str
    observation: Observation
    expected: str


@dataclass(frozen=True)
class Episode:
    """One task of an agent; equal answers give equal prompts.

    Attributes:
        name: of suite, seed and number; all that is drawn is drawn from it.
        notes, user: what the preamble says.
    """

    name: str
    suite: str
    plan: TaskPlan
    world: World
    notes: Mapping[str, str]
    user: str
    variation: Variation

    def prompt(self, answers: Sequence[str]) -> Prompt:
        """The prompt of step `len(answers)`: preamble, task, scratchpad, question.

        Raises:
            ValueError: the plan has no such step.
        """
        number = len(answers)
        if number >= len(self.plan.steps):
            raise ValueError(f"the plan has {len(self.plan.steps)} steps, got {number} answers")
        rng = self._random(f"step {number}" if self.variation.relabel else "labels")
        taken = [
            (step.asks.format(*answers), *self._take(step, answers))
            for step in self.plan.steps[: number + 1]
        ]
        asks, action, observation = taken[-1]
        parts = self._preamble(number)
        for entry in taken if self.variation.order == "oldest" else taken[::-1]:
            parts += _render(rng, *entry)
        question = tasks.ask(asks)
        known = {found.text: found.answer for found in tasks.read([_text(parts)])}
        return Prompt((*parts, question), action, observation, known.get(question, ""))

    def _random(self, what: str) -> Random:
        return Random(f"{self.name} {what}")  # noqa: S311

    def _take(self, step: Step, answers: Sequence[str]) -> tuple[str, Observation]:
        """The action, its arguments filled in, and what it gives."""
        action = step.action.format(*answers)
        try:
            return action, Observation(self.call(action, step.variable))
        except ToolError as error:
            return action, Observation((str(error),), error=True)

    def call(self, action: str, variable: str = "") -> tuple[str, ...]:
        """The passages that a tool gives; a computed number is called `variable`.

        Raises:
            ToolError: no tool has this word, or it cannot take these arguments.
        """
        word, *arguments = action.split() or [""]
        tool = BY_WORD.get(word)
        if tool is None or tool.name not in SHOWN[self.suite]:
            raise ToolError(f"tool {word or '?'} : need a tool .")
        if tool.compute is None:
            return self._find(tool, arguments)
        try:
            line = f"{variable} = {tool.compute(arguments)} ."
        except ValueError as error:
            raise tool.refuse(arguments) from error
        return (self._log(variable, line),)

    def _find(self, tool: Tool, arguments: Sequence[str]) -> tuple[str, ...]:
        """The page of a key among those beside it in the book, in any order, with this episode's
        edits."""
        book = self.world.books[tool.name]
        if len(arguments) != 1 or arguments[0] not in book:
            raise tool.refuse(arguments)
        [key], keys, count = arguments, list(book), self.variation.num_passages
        rng, at = self._random(f"{tool.name} {key}"), keys.index(key)
        beside = {keys[(at + step) % len(keys)]: None for step in range(-count, count + 1)}
        found = [key, *rng.sample([other for other in beside if other != key], count - 1)]
        rng.shuffle(found)
        return tuple(self._edit(book[other], tool.name).text for other in found)

    def _edit(self, page: Page, book: str) -> Page:
        return edit(self._random(f"edit {book} {page.key}"), page, self.variation.edit_rate)

    def _log(self, variable: str, line: str) -> str:
        """A computed number among those that others have computed."""
        rng = self._random(f"log {variable}")
        others = rng.sample(
            [word for word in vocabulary.VARIABLES if word not in self.plan.variables],
            _CALCULATIONS,
        )
        lines = [f"{other} = {rng.choice(vocabulary.NUMBERS)} ." for other in others]
        lines.insert(rng.randrange(len(lines) + 1), line)
        return make_page(rng, variable, lines, _CALCULATION_WORDS).text

    def _preamble(self, number: int) -> list[Part]:
        """What the agent is, its tools, the notes, the task."""
        counter = f" {10 + number}" if self.variation.counter else ""
        needed = {BY_WORD[step.action.split()[0]].name for step in self.plan.steps}
        rng = self._random(f"tools {number}" if self.variation.retrieve_tools else "tools")
        others = [name for name in SHOWN[self.suite] if name not in needed]
        shown = sorted(needed) + rng.sample(
            others, min(len(others), max(0, NUM_TOOLS - len(needed)))
        )
        rng.shuffle(shown)
        tools = [self._edit(self.world.descriptions[name], "tools").text for name in shown]
        notes = " ".join(f"note {colour} means {value} ." for colour, value in self.notes.items())
        return [
            f"agent{counter} : read the question , find the answer with the tool .\n",
            *map(_segment, tools), _segment(f"{notes} now {self.user} came ."),
            f"user : find the {self.plan.question} .\n",
        ]  # fmt: skip


def make_episodes(
    suite: str, seed: int, count: int, variation: Variation | None = None
) -> tuple[Episode, ...]:
    """`count` episodes, tasks in turn, in one world; equal arguments give equal episodes.

    Raises:
        ValueError: `count` is below 1, an unknown suite.
    """
    if suite not in PLANS:
        raise ValueError(f"unknown suite {suite!r}: choose from {', '.join(PLANS)}")
    if count < 1:
        raise ValueError(f"episodes must be at least 1, got {count}")
    variation = variation or Variation()
    world = make_world(Random(f"{suite} {seed}"), variation.passage_words)  # noqa: S311
    turns = islice(cycle(PLANS[suite]), count)
    return tuple(
        _make(f"{suite}/{seed}/{number}", suite, task, world, variation)
        for number, task in enumerate(turns)
    )


def _make(name: str, suite: str, task: str, world: World, variation: Variation) -> Episode:
    rng = Random(name)  # noqa: S311
    own = {colour: rng.choice(vocabulary.NUMBERS) for colour in world.notes}
    notes = {
        colour: own[colour] if rng.random() < variation.changed_notes else world.notes[colour]
        for colour in own
    }
    user = rng.choice(world.users)
    draft = Draft(rng, world.truth(notes, user))
    PLANS[suite][task](draft, world)
    return Episode(name, suite, draft.finish(task), world, notes, user, variation)


def _render(rng: Random, asks: str, action: str, observation: Observation) -> Iterator[Part]:
    """One round of the scratchpad."""
    yield f"thought : need the {asks} . action : {action} . observation :\n"
    for passage in observation.passages:
        yield f"doc {rng.choice(vocabulary.NUMBERS)} : "
        yield _segment(passage)


def _segment(text: str) -> Segment:
    return Segment(f"{text}\n")


def _text(parts: Sequence[Part]) -> str:
    return " ".join(part if isinstance(part, str) else part.text for part in parts)
