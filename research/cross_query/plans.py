"""Tasks of agents, as plans: which tool comes next and what is read from its observation, but not
what is found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from kvgraft_lab.testbed import vocabulary
from research.cross_query.tools import TOOLS
from research.cross_query.world import World


@dataclass(frozen=True)
class Step:
    """One action and what is asked after its observation; `{0}` stands for the answer to the first
    step.

    Attributes:
        action: the word of a tool, and arguments.
        asks: such as `mentor of {0}`.
        variable: what the observation calls a computed number.
    """

    action: str
    asks: str
    variable: str = ""


@dataclass(frozen=True)
class TaskPlan:
    """`question` is the task in words; `answer` is the right answer to the last step, if all before
    are right."""

    task: str
    question: str
    steps: tuple[Step, ...]
    answer: str

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(step.variable for step in self.steps if step.variable)


class Draft:
    """A plan being written, with what an agent without errors would answer."""

    def __init__(self, rng: Random, truth: Mapping[str, str]) -> None:
        self.rng, self.truth = rng, truth
        self.steps: list[Step] = []
        self.answers: list[str] = []
        self.phrases: list[str] = []
        self._variables = rng.sample(vocabulary.VARIABLES, len(vocabulary.VARIABLES))

    def find(self, tool: str, subject: str, asks: str = "") -> str:
        """Look up `subject`, a word or an earlier step, and read what is asked for; returns the
        step as a subject."""
        asks = (asks or f"{_ASKS[tool]} of {{}}").replace("{}", subject)
        return self._add(
            Step(f"{TOOLS[tool].word} {subject}", asks),
            self.truth[asks.format(*self.answers)],
            asks,
        )

    def compute(self, tool: str, arguments: str) -> str:
        """Likewise for a number.

        Raises:
            ValueError: the tool cannot take what the arguments are.
        """
        compute = TOOLS[tool].compute
        if compute is None:
            raise ValueError(f"tool {tool!r} computes nothing")
        variable = self._variables[len(self.steps)]
        step = Step(f"{TOOLS[tool].word} {arguments}", f"value of {variable}", variable)
        phrase = arguments if tool == "calculator" else f"{TOOLS[tool].word} of {arguments}"
        return self._add(step, str(compute(arguments.format(*self.answers).split())), phrase)

    def combine(self, one: str, other: str) -> str:
        """Calculate with two steps: their sum, or their difference, or where neither is a word the
        greater."""
        for arguments in (f"{one} with {other}", f"{one} from {other}", f"{other} from {one}"):
            try:
                return self.compute("calculator", arguments)
            except ValueError:
                continue
        return self.compute("calculator", f"{one} and {other}")

    def finish(self, task: str) -> TaskPlan:
        return TaskPlan(task, self.phrases[-1], tuple(self.steps), self.answers[-1])

    def _add(self, step: Step, answer: str, phrase: str) -> str:
        self.phrases.append(phrase.format(*self.phrases))
        self.steps.append(step)
        self.answers.append(answer)
        return f"{{{len(self.steps) - 1}}}"


_ASKS = {
    "mentor": "mentor",
    "home": "home",
    "number": "code",
    "code": "code",
    "paint": "note",
    "owner": "owner",
}


def _bridge(draft: Draft, world: World) -> None:
    """Two pages, of which one names the other: the home of somebody's mentor."""
    pupil = draft.rng.choice(world.pupils("home"))
    mentor = draft.find("search", pupil, "mentor of {}")
    draft.find("search", mentor, f"home of mentor of {pupil}")


def _long_bridge(draft: Draft, world: World) -> None:
    """Three pages: the home of the mentor of somebody's mentor."""
    homed = world.pupils("home")
    pupil = draft.rng.choice(
        [pupil for pupil in world.pupils("mentor") if world.values["mentor"][pupil] in homed]
    )
    mentor = draft.find("search", pupil, "mentor of {}")
    other = draft.find("search", mentor, "mentor of {}")
    draft.find("search", other, f"home of mentor of {mentor}")


def _sum(draft: Draft, world: World) -> None:
    """Two pages and the calculator: the numbers that notes give to two paints."""
    one, other = draft.rng.sample(world.keys("paint"), 2)
    draft.combine(
        draft.find("search", one, "note of {}"), draft.find("search", other, "note of {}")
    )


def _bridge_and_sum(draft: Draft, world: World) -> None:
    """Three pages and the calculator: the code of somebody's mentor, and the number of a note."""
    mentor = draft.find("search", draft.rng.choice(world.pupils("number")), "mentor of {}")
    code = draft.find("search", mentor, "code of {}")
    draft.combine(code, draft.find("search", draft.rng.choice(world.keys("paint")), "note of {}"))


def _owner_page(draft: Draft, world: World) -> None:
    """Who owns a thing, as the preamble says; on from there to a home or a code."""
    subject, book = (
        draft.find("search", draft.rng.choice(world.keys("owner")), "owner of {}"),
        "owner",
    )
    while book not in ("home", "number"):
        book = world.book_of(subject.format(*draft.answers))
        subject = draft.find("search", subject, f"{_ASKS[book]} of {{}}")


def _walk(draft: Draft, world: World, subject: str) -> str:
    """On from a person to a number."""
    while True:
        book = world.book_of(subject.format(*draft.answers))
        subject = draft.find(book, subject)
        if book == "number":
            return subject
        if book == "home":
            return draft.compute("atlas", subject)


def _look_up_and_compute(draft: Draft, world: World) -> None:
    """A walk to a number, the code or note of a thing, the calculator."""
    end = _walk(draft, world, draft.rng.choice(world.keys("mentor")))
    book = draft.rng.choice(("code", "paint"))
    draft.combine(end, draft.find(book, draft.rng.choice(world.keys(book))))


def _owner(draft: Draft, world: World) -> None:
    """Who owns a thing is said by the preamble; on from there to a number, and to the day a week
    after it."""
    draft.compute(
        "calendar", _walk(draft, world, draft.find("owner", draft.rng.choice(world.keys("owner"))))
    )


def _convert(draft: Draft, world: World) -> None:
    """Two things and the calculator, and the result on another scale."""
    one, other = draft.rng.sample(world.keys("paint"), 2)
    draft.compute("converter", draft.combine(draft.find("paint", one), draft.find("paint", other)))


PLANS: Mapping[str, Mapping[str, Callable[[Draft, World], object]]] = {
    "qa": {
        "bridge": _bridge,
        "sum": _sum,
        "long_bridge": _long_bridge,
        "bridge_and_sum": _bridge_and_sum,
        "owner": _owner_page,
    },
    "tools": {"walk": _look_up_and_compute, "owner": _owner, "convert": _convert},
}
"""By suite, by task."""
SHOWN = {"qa": ("search", "calculator"), "tools": tuple(TOOLS)}
"""The tools of a suite."""
