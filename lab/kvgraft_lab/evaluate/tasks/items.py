"""Two-phase items of task suites, as in the evaluations of SparseX and related work.

Phase 1: the model reads prompts, so that their KV is known. Phase 2: prompts hold the same segments
in another context, and are answered under each policy. The answers follow from the prompt of phase
2 alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Literal, get_args

Metric = Literal["contains_all", "contains_any", "f1", "calls", "line_match", "edit_similarity"]
Pattern = Literal["alone", "reordered", "instruction", "interleaved", "between", "tail"]
# docs/evaluation.md says what each pattern reads first
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
# questions about one text
QUESTIONS = 4


@dataclass(frozen=True)
class Ask:
    """One prompt of phase 2, and the expected answer.

    Attributes:
        task: kind of the question.
        segments: texts of the prompt in order; the last one is the question.
        answers: expected texts. All of them must be in the answer (`contains_all`), or one
            (`contains_any`, `f1`); for `calls`, see `calls.match_calls`; its first line must be one
            (`line_match`) or near one (`edit_similarity`).
        max_tokens: length of the answer.
        metric: score of the answer.
        crosses: True if the needed facts are in more than one segment.
        begun: beginning of the answer, part of the prompt; the model continues it.
        stop: the answer ends before any of these strings.
    """

    task: str
    segments: tuple[str, ...]
    answers: tuple[str, ...]
    max_tokens: int
    metric: Metric = "contains_all"
    crosses: bool = False
    begun: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """Prompts that are read first, each a tuple of segments, and prompts that are then asked.

    Attributes:
        pattern: pattern of reuse.
        phase_1: prompts to read.
        phase_2: prompts to answer.
        chat: write all prompts in the model's chat template.
    """

    pattern: str
    phase_1: tuple[tuple[str, ...], ...]
    phase_2: tuple[Ask, ...]
    chat: bool = False


@dataclass(frozen=True)
class Shape:
    """User's settings of generated items.

    Attributes:
        length: approximate tokens of a prompt of phase 2.
        num_segments: reused segments in it.
        patterns: patterns by which phase 2 reuses the prompts of phase 1. Items take turns; those
            of the next task continue the turns.

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
        name: name of the suite.
        description: short description.
        tasks: names of the tasks.
        make: `make(rng, shape, task, pattern)` writes one item for one of the tasks.
        single: tasks whose texts have only one question; there are `QUESTIONS` times as many texts
            of these.
        real_text: True for texts in a natural language, for any model, in its chat template.
    """

    name: str
    description: str
    tasks: tuple[str, ...]
    make: Callable[[Random, Shape, str, Pattern], Item]
    single: tuple[str, ...] = ()
    real_text: bool = False

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]:
        """Return `count` texts of each task (see `single`). Equal arguments give equal items.

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
    """Return the prompt of phase 2 without its question; `notes` are new texts, one for each
    segment.
    """
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
    """Return the prompts of phase 1. `instructions` differ from that of phase 2; one per segment is
    enough.
    """
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
