"""What suites over real text share: how an item of theirs is worded, and which texts are of which
split."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random

from kvgraft.evaluate.tasks.items import Ask, Item, arrange, read_before

SPLITS = ("all", "dev", "test")
CHARACTERS = 4  # of a token of English, about
ROOM = 120  # tokens for the instruction, the question and what a chat template adds
INSTRUCTION = (
    "Answer the question from the following text. Answer with a few words and nothing else."
)
OTHERS = (  # instructions behind which phase 1 reads
    "Here is some text. Read it carefully.",
    "The following passages belong together; a question about them comes later.",
    "You will be asked about this material.",
)


def check_split(split: str) -> str:
    """The split, or ValueError: there is no such split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    return split


def in_split(name: str, split: str) -> bool:
    """Whether a text is of a split, by the SHA-256 of its name: about half are to choose by (dev),
    the others to report (test)."""
    return split in ("all", SPLITS[1 + sha256(name.encode()).digest()[0] % 2])


def of_split(split: str) -> str:
    """For the end of a description."""
    return "" if split == "all" else f" ({split} split)"


def write_item(
    rng: Random, instruction: str, segments: Sequence[str], pattern: str, asks: Sequence[Ask]
) -> Item:
    """The two-phase item of some questions about the same segments; `asks` have no segment but
    their question yet."""
    prompt = arrange(
        instruction,
        segments,
        pattern,
        [f"Part {number}." for number in range(1, len(segments) + 1)],
    )
    others = [OTHERS[number % len(OTHERS)] for number in range(len(segments))]
    questions = [ask.segments[-1] for ask in asks]
    return Item(
        pattern,
        read_before(rng, others, segments, pattern, questions),
        tuple(replace(ask, segments=(*prompt, *ask.segments)) for ask in asks),
    )
