"""Questions about the documentation of installed packages: real text for real language models,
without a download.

cloze         a sentence up to a name, a number or an identifier that is in one passage only, the
              expected answer
continuation  the first words of a sentence; the next words are expected

The question names the subject of the sentence, and the answer begins with the sentence. So even
small models know what to answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from random import Random

from kvgraft_lab.evaluate.metrics import normalise
from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Ask, Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.packages import Documentation, read_documentation, versions
from kvgraft_lab.evaluate.tasks.texts import (
    CHARACTERS,
    INSTRUCTION,
    ROOM,
    check_split,
    in_split,
    of_split,
    write_item,
)

# least number of characters of a passage
LEAST = 250
# draws of passages until there are enough questions
DRAWS = 8
# least number of words before a blank
BEFORE = 4
# given and expected words of a sentence to be continued
GIVEN, EXPECTED = 8, 4
_TERM = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*(?:\.\w+)*|\d+(?:\.\d+)*)(?!\w)")


@dataclass(frozen=True)
class DocumentedPassage:
    """Text of one documentation, and its sentences in order, each with its subject."""

    text: str
    sentences: tuple[tuple[str, str], ...]


def make_docs(split: str = "all") -> Suite:
    """Return the suite, from installed packages.

    Raises:
        ValueError: an unknown split.
    """
    description = f"documentation of {versions()}{of_split(check_split(split))}"
    return Suite("docs", description, tuple(_ASKING), partial(_write, split), real_text=True)


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write questions of one task about passages drawn from all documentation."""
    count = shape.num_segments
    size = (shape.length - ROOM) * CHARACTERS // count
    if size < LEAST:
        least = LEAST * count // CHARACTERS + ROOM + 1
        raise ValueError(
            f"length must be at least {least} tokens for {count} segments of docs, got "
            f"{shape.length}"
        )

    passages = _passages(split, size)
    if len(passages) < count:
        raise ValueError(
            f"docs has {len(passages)} passages of {size} characters (split {split}), and {count} "
            "segments are wanted: "
            "choose a smaller length"
        )

    drawn, asks = rng.sample(passages, count), list[Ask]()

    for _ in range(DRAWS):
        if len(found := _ASKING[task](rng, drawn)[:QUESTIONS]) > len(asks):
            best, asks = drawn, found
        if len(asks) == QUESTIONS:
            break
        drawn = rng.sample(passages, count)

    if not asks:
        raise ValueError(
            f"docs has no {task} question about {count} passages of {size} characters: choose more "
            "of them"
        )

    return write_item(rng, INSTRUCTION, [passage.text for passage in best], pattern, asks)


@lru_cache(maxsize=8)
def _passages(split: str, size: int) -> tuple[DocumentedPassage, ...]:
    """Return passages of about `size` characters, with each sentence in one passage only.

    All passages of a file are in one split, for every size.
    """
    of_this = (pages for pages in read_documentation() if in_split(pages.name, split))
    return tuple(passage for pages in of_this for passage in _cut(pages, size))


def _cut(pages: Documentation, size: int) -> Iterator[DocumentedPassage]:
    """Yield passages of whole sentences, in order. A remainder that is too short is left out."""
    taken: list[tuple[str, str]] = []
    for title, sentence in (*pages.sentences, ("", "")):
        length = sum(len(known) for _, known in taken)
        if taken and (not sentence or length + len(sentence) > size):
            if length >= 0.6 * size:
                yield _join(taken)
            taken = []
        taken.append((title, sentence))


def _join(taken: Sequence[tuple[str, str]]) -> DocumentedPassage:
    text = "\n".join(taken[0])
    for (before, _), (title, sentence) in pairwise(taken):
        text += f" {sentence}" if title == before else f"\n{title}\n{sentence}"
    return DocumentedPassage(text, tuple(taken))


def _cloze(rng: Random, passages: Sequence[DocumentedPassage]) -> list[Ask]:
    """Return a question for a unique term of each passage that has one. The words before the term
    are unique too.
    """
    whole = _words(passage.text for passage in passages)
    found = []

    for passage in rng.sample(passages, len(passages)):
        places = [
            (title, sentence[: term.start()], term.group())
            for title, sentence in passage.sentences
            for term in _TERM.finditer(sentence)
            if _is_distinctive(term.group()) and _count(term.group(), whole) == 1
            if len(sentence[: term.start()].split()) >= BEFORE
            and _count(sentence[: term.start()], whole) == 1
        ]
        if places:
            title, before, term = rng.choice(places)
            found.append(
                Ask("cloze", (_question(title),), (term,), 12, begun=f" {before.rstrip()}")
            )

    return found


def _continuation(rng: Random, passages: Sequence[DocumentedPassage]) -> list[Ask]:
    """Return a question for the end of a sentence of each passage, if it has one with a unique
    beginning.
    """
    whole = _words(passage.text for passage in passages)
    found = []
    for passage in rng.sample(passages, len(passages)):
        for title, sentence in rng.sample(passage.sentences, len(passage.sentences)):
            words = sentence.split()
            given, expected = " ".join(words[:GIVEN]), " ".join(words[GIVEN : GIVEN + EXPECTED])
            long = len(words) >= GIVEN + EXPECTED
            if long and _count(given, whole) == _count(expected, whole) == 1:
                found.append(
                    Ask("continuation", (_question(title),), (expected,), 16, begun=f" {given}")
                )
                break
    return found


def _question(title: str) -> str:
    return f"Question: What does the text say about {title}?\nAnswer:"


_ASKING: Mapping[str, Callable[[Random, Sequence[DocumentedPassage]], list[Ask]]] = {
    "cloze": _cloze,
    "continuation": _continuation,
}


def _is_distinctive(term: str) -> bool:
    """Return whether a term is a number, an identifier, or a name."""
    if term[0].isdigit():
        return len(term) > 1
    marked = (
        "_" in term.strip("_") or "." in term or any(map(str.isdigit, term)) or not term.islower()
    )
    return len(term) > 2 and marked


def _words(texts: Iterable[str]) -> str:
    """Return all words in the form that scores compare, with a space around each."""
    return f" {normalise(' '.join(texts))} "


def _count(text: str, words: str) -> int:
    return words.count(f" {normalise(text)} ")
