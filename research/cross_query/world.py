"""What the tools know: books of pages, the same for all episodes of a seed, and what is true in one
episode.

Some facts mean something by the preamble of an episode only: the paint of a thing stands for the
number that a note gives to that colour, and what is `theirs` belongs to the user. KV of such a
page, read in another episode, is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from kvgraft_lab.testbed import vocabulary
from research.cross_query.pages import Page, Sentence, make_page
from research.cross_query.tools import RESERVED, TOOLS

GROUP = 8  # persons or things of one kind
NUM_NOTES = 8
_DESCRIPTION_WORDS = (34, 44)
_FACTS = {  # by book
    "mentor": "the mentor of {} is {} .",
    "home": "the home of {} is {} .",
    "number": "the code of {} is {} .",
    "code": "the code of {} is {} .",
    "paint": "the paint of {} is {} .",
    "owner": "the {} is theirs .",
}


@dataclass(frozen=True)
class World:
    """The bundled model tells apart whom a fact is about, but not always two kinds of facts about
    one key: so a person has either a mentor, or a home, or a code, and a thing either a code, or a
    paint, or an owner.

    Attributes:
        values: by book, by key: the mentor of a person and so on; the colour in `paint`, nothing in
            `owner`.
        books: by tool that looks up: pages by key, alike ones beside each other. `search` finds all
            facts about a key.
        descriptions: by tool.
        notes: what colours stand for, unless an episode says otherwise.
    """

    values: Mapping[str, Mapping[str, str]]
    books: Mapping[str, Mapping[str, Page]]
    descriptions: Mapping[str, Page]
    notes: Mapping[str, str]

    def keys(self, book: str) -> tuple[str, ...]:
        return tuple(self.values[book])

    @property
    def users(self) -> tuple[str, ...]:
        """Persons from whom it is not far to a number."""
        return (
            *self.pupils("home"),
            *self.pupils("number"),
            *self.values["home"],
            *self.values["number"],
        )

    def pupils(self, book: str) -> tuple[str, ...]:
        """Those whose mentor's page is in this book: `mentor`, `home` or `number`."""
        return tuple(
            key for key, mentor in self.values["mentor"].items() if mentor in self.values[book]
        )

    def book_of(self, person: str) -> str:
        """Where a person's only fact is."""
        return next(book for book in ("mentor", "home", "number") if person in self.values[book])

    def truth(self, notes: Mapping[str, str], user: str) -> dict[str, str]:
        """What can be asked (`mentor of hope`) and the answers, where the preamble has these notes
        and this user."""
        values = self.values
        homes = {pupil: values["home"][values["mentor"][pupil]] for pupil in self.pupils("home")}
        return {
            **{f"mentor of {key}": mentor for key, mentor in values["mentor"].items()},
            **{f"home of {key}": city for key, city in values["home"].items()},
            **{f"home of mentor of {key}": city for key, city in homes.items()},
            **{
                f"code of {key}": code
                for book in ("number", "code")
                for key, code in values[book].items()
            },
            **{f"note of {key}": notes[colour] for key, colour in values["paint"].items()},
            **{f"owner of {key}": user for key in values["owner"]},
        }


def make_world(rng: Random, passage_words: tuple[int, int]) -> World:
    """Persons in four groups: pupils of pupils, their mentors, the mentors of these with homes and
    with codes; things in three: with codes, with paints, with owners."""
    persons, things = _groups(rng, vocabulary.NAMES, 4), _groups(rng, vocabulary.THINGS, 3)
    first, second, homed, coded = persons
    colours = rng.sample(vocabulary.COLOURS, NUM_NOTES)
    last = [*rng.sample(homed, GROUP // 2), *rng.sample(coded, GROUP - GROUP // 2)]
    values = {
        "mentor": dict(zip((*first, *second), (*rng.sample(second, GROUP), *last), strict=True)),
        "home": {person: rng.choice(vocabulary.CITIES) for person in homed},
        "number": {person: rng.choice(vocabulary.NUMBERS) for person in coded},
        "code": {thing: rng.choice(vocabulary.NUMBERS) for thing in things[0]},
        "paint": {thing: rng.choice(colours) for thing in things[1]},
        "owner": dict.fromkeys(things[2], ""),
    }
    lines = _lines(values, list(chain(*persons, *things)))
    return World(
        values=values,
        books={book: _write(rng, keyed, passage_words) for book, keyed in lines.items()},
        descriptions={tool.name: _describe(rng, tool.schema, tool.word) for tool in TOOLS.values()},
        notes={colour: rng.choice(vocabulary.NUMBERS) for colour in colours},
    )


def _lines(
    values: Mapping[str, Mapping[str, str]], keys: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    """By book, by key: the facts of a page."""
    lines = {
        book: {key: [_FACTS[book].format(key, value)] for key, value in keyed.items()}
        for book, keyed in values.items()
    }
    return {
        **lines,
        "search": {
            key: [line for book in values for line in lines[book].get(key, ())] for key in keys
        },
    }


def _groups(rng: Random, words: Sequence[str], count: int) -> list[list[str]]:
    chosen = rng.sample([word for word in words if word not in RESERVED], count * GROUP)
    return [chosen[at : at + GROUP] for at in range(0, len(chosen), GROUP)]


def _write(
    rng: Random, lines: Mapping[str, Sequence[str]], num_words: tuple[int, int]
) -> dict[str, Page]:
    return {
        key: make_page(rng, key, facts, rng.randint(*num_words)) for key, facts in lines.items()
    }


def _describe(rng: Random, schema: Sequence[str], word: str) -> Page:
    """The schema, then filler, which edits may change."""
    filler = make_page(
        rng, word, (), rng.randint(*_DESCRIPTION_WORDS) - len(" ".join(schema).split())
    )
    return Page(word, (*(Sentence(line, fact=True) for line in schema), *filler.sentences))
