"""Truth about answers: the questions that a reader of the testbed's texts can answer.

`read` goes through segments from left to right as the model does. The same documents in another
order have the questions and the answers of that order. `documents` writes the texts.

Questions are asked as `question : code of lamp ? answer :`.

    task          facts                                            question -> answer
    needle        the code of lamp is 42 .                         code of lamp -> 42
    needles       four of them                                     codes of lamp bell -> 42 17
    variable      x5 = 66 . ... x33 = x5 .                         value of x33 -> 66
    hop           the home of greta is turin . ...
                  the mentor of hope is greta .                    home of mentor of hope -> turin
    hop_reversed  the same facts, the mentor first
    glossary      note grey means 51 . ... the paint of lamp is grey . note of lamp -> 51
    coreference   now dina came . ... the chest is theirs .        owner of chest -> dina
    frequent      ada saw dax . (many times, skewed)               most seen by ada -> dax wug
    common        drum holds fep . (two words often)               common in drum -> fep tov
    vote          bell gets 42 . (by several, not unanimously)     most given to bell -> 42
    poll          x5 = 66 . ... bell gets x5 . (by several)        most given to bell -> 66
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
# number of codes in one `needles` question
NEEDLES = 4
# number of words in the answer of a `frequent` or `common` question
FAVOURITES = 2


@dataclass(frozen=True)
class Question:
    """One question, its answer, and the segment of every fact that it needs, in reading order.

    Attributes:
        via: intermediate result of a `hop_reversed` question, else empty.
    """

    task: Task
    text: str
    answer: str
    segments: tuple[int, ...]
    via: str = ""

    @property
    def crosses(self) -> bool:
        """True if the facts are in more than one segment."""
        return len(set(self.segments)) > 1


@dataclass(frozen=True)
class Resolved:
    """Meaning of a word from the text before it: the word at `place` of `segment` means `value`."""

    segment: int
    place: int
    value: str


def read(segments: Sequence[str]) -> tuple[Question, ...]:
    """Return every question that one reading of `segments` from left to right can answer, except
    `needles`.
    """
    reader = _Reader()
    reader.read(segments)
    return (*reader.questions.values(), *reader.counted())


def resolve(segments: Sequence[str]) -> tuple[Resolved, ...]:
    """Return the words whose meaning depends on earlier text: a variable has a value, `theirs` a
    name, and so on.
    """
    reader = _Reader()
    reader.read(segments)
    return tuple(reader.resolved)


def together(needles: Sequence[Question]) -> Question:
    """Return one `needles` question for the answers of several `needle` questions about codes."""
    keys = " ".join(key_of(question) for question in needles)
    return Question(
        "needles",
        ask(f"codes of {keys}"),
        " ".join(question.answer for question in needles),
        tuple(sorted(number for question in needles for number in question.segments)),
    )


def is_code(question: Question) -> bool:
    """Return whether `together` accepts the question."""
    return question.text.startswith("question : code of ")


def ask(phrase: str) -> str:
    """Return the question for a phrase, up to the beginning of its answer."""
    return f"question : {phrase} ? answer :"


def key_of(question: Question) -> str:
    """Return the last word of a question's phrase."""
    return question.text.split()[-4]


class _Reader:
    """Knowledge after reading some text."""

    def __init__(self) -> None:
        # phrase -> (answer, segments of its facts)
        self.known: dict[str, tuple[str, tuple[int, ...]]] = {}
        # mentor -> (student, segment)
        self.students: dict[str, list[tuple[str, int]]] = defaultdict(list)
        # -> (word, segment)
        self.counts: dict[tuple[Task, str], list[tuple[str, int]]] = defaultdict(list)
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
        """Yield questions about the number of repetitions, where the answer is clear."""
        for (task, key), said in self.counts.items():
            ranked = Counter(word for word, _ in said).most_common()
            asked = FAVOURITES if task in ("frequent", "common") else 1
            top, rest = ranked[:asked], ranked[asked:]
            if len(top) < asked or (rest and top[-1][1] < 2 * rest[0][1]):
                continue
            if task == "frequent" and len({count for _, count in top}) < asked:
                continue
            answer = " ".join(word for word, _ in top)
            yield Question(
                task, ask(_COUNTED[task].format(key)), answer, tuple(at for _, at in said)
            )

    def _hear(self, words: list[str], number: int, place: int) -> None:
        """Process one sentence of segment `number`, whose last word is at `place`."""
        match words:
            case [name, "=", value] if value.isdigit():
                self._learn("variable", f"value of {name}", number, value=value)
            case [name, "=", source]:
                self._learn(
                    "variable", f"value of {name}", number, via=f"value of {source}", place=place
                )
            case ["the", "code", "of", key, "is", value]:
                self._learn("needle", f"code of {key}", number, value=value)
            case ["the", "home", "of", mentor, "is", city]:
                self._learn("needle", f"home of {mentor}", number, value=city)
                for student, at in self.students[mentor]:
                    text = ask(f"home of mentor of {student}")
                    self.questions[text] = Question(
                        "hop_reversed", text, city, (at, number), mentor
                    )
            case ["the", "mentor", "of", student, "is", mentor]:
                self._learn(
                    "hop",
                    f"home of mentor of {student}",
                    number,
                    via=f"home of {mentor}",
                    place=place,
                )
                self._learn("needle", f"mentor of {student}", number, value=mentor)
                self.students[mentor].append((student, number))
            case ["the", "paint", "of", thing, "is", colour]:
                self._learn(
                    "glossary", f"note of {thing}", number, via=f"note {colour}", place=place
                )
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
        self,
        task: Task | None,
        phrase: str,
        number: int,
        *,
        value: str = "",
        via: str = "",
        place: int = 0,
    ) -> None:
        """Record that `phrase` has a value: `value`, or that of the phrase `via`. Without a task no
        question is asked.
        """
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
