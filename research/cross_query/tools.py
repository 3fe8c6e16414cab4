"""The agents' tools: what they are called in the model's words, what they look up or compute, what
they refuse.

The vocabulary has no word for calculators and the like, so every tool goes by the word for some
thing. Numbers are the words 10 to 99."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgraft_lab.testbed import vocabulary

LEAST, MOST = 10, 99  # of the numbers that are words
WEEK = 7


class ToolError(ValueError):
    """A call that a tool refuses; the message is the observation, in the model's words."""


@dataclass(frozen=True)
class Tool:
    """One tool. It looks up a page of the book `name`, or has a way to `compute` a number.

    Attributes:
        word: what prompts call it.
        does: what its description says.
        needs: what its arguments must be, for the description and for errors.
        example: arguments.
        compute: arguments to a number; raises ValueError for those that it cannot take.
    """

    name: str
    word: str
    does: str
    needs: str
    example: str
    compute: Callable[[Sequence[str]], int] | None = None

    @property
    def schema(self) -> tuple[str, ...]:
        """The sentences that describe it."""
        return (
            f"tool {self.word} : {self.does} .",
            f"need {self.needs} .",
            f"action : {self.word} {self.example} .",
        )

    def refuse(self, arguments: Sequence[str]) -> ToolError:
        """The error that quotes the arguments."""
        return ToolError(
            f"the {self.word} : need {self.needs} , given {' '.join(arguments) or '?'} ."
        )


def calculate(arguments: Sequence[str]) -> int:
    """`12 with 30` is their sum, `12 from 30` is 30 - 12, `12 and 30` is the greater of them.

    Raises:
        ValueError: other arguments, or a result that is no word.
    """
    left, operation, right = _words(arguments, 3)
    one, other = _number(left), _number(right)
    results = {"with": one + other, "from": other - one, "and": max(one, other)}
    if operation not in results:
        raise ValueError(f"unknown operation {operation!r}: choose from {', '.join(results)}")
    if not LEAST <= results[operation] <= MOST:
        raise ValueError(f"the result must be {LEAST} to {MOST}, got {results[operation]}")
    return results[operation]


def next_week(arguments: Sequence[str]) -> int:
    """A calendar: the day a week later, in a year of the days 10 to 99."""
    [day] = _words(arguments, 1)
    return LEAST + (_number(day) - LEAST + WEEK) % (MOST - LEAST + 1)


def convert(arguments: Sequence[str]) -> int:
    """A converter between two scales, of which one runs down as the other runs up."""
    [amount] = _words(arguments, 1)
    return LEAST + MOST - _number(amount)


def locate(arguments: Sequence[str]) -> int:
    """The number of a city in an atlas."""
    [city] = _words(arguments, 1)
    if city not in vocabulary.CITIES:
        raise ValueError(f"unknown city {city!r}: the atlas has {', '.join(vocabulary.CITIES)}")
    return LEAST + vocabulary.CITIES.index(city)


def _words(arguments: Sequence[str], count: int) -> Sequence[str]:
    if len(arguments) != count:
        raise ValueError(f"needs {count} arguments, got {len(arguments)}: {' '.join(arguments)}")
    return arguments


def _number(word: str) -> int:
    if word not in vocabulary.NUMBERS:
        raise ValueError(f"numbers must be {LEAST} to {MOST}, got {word!r}")
    return int(word)


_ALL = (
    Tool("search", "search", "find and read the doc near a mentor , a chest , a home", "a mentor",
    "abel"),
    Tool("mentor", "mirror", "find the mentor of a user", "a user", "abel"),
    Tool("home", "tent", "find the home of a mentor", "a mentor", "abel"),
    Tool("number", "stamp", "find the code of a user", "a user", "abel"),
    Tool("code", "box", "find the codes held in a chest", "a chest", "bench"),
    Tool("paint", "brush", "find the paint on a chest , then read the note", "a chest", "bench"),
    Tool("owner", "flag", "find the owner of a chest", "a chest", "bench"),
    Tool("calculator", "wheel",
    "the value of a code with a code , of a code from a code , and the most",
         "a code with a code", "22 with 33", calculate),
    Tool("calendar", "clock", "given a code of now , find the code then", "a code", "22",
    next_week),
    Tool("converter", "coin", "the value of a code on a coin", "a code", "22", convert),
    Tool("atlas", "compass", "find the value of a home", "a home", "porto", locate),
)  # fmt: skip
TOOLS = {tool.name: tool for tool in _ALL}
BY_WORD = {tool.word: tool for tool in _ALL}
RESERVED = frozenset(word for tool in _ALL for line in tool.schema for word in line.split())
"""Words that descriptions use; no page is about one of them."""
