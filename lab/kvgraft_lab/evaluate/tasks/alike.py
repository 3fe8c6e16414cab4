"""Questions about similar documents.

They are notes, FAQ entries, table rows, tickets and functions, each about another entity in the
same words with other values; and profiles, which use other words.

one        a value of one document
compare    the document with the greater number, of two
count      the number of documents with a value

A model can answer only if it knows which value belongs to which document. KV of documents that were
computed alone is often wrong about this (`prefill.contrast`).
"""

from collections.abc import Sequence
from functools import partial
from random import Random

from kvgraft_lab.evaluate.tasks.alike_forms import FORMS, NAMES, PLACES, Form
from kvgraft_lab.evaluate.tasks.items import Ask, Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.texts import (
    CHARACTERS,
    INSTRUCTION,
    ROOM,
    SPLITS,
    check_split,
    of_split,
    write_item,
)

# values of the counted fact in one prompt
SHARED = 3
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def make_alike(split: str = "all") -> Suite:
    """Return the suite. Entities of the splits `dev` and `test` have different names.

    Raises:
        ValueError: an unknown split.
    """
    description = f"similar documents{of_split(check_split(split))}"
    return Suite("alike", description, tuple(FORMS), partial(_write, split), real_text=True)


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write four questions about documents of one form."""
    form, count = FORMS[task], shape.num_segments
    names = NAMES if split == "all" else NAMES[SPLITS.index(split) - 1 :: 2]
    if count > len(names):
        raise ValueError(
            f"alike{of_split(split)} has {len(names)} entities, and {count} segments are wanted"
        )

    entities = [form.entity.format(n=name, lower=name.lower()) for name in rng.sample(names, count)]
    first, last = (rng.sample(values, count) for values in form.values)
    places = rng.sample(PLACES, SHARED)
    shared = [rng.choice(places) for _ in entities]
    numbers = [str(number) for number in rng.sample(range(12, 99), count)]

    size = (shape.length - ROOM) * CHARACTERS // count
    facts = zip(first, shared, numbers, last, strict=True)
    documents = [
        _document(rng, form, entity, values, size)
        for entity, values in zip(entities, facts, strict=True)
    ]

    one, other = rng.sample(range(count), 2)
    asks = [
        _one(task, form.questions[0], entities[one], first[one]),
        _one(task, form.questions[1], entities[other], last[other]),
        _compare(task, form, entities, numbers, rng.sample(range(count), 2)),
        _count(task, form, shared, rng.choice(places)),
    ]
    return write_item(rng, INSTRUCTION, documents, pattern, asks)


def _document(rng: Random, form: Form, entity: str, values: Sequence[str], size: int) -> str:
    """Write about `size` characters: all facts, the first one first, among sentences without
    information.
    """
    facts = [
        rng.choice(wordings).format(e=entity, v=value)
        for wordings, value in zip(form.facts, values, strict=True)
    ]
    rest: list[str] = []
    while (missing := size - sum(map(len, facts)) - sum(map(len, rest))) > 0:
        sentences = form.rest if form.in_order else rng.sample(form.rest, len(form.rest))
        for sentence in sentences:
            if missing > 0:
                rest.append(sentence)
                missing -= len(sentence)

    text, places = [facts[0]], sorted(rng.randrange(len(rest) + 1) for _ in facts[1:])
    for number in range(len(rest) + 1):
        text += [fact for fact, place in zip(facts[1:], places, strict=True) if place == number]
        text += rest[number : number + 1]
    return form.separator.join(text)


def _one(task: str, question: tuple[str, str], entity: str, value: str) -> Ask:
    asked, begun = (text.format(e=entity) for text in question)
    return _ask(f"{task}, one", asked, begun, (value,), 5)


def _compare(
    task: str, form: Form, entities: Sequence[str], numbers: Sequence[str], both: Sequence[int]
) -> Ask:
    greater = max(both, key=lambda number: int(numbers[number]))
    a, b = (entities[number] for number in both)
    question, begun = form.compare
    return _ask(f"{task}, compare", question.format(a=a, b=b), begun, (entities[greater],), 6)


def _count(task: str, form: Form, shared: Sequence[str], value: str) -> Ask:
    count = shared.count(value)
    answers = (str(count), *NUMBERS[count : count + 1])
    return _ask(f"{task}, count", form.count.format(v=value), "The number is", answers, 4)


def _ask(task: str, question: str, begun: str, answers: tuple[str, ...], max_tokens: int) -> Ask:
    asked = (f"Question: {question}\nAnswer:",)
    return Ask(task, asked, answers, max_tokens, "contains_any", begun=f" {begun}")
