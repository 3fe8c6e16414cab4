"""Small texts of facts among filler, and the questions that a reader of them can answer.

`make_documents` writes the facts; `read` is the truth about answers. It reads segments from left to right as the
model does, so that the same documents in another order have the questions and the answers of that order.

    task         facts                                                   question -> answer
    needle       the code of lamp is 42 .                                code of lamp is -> 42
    variable     x5 = 66 . ... x33 = x5 .                                value of x33 is -> 66
    hop          the home of greta is turin . ...
                 the mentor of hope is greta .                           home of mentor of hope is -> turin
    glossary     note grey means 51 . ... the paint of lamp is grey .    note of lamp is -> 51
    coreference  now dina came . ... the chest is theirs .               owner of chest is -> dina
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvgraft.testbed import vocabulary

Task = Literal["needle", "variable", "hop", "glossary", "coreference"]
Order = tuple[int, ...]
MAX_HOPS = 3


@dataclass(frozen=True)
class Question:
    """One question, its answer, and the segment of every fact that it takes, in reading order."""

    task: Task
    text: str
    answer: str
    segments: tuple[int, ...]

    @property
    def crosses(self) -> bool:
        """Whether the facts lie in more than one segment."""
        return len(set(self.segments)) > 1


@dataclass(frozen=True)
class Facts:
    """How many questions of each task to write facts for.

    Raises:
        ValueError: the vocabulary has too few things, names or variables for so many.
    """

    needle: int = 0
    variable: int = 0
    hop: int = 0
    glossary: int = 0
    coreference: int = 0

    def __post_init__(self) -> None:
        for kind, needed, words in (
            ("things", self.needle + self.glossary + self.coreference, vocabulary.THINGS),
            ("names", 2 * self.hop + self.coreference, vocabulary.NAMES),
            ("variables", self.variable, vocabulary.VARIABLES),
        ):
            if needed > len(words):
                raise ValueError(f"{self} needs {needed} {kind}, at most {len(words)} are allowed")


@dataclass(frozen=True)
class _Statement:
    """What a sentence says `about` a phrase: `value`, or whatever is known of the phrase `via`."""

    about: str
    task: Task | None = None
    value: str = ""
    via: str = ""


def read(segments: Sequence[str]) -> tuple[Question, ...]:
    """Every question that one reading of `segments` from left to right can answer."""
    known: dict[str, tuple[str, tuple[int, ...]]] = {}  # phrase -> (answer, segments of its facts)
    questions: dict[str, Question] = {}
    for number, segment in enumerate(segments):
        for sentence in segment.split(" ."):
            said = _parse(sentence.split())
            if said is None or (said.via and said.via not in known):
                continue
            answer, sources = known[said.via] if said.via else (said.value, ())
            known[said.about] = answer, (*sources, number)
            if said.task:
                text = f"question : {said.about} is"
                questions[text] = Question(said.task, text, *known[said.about])
    return tuple(questions.values())


def _parse(words: list[str]) -> _Statement | None:
    match words:
        case [name, "=", value] if value.isdigit():
            return _Statement(f"value of {name}", "variable", value=value)
        case [name, "=", source]:
            return _Statement(f"value of {name}", "variable", via=f"value of {source}")
        case ["the", "code" | "home" as relation, "of", key, "is", value]:
            return _Statement(f"{relation} of {key}", "needle", value=value)
        case ["the", "mentor", "of", student, "is", mentor]:
            return _Statement(f"home of mentor of {student}", "hop", via=f"home of {mentor}")
        case ["the", "paint", "of", thing, "is", colour]:
            return _Statement(f"note of {thing}", "glossary", via=f"note {colour}")
        case ["the", thing, "is", "theirs"]:
            return _Statement(f"owner of {thing}", "coreference", via="they")
        case ["note", colour, "means", value]:
            return _Statement(f"note {colour}", value=value)
        case ["now", name, "came"]:
            return _Statement("they", value=name)
    return None


def make_glossary(rng: Random, colours: Sequence[str], count: int) -> str:
    """An instruction of `count` notes, each giving one of `colours` a number."""
    return " ".join(f"note {colour} means {rng.choice(vocabulary.NUMBERS)} ." for colour in rng.sample(colours, count))


def make_documents(
    rng: Random, facts: Facts, *, orders: Sequence[Order], num_tokens: int, colours: Sequence[str] = ()
) -> tuple[str, ...]:
    """Documents of about `num_tokens` words together, with `facts` at random places among filler.

    Each chain of facts can be read in one of `orders` (permutations of the documents), drawn for each chain; in
    another order it may not be answerable. `colours` are the paints of the `glossary` facts.

    Raises:
        ValueError: `orders` are not permutations of the same 0..n-1; the facts need more words than `num_tokens`;
            there are `glossary` facts and no `colours`.
    """
    documents = range(len(orders[0]) if orders else 0)
    if not documents or any(sorted(order) != list(documents) for order in orders):
        raise ValueError(f"orders must be permutations of the same numbers 0..n-1, got {orders}")
    if facts.glossary and not colours:
        raise ValueError(f"colours must be given for {facts.glossary} glossary facts, got none")
    placed: list[tuple[int, float, str]] = []  # (document, place in it, sentence)
    for chain in _chains(rng, facts, colours):
        order = rng.choice(orders)
        spots = sorted((rng.randrange(len(order)), rng.random()) for _ in chain)
        placed += [(order[rank], place, sentence) for (rank, place), sentence in zip(spots, chain, strict=True)]
    room = num_tokens - sum(len(sentence.split()) for *_, sentence in placed)
    if room < 0:
        raise ValueError(f"num_tokens must hold the facts, which take {num_tokens - room} words, got {num_tokens}")
    while room > 0:
        sentence = _filler(rng)
        placed.append((rng.choice(documents), rng.random(), sentence))
        room -= len(sentence.split())
    placed.sort()
    return tuple(" ".join(sentence for at, _, sentence in placed if at == document) for document in documents)


def _chains(rng: Random, facts: Facts, colours: Sequence[str]) -> Iterator[list[str]]:
    """Lists of sentences; those of one list are to be read in this order."""
    things, names, variables = (
        iter(rng.sample(words, len(words))) for words in (vocabulary.THINGS, vocabulary.NAMES, vocabulary.VARIABLES)
    )
    for _ in range(facts.needle):
        yield [f"the code of {next(things)} is {rng.choice(vocabulary.NUMBERS)} ."]
    left = facts.variable
    while left:
        length = min(left, rng.randint(1, MAX_HOPS + 1))
        chain = [next(variables) for _ in range(length)]
        sources = [rng.choice(vocabulary.NUMBERS), *chain]
        yield [f"{name} = {source} ." for name, source in zip(chain, sources, strict=False)]
        left -= length
    for _ in range(facts.hop):
        student, mentor = next(names), next(names)
        home = f"the home of {mentor} is {rng.choice(vocabulary.CITIES)} ."
        yield [home, f"the mentor of {student} is {mentor} ."]
    for _ in range(facts.glossary):
        yield [f"the paint of {next(things)} is {rng.choice(colours)} ."]
    for number in range(facts.coreference):
        yield [f"the {next(things)} is theirs ."]
        if number % 3 == 0:
            yield [f"now {next(names)} came ."]


def _filler(rng: Random) -> str:
    scene = f"the {rng.choice(vocabulary.ADJECTIVES)} {rng.choice(vocabulary.PLACES)} {rng.choice(vocabulary.VERBS)}"
    return f"{scene} ." if rng.random() < 0.5 else f"{scene} near the {rng.choice(vocabulary.PLACES)} ."
