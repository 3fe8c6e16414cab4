"""Short texts of facts among filler, whose questions (`tasks`) have answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvgraft_lab.testbed import vocabulary
from kvgraft_lab.testbed.tasks import FAVOURITES

Order = tuple[int, ...]
MAX_HOPS = 3
# number of variables in one `poll`
POLLED = 5
# number of things that belong to one `theirs`
COMPANY = 5


@dataclass(frozen=True)
class Facts:
    """Number of questions for which facts are written, by task. `size` scales counted facts (1 to
    4).

    Raises:
        ValueError: the vocabulary has too few things, names or variables.
    """

    needle: int = 0
    variable: int = 0
    hop: int = 0
    glossary: int = 0
    coreference: int = 0
    frequent: int = 0
    common: int = 0
    vote: int = 0
    poll: int = 0
    size: int = 2

    def __post_init__(self) -> None:
        things = (
            self.needle + self.glossary + self.coreference + self.common + self.vote + self.poll
        )
        for kind, needed, words in (
            ("things", things, vocabulary.THINGS),
            (
                "names",
                2 * self.hop + -(-self.coreference // COMPANY) + self.frequent,
                vocabulary.NAMES,
            ),
            ("variables", self.variable + POLLED * self.poll, vocabulary.VARIABLES),
        ):
            if needed > len(words):
                raise ValueError(f"{self} needs {needed} {kind}, at most {len(words)} are allowed")

        if not 1 <= self.size <= len(_SKEWED):
            raise ValueError(f"size must be 1 to {len(_SKEWED)}, got {self.size}")


# counts of the two most frequent words, by size
_SKEWED = ((4, 2), (6, 3), (9, 5), (12, 6))


def make_glossary(rng: Random, colours: Sequence[str], count: int) -> str:
    """Return an instruction of `count` notes. Each gives one of `colours` a number."""
    return " ".join(
        f"note {colour} means {rng.choice(vocabulary.NUMBERS)} ."
        for colour in rng.sample(colours, count)
    )


def make_documents(
    rng: Random, facts: Facts, *, orders: Sequence[Order], num_tokens: int,
    colours: Sequence[str] = (),
    max_hops: int = MAX_HOPS,
) -> tuple[str, ...]:  # fmt: skip
    """Return documents of about `num_tokens` words together, with `facts` at random places among
    filler.

    Each chain of facts can be read in one of `orders` (permutations of the documents), drawn for
    each chain. In another order it may not be answerable. `colours` are the paints of the
    `glossary` facts. A variable is at most `max_hops` other variables away from its number.

    Raises:
        ValueError: `orders` are not permutations of the same 0..n-1; the facts need more words than
            `num_tokens`; or there are `glossary` facts without `colours`.
    """
    documents = range(len(orders[0]) if orders else 0)
    if not documents or any(sorted(order) != list(documents) for order in orders):
        raise ValueError(f"orders must be permutations of the same numbers 0..n-1, got {orders}")
    if facts.glossary and not colours:
        raise ValueError(f"colours must be given for {facts.glossary} glossary facts, got none")

    placed: list[tuple[int, float, str]] = []  # document, place in it, sentence

    for chain in _chains(rng, facts, colours, max_hops):
        order = rng.choice(orders)
        spots = sorted((rng.randrange(len(order)), rng.random()) for _ in chain)
        placed += [
            (order[rank], place, sentence)
            for (rank, place), sentence in zip(spots, chain, strict=True)
        ]

    room = num_tokens - sum(len(sentence.split()) for *_, sentence in placed)
    if room < 0:
        raise ValueError(
            f"num_tokens must hold the facts, which take {num_tokens - room} words, got "
            f"{num_tokens}"
        )

    while room > 0:
        sentence = _filler(rng)
        placed.append((rng.choice(documents), rng.random(), sentence))
        room -= len(sentence.split())

    placed.sort()
    return tuple(
        " ".join(sentence for at, _, sentence in placed if at == document) for document in documents
    )


def _chains(
    rng: Random, facts: Facts, colours: Sequence[str], max_hops: int
) -> Iterator[list[str]]:
    """Yield lists of sentences. The sentences of one list must be read in this order."""
    things, names, variables = (
        iter(rng.sample(words, len(words)))
        for words in (vocabulary.THINGS, vocabulary.NAMES, vocabulary.VARIABLES)
    )
    for _ in range(facts.needle):
        yield [f"the code of {next(things)} is {rng.choice(vocabulary.NUMBERS)} ."]

    left = facts.variable

    while left:
        length = min(left, rng.randint(1, max_hops + 1))
        chain = [next(variables) for _ in range(length)]
        sources = [rng.choice(vocabulary.NUMBERS), *chain]
        yield [f"{name} = {source} ." for name, source in zip(chain, sources, strict=False)]
        left -= length

    for _ in range(facts.hop):
        student, mentor = next(names), next(names)
        pair = [
            f"the home of {mentor} is {rng.choice(vocabulary.CITIES)} .",
            f"the mentor of {student} is {mentor} .",
        ]
        yield pair if rng.random() < 0.5 else pair[::-1]

    for _ in range(facts.glossary):
        yield [f"the paint of {next(things)} is {rng.choice(colours)} ."]

    for number in range(facts.coreference):
        yield [f"the {next(things)} is theirs ."]
        if number % COMPANY == 0:
            yield [f"now {next(names)} came ."]

    for _ in range(facts.frequent):
        yield from _said(
            rng,
            f"{next(names)} saw",
            vocabulary.NONSENSE_WORDS,
            _SKEWED[facts.size - 1],
            facts.size - 1,
        )

    for _ in range(facts.common):
        often = [2 + facts.size] * FAVOURITES
        yield from _said(rng, f"{next(things)} holds", vocabulary.NONSENSE_WORDS, often, facts.size)

    for _ in range(facts.vote):
        yield from _said(
            rng, f"{next(things)} gets", vocabulary.NUMBERS, [rng.randint(3, 4)], rng.randint(0, 2)
        )

    for _ in range(facts.poll):
        thing, (most, *others) = next(things), rng.sample(vocabulary.NUMBERS, POLLED - 2)
        for value in (most, most, most, *others):
            name = next(variables)
            yield [f"{name} = {value} .", f"{thing} gets {name} ."]


def _said(
    rng: Random, beginning: str, words: Sequence[str], counts: Sequence[int], others: int
) -> Iterator[list[str]]:
    """Yield sentences that say words as often as `counts` give, and `others` once each."""
    often = (*counts, *[1] * others)
    for word, count in zip(rng.sample(words, len(often)), often, strict=True):
        for _ in range(count):
            yield [f"{beginning} {word} ."]


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
