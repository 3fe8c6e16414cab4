"""The suite of questions about similar documents."""

import re

import pytest

from kvgraft_lab.evaluate.metrics import SCORES
from kvgraft_lab.evaluate.tasks import PATTERNS, Ask, Item, Shape, find_suites
from kvgraft_lab.evaluate.tasks.alike import make_alike
from kvgraft_lab.evaluate.tasks.alike_forms import FORMS, NAMES

SHAPE = Shape(length=700, num_segments=4)
NUMBER = re.compile(r"\b[1-9]\d\b")  # of the fact that is compared


@pytest.fixture(scope="module")
def items() -> tuple[Item, ...]:
    return make_alike().items(7, len(PATTERNS), SHAPE)


def documents(ask: Ask) -> list[str]:
    return [text for text in ask.segments[1:-1] if not text.startswith("Part ")]


def kinds(item: Item) -> dict[str, list[Ask]]:
    found: dict[str, list[Ask]] = {}
    for ask in item.phase_2:
        found.setdefault(ask.task.split(", ")[1], []).append(ask)
    return found


def test_every_form_comes_in_every_pattern_with_four_questions(items: tuple[Item, ...]):
    found = {(item.phase_2[0].task.split(", ")[0], item.pattern) for item in items}
    assert found == {(form, pattern) for form in FORMS for pattern in PATTERNS}
    for item in items:
        assert {kind: len(asks) for kind, asks in kinds(item).items()} == {
            "one": 2,
            "compare": 1,
            "count": 1,
        }


def test_a_value_stands_in_one_document_with_the_entity_that_is_asked_for(items: tuple[Item, ...]):
    for item in items:
        for ask in kinds(item)["one"]:
            [value] = ask.answers
            [holder] = [text for text in documents(ask) if value in text]
            names = [name for name in NAMES if name.lower() in ask.segments[-1].lower()]
            assert any(name.lower() in holder.lower() for name in names)
            assert value not in ask.segments[-1] + ask.begun


def test_the_greater_number_is_the_answers(items: tuple[Item, ...]):
    for item in items:
        [ask] = kinds(item)["compare"]
        both = {}
        for text in documents(ask):
            named = [name for name in NAMES if name.lower() in text.lower()]
            asked = [name for name in named if name.lower() in ask.segments[-1].lower()]
            rest = [
                sentence
                for sentence in FORMS[ask.task.split(", ")[0]].rest
                if NUMBER.search(sentence)
            ]
            for sentence in rest:
                text = text.replace(sentence, "")
            if asked:
                both[asked[0]] = int(NUMBER.findall(text)[0])
        greater = max(both, key=lambda name: both[name])
        assert len(both) == 2
        assert greater.lower() in ask.answers[0].lower()


def test_what_is_counted_stands_so_often(items: tuple[Item, ...]):
    for item in items:
        [ask] = kinds(item)["count"]
        place = next(
            word for word in re.findall(r"[A-Z]\w+", ask.segments[-1]) if word in str(PLACES)
        )
        count = sum(place in text for text in documents(ask))
        assert SCORES[ask.metric](f" {count}.", ask.answers) == 1.0
        assert SCORES[ask.metric](f" {count + 1}.", ask.answers) == 0.0


PLACES = {"Trondheim", "Porto", "Ghent", "Krakow", "Malaga", "Turin", "Zurich", "Bergen"}


@pytest.mark.parametrize(
    ("length", "segments"), [(256, 2), (512, 4), (1024, 20), (1500, 30), (2000, 4)]
)
def test_documents_have_about_the_length_that_is_asked_for(length: int, segments: int):
    for item in make_alike().items(1, 1, Shape(length, segments)):
        texts = documents(item.phase_2[0])
        wanted = max(150, (length - 120) * 4 / segments)  # the facts alone take some
        assert len(texts) == segments
        assert all(len(text) < 1.8 * wanted + 100 for text in texts)
        assert sum(map(len, texts)) > 0.7 * segments * min(wanted, (length - 120) * 4 / segments)


def test_equal_seeds_give_equal_items_and_splits_have_other_entities():
    assert make_alike().items(7, 2, SHAPE) == make_alike().items(7, 2, SHAPE)
    assert make_alike().items(8, 2, SHAPE) != make_alike().items(7, 2, SHAPE)
    names = [
        {
            name
            for item in make_alike(split).items(3, 6, SHAPE)
            for name in NAMES
            if name in str(item.phase_1)
        }
        for split in ("dev", "test")
    ]
    assert not names[0] & names[1] - {"Violet"}
    assert make_alike("dev").description.endswith("(dev split)")


def test_it_is_found_by_name_and_says_what_it_cannot_do():
    assert [suite.name for suite in find_suites("alike", "test")] == ["alike"]
    with pytest.raises(
        ValueError, match=r"alike \(dev split\) has 30 entities, and 31 segments are wanted"
    ):
        make_alike("dev").items(0, 1, Shape(4096, 31))
    with pytest.raises(ValueError, match="unknown split 'odd'"):
        make_alike("odd")
