"""Pages of facts among filler, and what becomes of them when they are found again: small edits, in
the filler only."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvgraft_lab.testbed import vocabulary

_CLASSES = (vocabulary.ADJECTIVES, vocabulary.PLACES, vocabulary.VERBS)


@dataclass(frozen=True)
class Sentence:
    """Some words; those of a `fact`, or of a schema, are never edited."""

    text: str
    fact: bool = False


@dataclass(frozen=True)
class Page:
    """Sentences about `key`."""

    key: str
    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)


def make_page(rng: Random, key: str, facts: Sequence[str], num_words: int) -> Page:
    """A page of about `num_words` words (at most 8 more): the facts in order, at random places of
    the filler."""
    sentences, room = [], num_words - sum(len(fact.split()) for fact in facts)
    while room > 0:
        sentences.append(Sentence(_filler(rng)))
        room -= len(sentences[-1].text.split())
    places = sorted((rng.randint(0, len(sentences)) for _ in facts), reverse=True)
    for place, fact in zip(places, reversed(facts), strict=True):
        sentences.insert(place, Sentence(fact, fact=True))
    return Page(key, tuple(sentences))


def edit(rng: Random, page: Page, rate: float) -> Page:
    """The page with as many edits as coins of probability `rate` give for its words, all of them in
    its filler, so that a page of facts alone stays as it is."""
    sentences = list(page.sentences)
    filler = [number for number, sentence in enumerate(sentences) if not sentence.fact]
    edits = sum(rng.random() < rate for _ in page.text.split())
    for _ in range(edits if filler else 0):
        number = rng.choice(filler)
        sentences[number] = Sentence(" ".join(_edit(rng, sentences[number].text.split())))
    return Page(page.key, tuple(sentences))


def _edit(rng: Random, words: list[str]) -> list[str]:
    """One word substituted by another of its class, or one adjective inserted or deleted."""
    kind = rng.choice(("substitute", "insert", "delete"))
    adjectives = [at for at, word in enumerate(words) if word in vocabulary.ADJECTIVES]
    if kind == "insert":
        at = rng.choice([at for at, word in enumerate(words) if word == "the"])
        return [*words[: at + 1], rng.choice(vocabulary.ADJECTIVES), *words[at + 1 :]]
    if kind == "delete" and adjectives:
        at = rng.choice(adjectives)
        return [*words[:at], *words[at + 1 :]]
    at, group = rng.choice(
        [(at, group) for at, word in enumerate(words) for group in _CLASSES if word in group]
    )
    return [
        *words[:at],
        rng.choice([word for word in group if word != words[at]]),
        *words[at + 1 :],
    ]


def _filler(rng: Random) -> str:
    scene = (
        f"the {rng.choice(vocabulary.ADJECTIVES)} {rng.choice(vocabulary.PLACES)} "
        f"{rng.choice(vocabulary.VERBS)}"
    )
    return (
        f"{scene} ."
        if rng.random() < 0.5
        else f"{scene} near the {rng.choice(vocabulary.PLACES)} ."
    )
