"""The suite of questions about the documentation of installed packages."""

import re
from importlib.metadata import version
from itertools import chain

import pytest

from kvgraft_lab.evaluate.metrics import normalise
from kvgraft_lab.evaluate.tasks import PATTERNS, Ask, Item, Shape, find_suites
from kvgraft_lab.evaluate.tasks.docs import make_docs
from kvgraft_lab.evaluate.tasks.packages import docstrings, prose

SHAPE = Shape(length=1200, num_segments=5)
TASKS = ("cloze", "continuation")


@pytest.fixture(scope="module")
def items() -> tuple[Item, ...]:
    return make_docs().items(7, len(PATTERNS), SHAPE)


def passages(item: Item) -> list[str]:
    """The reused segments of an item."""
    known = set(chain(*item.phase_1))
    *texts, _ = item.phase_2[0].segments[1:]
    return [text for text in texts if item.pattern == "interleaved" or text in known]


def asks(items: tuple[Item, ...]) -> list[tuple[Item, Ask]]:
    return [(item, ask) for item in items for ask in item.phase_2]


def joined(text: str) -> str:
    return "".join(text.split())


def words(text: str) -> str:
    return f" {normalise(text)} "


def test_every_task_comes_in_every_pattern(items: tuple[Item, ...]):
    assert {(ask.task, item.pattern) for item, ask in asks(items)} == {
        (t, p) for t in TASKS for p in PATTERNS
    }
    assert sum(len(item.phase_2) for item in items) > 0.95 * 4 * len(items)


def test_each_answer_stands_in_one_passage_and_not_in_its_question(items: tuple[Item, ...]):
    for item, ask in asks(items):
        texts, [answer] = passages(item), ask.answers
        assert len(texts) == SHAPE.num_segments
        assert " ".join(map(words, texts)).count(words(answer)) == 1
        assert words(answer) not in words(ask.segments[-1] + ask.begun)


def test_what_is_asked_goes_on_as_one_passage_does(items: tuple[Item, ...]):
    for item, ask in asks(items):
        [answer], [about] = (
            ask.answers,
            re.findall("What does the text say about (.*)\\?\nAnswer:", ask.segments[-1]),
        )
        found = [text for text in passages(item) if joined(ask.begun + answer) in joined(text)]
        assert len(found) == 1
        assert f"{about}\n" in found[0]


def test_prompts_have_about_the_length_and_the_segments_that_are_wanted():
    for shape in (SHAPE, Shape(length=3000, num_segments=3)):
        for item in make_docs().items(1, 1, shape):
            texts = passages(item)
            characters = sum(map(len, texts))
            assert len(texts) == shape.num_segments
            assert 0.6 * shape.length < characters / 4 + 120 < 1.15 * shape.length


def test_equal_arguments_give_equal_items(items: tuple[Item, ...]):
    again = make_docs().items(7, len(PATTERNS), SHAPE)
    assert again == items
    assert make_docs().items(8, len(PATTERNS), SHAPE) != items


def test_splits_have_no_sentence_in_common_at_any_length():
    sentences = {}
    for split in ("dev", "test"):
        texts = [
            passage
            for shape in (Shape(700, 2), SHAPE, Shape(2000, 8))
            for item in make_docs(split).items(3, 12, shape)
            for passage in passages(item)
        ]
        sentences[split] = {
            one for text in texts for line in text.splitlines()[1:] for one in line.split(". ")
        }
        assert len(sentences[split]) > 200
    titles = {one for one in sentences["dev"] & sentences["test"] if len(one) > 60}
    assert titles == set()


def test_what_was_read_is_said_with_its_version():
    assert f"numpy {version('numpy')}" in make_docs().description
    assert make_docs("dev").description.endswith("(dev split)")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(600, 8), "length must be at least 621 tokens for 8 segments of docs, got 600"),
        (
            Shape(10**7, 2),
            r"docs has 0 passages of .* and 2 segments are wanted: choose a smaller length",
        ),
    ],
)
def test_shapes_that_cannot_be(shape: Shape, message: str):
    with pytest.raises(ValueError, match=message):
        make_docs().items(0, 1, shape)


def test_it_is_found_by_name_with_a_split():
    [suite] = find_suites("docs", "test")
    assert (suite.name, suite.tasks, suite.real_text) == ("docs", TASKS, True)
    with pytest.raises(ValueError, match="unknown split 'train': choose from all, dev, test"):
        find_suites("docs", "train")
    with pytest.raises(ValueError, match="split dev: what is generated has none, as ruler"):
        find_suites("docs,ruler", "dev")


def test_docstrings_are_read_without_running_anything():
    source = '''"""A module."""
raise SystemExit("was run")
class Public:
    """A class."""
    def method(self):
        """A method."""
        def inner(): "Not public."
    def _private(self): "Hidden."
def function(): pass
'''
    assert list(docstrings(source)) == [
        ("", "A module."),
        ("Public", "A class."),
        ("Public.method", "A method."),
    ]


def test_only_prose_is_kept():
    text = """\
Return the :class:`~collections.Counter` of a [stream](https://example.org) of ``words`` [1]_.
It goes on in this line, e.g. Here, and ends.

Parameters
----------
words : list
    The words that are counted, whatever they are.

- An item of a list that looks like a sentence.

>>> Counter("This is code. It is left out.")

```
This is code as well, and it has two
```

    This paragraph is indented, so it may be code.

Too short.

Notes
-----
The heading of this paragraph is not part of it.
"""
    assert list(prose(text)) == [
        "Return the collections.Counter of a stream of words.",
        "It goes on in this line, e.g. Here, and ends.",
        "The heading of this paragraph is not part of it.",
    ]
