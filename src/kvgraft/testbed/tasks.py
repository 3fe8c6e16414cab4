"""Small texts of facts among filler, and the questions that a reader of them can answer.

`make_documents` writes the facts; `read` is the truth about answers. It reads segments from left to right as the
model does, so that the same documents in another order have the questions and the answers of that order.

Questions are asked as `question : code of lamp ? answer :`.

    task          facts                                                   question -> answer
    needle        the code of lamp is 42 .                                code of lamp -> 42
    needles       four of them                                            codes of lamp bell jade cup -> 42 17 90 23
    variable      x5 = 66 . ... x33 = x5 .                                value of x33 -> 66
    hop           the home of greta is turin . ...
                  the mentor of hope is greta .                           home of mentor of hope -> turin
    hop_reversed  the same facts, the mentor first
    glossary      note grey means 51 . ... the paint of lamp is grey .    note of lamp -> 51
    coreference   now dina came . ... the chest is theirs .               owner of chest -> dina
    frequent      ada saw dax . (many times, of a skewed distribution)    most seen by ada -> dax wug
    common        drum holds fep . (two words often, others once)         common in drum -> fep tov (any order)
    vote          bell gets 42 . (by several, not unanimously)            most given to bell -> 42
    poll          x5 = 66 . ... bell gets x5 . (by several)               most given to bell -> 66
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from kvgraft.testbed import vocabulary

Task = Literal[
    "needle",
    "needles",
    "variable",
    "hop",
    "hop_reversed",
    "glossary",
    "coreference",
    "frequent",
    "common",
    "vote",
    "poll",
]
TASKS: tuple[Task, ...] = get_args(Task)
Order = tuple[int, ...]
MAX_HOPS = 3
NEEDLES = 4  # asked for together by one `needles` question
POLLED = 5  # variables that one `poll` asks
COMPANY = 5  # things that belong to one of `theirs`
FAVOURITES = 2  # asked for by one `frequent` or `common` question


@dataclass(frozen=True)
class Question:
    """One question, its answer, and the segment of every fact that it takes, in reading order.

    Attributes:
        via: what has to be found on the way to the answer of a `hop_reversed` question, else empty.
    """

    task: Task
    text: str
    answer: str
    segments: tuple[int, ...]
    via: str = ""

    @property
    def crosses(self) -> bool:
        """Whether the facts lie in more than one segment."""
        return len(set(self.segments)) > 1


@dataclass(frozen=True)
class Resolved:
    """The word at `place` of `segment` means `value`, by what stood before it."""

    segment: int
    place: int
    value: str


@dataclass(frozen=True)
class Facts:
    """How many questions of each task to write facts for; `size` scales what is counted (1 to 4).

    Raises:
        ValueError: the vocabulary has too few things, names or variables for so many.
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
        things = self.needle + self.glossary + self.coreference + self.common + self.vote + self.poll
        for kind, needed, words in (
            ("things", things, vocabulary.THINGS),
            ("names", 2 * self.hop + -(-self.coreference // COMPANY) + self.frequent, vocabulary.NAMES),
            ("variables", self.variable + POLLED * self.poll, vocabulary.VARIABLES),
        ):
            if needed > len(words):
                raise ValueError(f"{self} needs {needed} {kind}, at most {len(words)} are allowed")
        if not 1 <= self.size <= len(_SKEWED):
            raise ValueError(f"size must be 1 to {len(_SKEWED)}, got {self.size}")


_SKEWED = ((4, 2), (6, 3), (9, 5), (12, 6))  # how often the two most frequent words occur, by size


def read(segments: Sequence[str]) -> tuple[Question, ...]:
    """Every question that one reading of `segments` from left to right can answer, but for those of `needles`."""
    reader = _Reader()
    reader.read(segments)
    return (*reader.questions.values(), *reader.counted())


def resolve(segments: Sequence[str]) -> tuple[Resolved, ...]:
    """The words that mean something by what stood before them: a variable its value, `theirs` a name, and so on."""
    reader = _Reader()
    reader.read(segments)
    return tuple(reader.resolved)


def together(needles: Sequence[Question]) -> Question:
    """One `needles` question for the answers of several `needle` questions about codes."""
    keys = " ".join(key_of(question) for question in needles)
    return Question(
        "needles",
        ask(f"codes of {keys}"),
        " ".join(question.answer for question in needles),
        tuple(sorted(number for question in needles for number in question.segments)),
    )


def is_code(question: Question) -> bool:
    """Whether `together` can take it."""
    return question.text.startswith("question : code of ")


def ask(phrase: str) -> str:
    """The question for a phrase, up to where its answer begins."""
    return f"question : {phrase} ? answer :"


def key_of(question: Question) -> str:
    """The last word of what a question asks for."""
    return question.text.split()[-4]


class _Reader:
    """What is known after reading some text."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, tuple[int, ...]]] = {}  # phrase -> (answer, segments of its facts)
        self.students: dict[str, list[tuple[str, int]]] = defaultdict(list)  # mentor -> (student, segment)
        self.counts: dict[tuple[Task, str], list[tuple[str, int]]] = defaultdict(list)  # -> (word, segment)
        self.questions: dict[str, Question] = {}
        self.resolved: list[Resolved] = []

    def read(self, segments: Sequence[str]) -> None:
        for number, segment in enumerate(segments):
            sentence: list[str] = []
            for place, word in enumerate(segment.split()):
                if word == ".":
                    self._hear(sentence, number, place - 1)
                if word in {".", ":"} or word.startswith("<"):
                    sentence = []
                else:
                    sentence.append(word)

    def counted(self) -> Iterator[Question]:
        """Questions about how often something was said, where the answer is clear."""
        for (task, key), said in self.counts.items():
            ranked = Counter(word for word, _ in said).most_common()
            asked = FAVOURITES if task in ("frequent", "common") else 1
            top, rest = ranked[:asked], ranked[asked:]
            if len(top) < asked or (rest and top[-1][1] < 2 * rest[0][1]):
                continue
            if task == "frequent" and len({count for _, count in top}) < asked:
                continue
            answer = " ".join(word for word, _ in top)
            yield Question(task, ask(_COUNTED[task].format(key)), answer, tuple(at for _, at in said))

    def _hear(self, words: list[str], number: int, place: int) -> None:
        """Take in one sentence of segment `number`, the last word of which is at `place`."""
        match words:
            case [name, "=", value] if value.isdigit():
                self._learn("variable", f"value of {name}", number, value=value)
            case [name, "=", source]:
                self._learn("variable", f"value of {name}", number, via=f"value of {source}", place=place)
            case ["the", "code", "of", key, "is", value]:
                self._learn("needle", f"code of {key}", number, value=value)
            case ["the", "home", "of", mentor, "is", city]:
                self._learn("needle", f"home of {mentor}", number, value=city)
                for student, at in self.students[mentor]:
                    text = ask(f"home of mentor of {student}")
                    self.questions[text] = Question("hop_reversed", text, city, (at, number), mentor)
            case ["the", "mentor", "of", student, "is", mentor]:
                self._learn("hop", f"home of mentor of {student}", number, via=f"home of {mentor}", place=place)
                self._learn("needle", f"mentor of {student}", number, value=mentor)
                self.students[mentor].append((student, number))
            case ["the", "paint", "of", thing, "is", colour]:
                self._learn("glossary", f"note of {thing}", number, via=f"note {colour}", place=place)
            case ["the", thing, "is", "theirs"]:
                self._learn("coreference", f"owner of {thing}", number, via="they", place=place)
            case ["note", colour, "means", value]:
                self._learn(None, f"note {colour}", number, value=value)
            case ["now", name, "came"]:
                self._learn(None, "they", number, value=name)
            case [key, "gets", word] if not word.isdigit():
                if found := self.known.get(f"value of {word}"):
                    self.resolved.append(Resolved(number, place, found[0]))
                    self.counts["poll", key].append((found[0], number))
            case [key, "saw" | "holds" | "gets" as verb, word]:
                self.counts[_COUNTING[verb], key].append((word, number))

    def _learn(
        self, task: Task | None, phrase: str, number: int, *, value: str = "", via: str = "", place: int = 0
    ) -> None:
        """`phrase` is `value`, or whatever is known of the phrase `via`; the questions of no task are not asked."""
        sources: tuple[int, ...] = ()
        if via:
            if via not in self.known:
                return
            value, sources = self.known[via]
            self.resolved.append(Resolved(number, place, value))
        self.known[phrase] = value, (*sources, number)
        if task:
            text = ask(phrase)
            self.questions[text] = Question(task, text, value, (*sources, number))


_COUNTING: dict[str, Task] = {"saw": "frequent", "holds": "common", "gets": "vote"}
_COUNTED: dict[Task, str] = {
    "frequent": "most seen by {}", "common": "common in {}", "vote": "most given to {}",
    "poll": "most given to {}",
}  # fmt: skip


def make_glossary(rng: Random, colours: Sequence[str], count: int) -> str:
    """An instruction of `count` notes, each giving one of `colours` a number."""
    return " ".join(f"note {colour} means {rng.choice(vocabulary.NUMBERS)} ." for colour in rng.sample(colours, count))


def make_documents(
    rng: Random, facts: Facts, *, orders: Sequence[Order], num_tokens: int, colours: Sequence[str] = (),
    max_hops: int = MAX_HOPS,
) -> tuple[str, ...]:  # fmt: skip
    """Documents of about `num_tokens` words together, with `facts` at random places among filler.

    Each chain of facts can be read in one of `orders` (permutations of the documents), drawn for each chain; in
    another order it may not be answerable. `colours` are the paints of the `glossary` facts; a variable is at most
    `max_hops` other variables away from its number.

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
    for chain in _chains(rng, facts, colours, max_hops):
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


def _chains(rng: Random, facts: Facts, colours: Sequence[str], max_hops: int) -> Iterator[list[str]]:
    """Lists of sentences; those of one list are to be read in this order."""
    things, names, variables = (
        iter(rng.sample(words, len(words))) for words in (vocabulary.THINGS, vocabulary.NAMES, vocabulary.VARIABLES)
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
        pair = [f"the home of {mentor} is {rng.choice(vocabulary.CITIES)} .", f"the mentor of {student} is {mentor} ."]
        yield pair if rng.random() < 0.5 else pair[::-1]
    for _ in range(facts.glossary):
        yield [f"the paint of {next(things)} is {rng.choice(colours)} ."]
    for number in range(facts.coreference):
        yield [f"the {next(things)} is theirs ."]
        if number % COMPANY == 0:
            yield [f"now {next(names)} came ."]
    for _ in range(facts.frequent):
        yield from _said(rng, f"{next(names)} saw", vocabulary.NONSENSE_WORDS, _SKEWED[facts.size - 1], facts.size - 1)
    for _ in range(facts.common):
        often = [2 + facts.size] * FAVOURITES
        yield from _said(rng, f"{next(things)} holds", vocabulary.NONSENSE_WORDS, often, facts.size)
    for _ in range(facts.vote):
        yield from _said(rng, f"{next(things)} gets", vocabulary.NUMBERS, [rng.randint(3, 4)], rng.randint(0, 2))
    for _ in range(facts.poll):
        thing, (most, *others) = next(things), rng.sample(vocabulary.NUMBERS, POLLED - 2)
        for value in (most, most, most, *others):
            name = next(variables)
            yield [f"{name} = {value} .", f"{thing} gets {name} ."]


def _said(rng: Random, beginning: str, words: Sequence[str], counts: Sequence[int], others: int) -> Iterator[list[str]]:
    """Words said as often as `counts` say, and `others` once each."""
    often = (*counts, *[1] * others)
    for word, count in zip(rng.sample(words, len(often)), often, strict=True):
        for _ in range(count):
            yield [f"{beginning} {word} ."]


def _filler(rng: Random) -> str:
    scene = f"the {rng.choice(vocabulary.ADJECTIVES)} {rng.choice(vocabulary.PLACES)} {rng.choice(vocabulary.VERBS)}"
    return f"{scene} ." if rng.random() < 0.5 else f"{scene} near the {rng.choice(vocabulary.PLACES)} ."
