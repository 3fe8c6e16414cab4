"""Prompts over the user's own texts of any kind: prose, code, records, messages of recorded
requests.

continuation    a few words of one of the texts, which the answer continues
beginning       the subject of the text that begins with a few words

The right answers are unknown (the next words are expected). So these prompts are for measures along
full's own answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from random import Random

from kvgraft_lab.evaluate.tasks.items import Ask, Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.texts import (
    CHARACTERS,
    INSTRUCTION,
    ROOM,
    check_split,
    edit_words,
    in_split,
    of_split,
    write_item,
)

# least length of the last passage of a text, as a share of a passage's size
LEAST = 0.6
# words in a question that identify the text
GIVEN = 8
# length of an answer in tokens
ANSWER = 32
_SPACE = re.compile(r"\s+")


def make_own(texts: Mapping[str, str], split: str = "all") -> Suite:
    """Return the suite of texts by name. Equal texts count once.

    Raises:
        ValueError: there is no text, or an unknown split.
    """
    if not any(map(str.strip, texts.values())):
        raise ValueError("texts must hold some text")
    tasks = ("continuation", "beginning")
    digest = sha256("\0".join(texts.values()).encode()).hexdigest()[:8]
    description = f"{len(texts)} texts of SHA-256 {digest}{of_split(check_split(split))}"

    @lru_cache(maxsize=8)
    def passages_of(size: int) -> tuple[str, ...]:
        return tuple(
            one for one in dict.fromkeys(_cut(texts.values(), size)) if in_split(one, split)
        )

    return Suite("own", description, tasks, partial(_write, passages_of, split), real_text=True)


def _write(
    passages_of: Callable[[int], tuple[str, ...]],
    split: str,
    rng: Random,
    shape: Shape,
    task: str,
    pattern: Pattern,
) -> Item:
    """Write one question about passages drawn from all texts."""
    size = (shape.length - ROOM) * CHARACTERS // shape.num_segments
    passages = passages_of(size)
    if len(passages) < shape.num_segments:
        raise ValueError(
            f"the texts have {len(passages)} passages of {size} characters{of_split(split)}, and "
            f"{shape.num_segments} "
            "segments are wanted: give more text, or choose a smaller length or fewer segments"
        )

    drawn = rng.sample(passages, shape.num_segments)
    words = rng.choice(drawn).split()
    start = 0 if task == "beginning" else rng.randrange(max(1, len(words) - GIVEN))
    given, behind = (" ".join(words[first : first + GIVEN]) for first in (start, start + GIVEN))
    if task == "beginning":
        question, begun = (
            f"Question: What does the text say that begins with '{given}'?\nAnswer:",
            "",
        )
    else:
        question, begun = (
            "Question: How does one of the texts go on after some of its words?\nAnswer:",
            f" {given}",
        )

    ask = Ask(task, (question,), (behind,), ANSWER, "f1", begun=begun)
    return write_item(rng, INSTRUCTION, drawn, pattern, [ask])


def edit_known(suite: Suite, share: float) -> Suite:
    """Return the suite with this share of the words replaced in every text of phase 1, as if the
    texts had been edited since. Equal texts have equal edits. Its name, and so its prompts, stay.
    """
    return replace(
        suite,
        description=f"{suite.description}, {share:.0%} of the words edited",
        make=partial(_write_edited, suite.make, share),
    )


def _write_edited(
    make: Callable[[Random, Shape, str, Pattern], Item],
    share: float,
    rng: Random,
    shape: Shape,
    task: str,
    pattern: Pattern,
) -> Item:
    item = make(rng, shape, task, pattern)
    edited = tuple(
        tuple(edit_words(Random(text), text, share) for text in texts)  # noqa: S311
        for texts in item.phase_1
    )
    return replace(item, phase_1=edited)


def _cut(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield passages of `size` characters, cut at white space. A remainder that is too short is
    left out.
    """
    for text in texts:
        rest = text.strip()
        while len(rest) >= LEAST * size:
            end = size
            if len(rest) > size:
                *_, last = [
                    0,
                    *(space.start() for space in _SPACE.finditer(rest, int(LEAST * size), size)),
                ]
                end = last or size
            yield rest[:end]
            rest = rest[end:].lstrip()
