"""Texts with a needle, and a cue that announces it: in the language of the testbed, or in
English.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvgraft_lab.evaluate.tasks.packages import read_documentation
from kvgraft_lab.evaluate.tasks.texts import CHARACTERS
from kvgraft_lab.testbed import tasks
from kvgraft_lab.testbed.documents import Facts, make_documents, make_glossary

# approximate tokens of a text
NUM_TOKENS = 600
CITIES = ("Oslo", "Turin", "Quito", "Dakar", "Perth", "Kyoto", "Porto", "Cairo")


@dataclass(frozen=True)
class NeedleText:
    """A text (`before`, `needle`, `after`), the cue that the needle matters, and the question for
    it.
    """

    cue: str
    before: str
    needle: str
    after: str
    question: str

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return self.before + self.needle + self.after


NeedleMaker = Callable[[int], NeedleText]
"""From a seed."""


def fact_needle(seed: int) -> NeedleText:
    """Return a fact whose meaning the cue gives: `the paint of lamp is grey`, `note grey means 51
    .`
    """
    rng = Random(seed)  # noqa: S311
    colours = ["grey", "violet", "teal"]
    facts = Facts(glossary=1, needle=3)
    [text] = make_documents(rng, facts, orders=[(0,)], num_tokens=NUM_TOKENS, colours=colours)
    notes = make_glossary(rng, colours, len(colours))
    [question] = [q for q in tasks.read((notes, text)) if q.task == "glossary"]
    words = text.split()
    fact = ["the", "paint", "of", tasks.key_of(question), "is"]
    start = next(i for i in range(len(words)) if words[i : i + 5] == fact)
    before, needle, after = (
        " ".join(part) for part in (words[:start], words[start : start + 6], words[start + 6 :])
    )
    return NeedleText(notes, f"{before} ", needle, f" {after}", question.text)


def english_needle(seed: int) -> NeedleText:
    """Return a secret number in documentation of an installed package. The cue announces the
    question for it.
    """
    rng = Random(seed)  # noqa: S311
    wanted = NUM_TOKENS * CHARACTERS
    texts = [" ".join(sentence for _, sentence in one.sentences) for one in read_documentation()]
    text = rng.choice([text for text in texts if len(text) > wanted])
    start = text.index(". ", rng.randrange(len(text) - wanted)) + 2
    middle = text.index(". ", start + rng.randrange(wanted // 4, wanted // 2)) + 2
    city, number = rng.choice(CITIES), rng.randrange(1000, 10_000)
    return NeedleText(
        f"You will be asked for the secret number of {city}.",
        text[start:middle],
        f"The secret number of {city} is {number}.",
        f" {text[middle : start + wanted]}",
        f"Question: What is the secret number of {city}?\nAnswer:",
    )
