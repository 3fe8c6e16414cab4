"""What a task suite is made of: two-phase items, as in the evaluations of SparseX and its peers.

Phase 1: the model reads prompts, which makes their KV known. Phase 2: prompts hold the same
segments in another context, and are answered under each policy. The answers follow from the prompt
of phase 2 alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Literal, get_args

Metric = Literal["contains_all", "contains_any", "f1", "calls"]
Pattern = Literal["alone", "reordered", "instruction", "interleaved", "between", "tail"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)  # docs/evaluation.md says what each has read
QUESTIONS = 4  # asked about one text


@dataclass(frozen=True)
class Ask:
    """One prompt of phase 2 and what its answer must hold.

    Attributes:
        task: what kind of question it is.
        segments: texts of the prompt in order; the last one is the question.
        answers: all of them must be in the answer (`contains_all`), or one (`contains_any`, `f1`);
            for `calls`, see `calls.match_calls`.
        crosses: whether the facts it takes lie in more than one segment.
        begun: how the answer begins, written already; the model goes on from there.
    """

    task: str
    segments: tuple[str, ...]
    answers: tuple[str, ...]
    max_tokens: int
    metric: Metric = "contains_all"
    crosses: bool = False
    begun: str = ""


@dataclass(frozen=True)
class Item:
    """Prompts that are read first, each a tuple of segments, and those that are then asked.

    Attributes:
        chat: all of them are written in the chat template of the model.
    """

    pattern: str
    phase_1: tuple[tuple[str, ...], ...]
    phase_2: tuple[Ask, ...]
    chat: bool = False


@dataclass(frozen=True)
class Shape:
    """What the user chooses of generated items.

    Attributes:
        length: tokens of a prompt of phase 2, about.
        num_segments: reused segments in it.
        patterns: how phase 2 reuses what phase 1 read; items take turns, those of the next task
            where the last one's ended.

    Raises:
        ValueError: a number out of range or an unknown pattern.
    """

    length: int = 1024
    num_segments: int = 8
    patterns: tuple[Pattern, ...] = PATTERNS

    def __post_init__(self) -> None:
        if self.length < 256:
            raise ValueError(f"length must be at least 256 tokens, got {self.length}")
        if self.num_segments < 2:
            raise ValueError(f"num_segments must be at least 2, got {self.num_segments}")
        for pattern in self.patterns:
            if pattern not in PATTERNS:
                raise ValueError(f"unknown pattern {pattern!r}: choose from {', '.join(PATTERNS)}")
        if not self.patterns:
            raise ValueError(f"patterns must name at least one of {', '.join(PATTERNS)}")


@dataclass(frozen=True)
class Suite:
    """Tasks of one kind.

    Attributes:
        make: `make(rng, shape, task, pattern)` writes one item for one of the tasks.
        single: tasks whose texts have but one question; there are `QUESTIONS` times as many of
            them.
        real_text: not in the language of the testbed model: for any model, in its chat template.
    """

    name: str
    description: str
    tasks: tuple[str, ...]
    make: Callable[[Random, Shape, str, Pattern], Item]
    single: tuple[str, ...] = ()
    real_text: bool = False

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]:
        """`count` texts of each task (see `single`); equal arguments give equal items.

        Raises:
            ValueError: `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"items must be at least 1, got {count}")
        turns = cycle(shape.patterns)
        return tuple(
            self.make(Random(f"{self.name} {task} {pattern} {seed} {number}"), shape, task, pattern)  # noqa: S311
            for task in self.tasks
            for number, pattern in enumerate(islice(turns, self._number(task, count)))
        )

    def _number(self, task: str, count: int) -> int:
        return count * QUESTIONS if task in self.single else count


def arrange(
    instruction: str, segments: Sequence[str], pattern: str, notes: Sequence[str]
) -> tuple[str, ...]:
    """The prompt of phase 2 without its question; `notes` are new texts, one for each segment."""
    if pattern == "between":
        return (instruction, *(text for pair in zip(notes, segments, strict=True) for text in pair))
    return (instruction, *segments)


def read_before(
    rng: Random,
    instructions: Sequence[str],
    segments: Sequence[str],
    pattern: str,
    questions: Sequence[str],
) -> tuple[tuple[str, ...], ...]:
    """The prompts of phase 1, behind other instructions than that of phase 2: one for each segment
    is enough."""
    other = instructions[0]
    match pattern:
        case "alone":
            return tuple(zip(instructions, segments, strict=False))
        case "reordered":
            return ((other, *rng.sample(segments, len(segments))),)
        case "interleaved":
            return ((other, *segments[::2]),)
        case "tail":
            return tuple((other, *segments, question) for question in questions)
        case _:
            return ((other, *segments),)
