from collections import Counter

import pytest

from kvgraft_lab.evaluate.tasks import GENERATED, PATTERNS, Item, Shape, find_suites
from kvgraft_lab.testbed import vocabulary
from kvgraft_lab.testbed.tasks import read

SHAPE = Shape(length=700, num_segments=5)
ITEMS = {name: suite.items(7, len(PATTERNS), SHAPE) for name, suite in GENERATED.items()}
each_suite = pytest.mark.parametrize("name", GENERATED)


def words(*texts: str) -> list[str]:
    return " ".join(texts).split()


@each_suite
def test_every_task_comes_in_every_pattern(name: str):
    found = Counter((ask.task, item.pattern) for item in ITEMS[name] for ask in item.phase_2)
    assert set(found) == {(task, pattern) for task in GENERATED[name].tasks for pattern in PATTERNS}


@each_suite
def test_few_items_take_turns_through_all_patterns(name: str):
    patterns = [item.pattern for item in GENERATED[name].items(7, 2, SHAPE)]
    assert patterns == [PATTERNS[number % len(PATTERNS)] for number in range(len(patterns))]


@each_suite
def test_answers_follow_from_the_prompt(name: str):
    for item in ITEMS[name]:
        for ask in item.phase_2:
            *text, question = ask.segments
            known = {q.text: q.answer for q in read(text)}
            codes = [f"question : code of {key} ? answer :" for key in question.split()[4:-3]]
            together = question.startswith("question : codes of")
            assert ask.answers == (
                tuple(known[code] for code in codes) if together else tuple(known[question].split())
            )
            assert len(ask.answers) < ask.max_tokens
            assert set(words(*ask.segments)) <= set(vocabulary.VOCABULARY)
            assert 0.9 * SHAPE.length < len(words(*ask.segments)) < 1.2 * SHAPE.length


@each_suite
def test_segments_move_and_the_instruction_is_new(name: str):
    for item in ITEMS[name]:
        for ask in item.phase_2:
            instruction, *rest = ask.segments
            read_before = [segment for prompt in item.phase_1 for segment in prompt]
            assert instruction not in read_before
            assert sum(segment in read_before for segment in rest) >= 1


def known_segments(item: Item) -> list[bool]:
    """Of the prompt's segments but the instruction: were they read before?"""
    before = {segment for prompt in item.phase_1 for segment in prompt}
    return [segment in before for segment in item.phase_2[0].segments[1:]]


@pytest.mark.parametrize(
    ("pattern", "num_read", "known"),
    [
        ("alone", 5, [True] * 5 + [False]),
        ("reordered", 1, [True] * 5 + [False]),
        ("instruction", 1, [True] * 5 + [False]),
        ("interleaved", 1, [True, False, True, False, True, False]),
        ("between", 1, [False, True] * 5 + [False]),
        ("tail", 4, [True] * 6),
    ],
)
def test_patterns(pattern: str, num_read: int, known: list[bool]):
    [item] = [item for item in ITEMS["multihop"] if item.pattern == pattern][:1]
    assert len(item.phase_1) == num_read
    assert known_segments(item) == known


def test_most_questions_need_several_segments():
    asks = [
        ask
        for name in ("ruler", "multihop", "instruction")
        for item in ITEMS[name]
        for ask in item.phase_2
    ]
    assert sum(ask.crosses for ask in asks) > 0.9 * len(asks)


def test_equal_arguments_give_equal_items():
    suite = GENERATED["ruler"]
    assert suite.items(7, 2, SHAPE) == suite.items(7, 2, SHAPE) != suite.items(8, 2, SHAPE)
    assert suite.items(7, 3, SHAPE)[:2] == suite.items(7, 2, SHAPE)[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 100}, "length must be at least 256 tokens, got 100"),
        ({"num_segments": 1}, "num_segments must be at least 2, got 1"),
        ({"patterns": ("sideways",)}, "unknown pattern 'sideways': choose from alone, reordered"),
        ({"patterns": ()}, "at least one"),
    ],
)
def test_shapes_that_cannot_be(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Shape(**arguments)


def test_suites_are_found_by_name():
    assert [suite.name for suite in find_suites("agents, ruler,agents")] == ["agents", "ruler"]
    assert [suite.name for suite in find_suites("all")] == list(GENERATED)
    for names, message in (
        ("rules", "unknown suite 'rules': choose from all, ruler"),
        (" ,", "names none"),
    ):
        with pytest.raises(ValueError, match=message):
            find_suites(names)
    with pytest.raises(ValueError, match="items must be at least 1, got 0"):
        GENERATED["ruler"].items(0, 0, SHAPE)
