"""Shared parts of suites over real text: wording of items, and splits."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random

from kvgraft_lab.evaluate.tasks.items import Ask, Item, arrange, read_before

SPLITS = ("all", "dev", "test")
# approximate characters of an English token
CHARACTERS = 4
# tokens for the instruction, the question and the chat template
ROOM = 120
INSTRUCTION = (
    "Answer the question from the following text. Answer with a few words and nothing else."
)
# instructions of the prompts in phase 1
OTHERS = (
    "Here is some text. Read it carefully.",
    "The following passages belong together; a question about them comes later.",
    "You will be asked about this material.",
)


def check_split(split: str) -> str:
    """Return the split. Raise ValueError if there is no such split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    return split


def in_split(name: str, split: str) -> bool:
    """Return whether a text is in a split, by the SHA-256 of its name.

    About half of the texts are for choosing (dev), the others for reporting (test).
    """
    return split in ("all", SPLITS[1 + sha256(name.encode()).digest()[0] % 2])


def of_split(split: str) -> str:
    """Return the end of a description that names the split."""
    return "" if split == "all" else f" ({split} split)"


def edit_words(rng: Random, text: str, share: float) -> str:
    """Return the text with this share of its words replaced by other words of it."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), round(share * len(words))):
        words[place] = rng.choice(words)
    return " ".join(words)


def write_item(
    rng: Random,
    instruction: str,
    segments: Sequence[str],
    pattern: str,
    asks: Sequence[Ask],
    read: Sequence[str] | None = None,
) -> Item:
    """Return the two-phase item of some questions about the same segments. `asks` hold only their
    question so far; `read` are the segments of phase 1, if they were others.
    """
    read = segments if read is None else read
    prompt = arrange(
        instruction,
        segments,
        pattern,
        [f"Part {number}." for number in range(1, len(segments) + 1)],
    )
    others = [OTHERS[number % len(OTHERS)] for number in range(len(read))]
    questions = [ask.segments[-1] for ask in asks]
    return Item(
        pattern,
        read_before(rng, others, read, pattern, questions),
        tuple(replace(ask, segments=(*prompt, *ask.segments)) for ask in asks),
    )
