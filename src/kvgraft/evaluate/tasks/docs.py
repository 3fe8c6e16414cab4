"""Questions about the documentation of installed packages: real text for real language models,
without a download.

cloze  a sentence up to a name, a number or an identifier that stands in one passage only; that is
       expected
continuation    the first words of a sentence; its next words are expected

The question names what the sentence describes, and the answer begins with the sentence: so small
models know what is meant."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from random import Random

from kvgraft.evaluate.metrics import normalise
from kvgraft.evaluate.tasks.items import QUESTIONS, Ask, Item, Pattern, Shape, Suite
from kvgraft.evaluate.tasks.packages import Documentation, read_documentation, versions
from kvgraft.evaluate.tasks.texts import (
    CHARACTERS,
    INSTRUCTION,
    ROOM,
    check_split,
    in_split,
    of_split,
    write_item,
)

LEAST = 250  # characters of a passage
DRAWS = 8  # of passages, until there are as many questions as are wanted
BEFORE = 4  # words before a blank, at least
GIVEN, EXPECTED = 8, 4  # words of a sentence that is to be continued
_TERM = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w*(?:\.\w+)*|\d+(?:\.\d+)*)(?!\w)")


@dataclass(frozen=True)
class DocumentedPassage:
    """(What is described, a sentence about it) of one documentation, in order, and the text of
    these."""

    text: str
    sentences: tuple[tuple[str, str], ...]


def make_docs(split: str = "all") -> Suite:
    """The suite, from what is installed.

    Raises:
        ValueError: an unknown split.
    """
    description = f"documentation of {versions()}{of_split(check_split(split))}"
    return Suite("docs", description, tuple(_ASKING), partial(_write, split), real_text=True)


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Questions of one task about passages drawn from all documentation."""
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
    """Passages of about `size` characters, no sentence in two of them. All of one file are of one
    split, so that they are for every size."""
    of_this = (pages for pages in read_documentation() if in_split(pages.name, split))
    return tuple(passage for pages in of_this for passage in _cut(pages, size))


def _cut(pages: Documentation, size: int) -> Iterator[DocumentedPassage]:
    """Whole sentences, in order; a rest that is too short is left out."""
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
    """A term of each passage that has one which stands nowhere else, behind words that tell its
    place."""
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
    """The end of a sentence of each passage that has one whose beginning stands nowhere else."""
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
    """A number, an identifier, or a name."""
    if term[0].isdigit():
        return len(term) > 1
    marked = (
        "_" in term.strip("_") or "." in term or any(map(str.isdigit, term)) or not term.islower()
    )
    return len(term) > 2 and marked


def _words(texts: Iterable[str]) -> str:
    """All words, as scores compare them, with a space around each."""
    return f" {normalise(' '.join(texts))} "


def _count(text: str, words: str) -> int:
    return words.count(f" {normalise(text)} ")
