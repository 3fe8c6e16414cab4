from dataclasses import asdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvgraft.testbed import MODEL_DIR, vocabulary
from kvgraft.testbed.tasks import Facts, Question, make_documents, make_glossary, read

FACTS = Facts(needle=4, variable=12, hop=3, glossary=4, coreference=5)
COLOURS = vocabulary.COLOURS[:3]


def answers(*segments: str) -> dict[str, str]:
    return {
        question.text.removeprefix("question : ").removesuffix(" is"): question.answer for question in read(segments)
    }


def test_vocabulary_is_the_models():
    assert set(AutoTokenizer.from_pretrained(MODEL_DIR).get_vocab()) == vocabulary.VOCABULARY


@pytest.mark.parametrize(
    ("segments", "question"),
    [
        (["the code of lamp is 42 ."], Question("needle", "code of lamp", "42", (0,))),
        (["x5 = 66 .", "x7 = 10 . x33 = x5 .", "x2 = x33 ."], Question("variable", "value of x2", "66", (0, 1, 2))),
        (
            ["the home of greta is turin .", "the mentor of hope is greta ."],
            Question("hop", "home of mentor of hope", "turin", (0, 1)),
        ),
        (["note red means 51 .", "the paint of lamp is red ."], Question("glossary", "note of lamp", "51", (0, 1))),
        (
            ["now bob came . now dina came .", "the old road slept . the chest is theirs ."],
            Question("coreference", "owner of chest", "dina", (0, 1)),
        ),
    ],
)
def test_read_answers_each_task(segments: list[str], question: Question):
    text = f"question : {question.text} is"
    assert next(found for found in read(segments) if found.text == text) == Question(
        question.task, text, question.answer, question.segments
    )


@pytest.mark.parametrize(
    ("early", "late", "phrase"),
    [
        ("x5 = 66 .", "x33 = x5 .", "value of x33"),
        ("the home of greta is turin .", "the mentor of hope is greta .", "home of mentor of hope"),
        ("note red means 51 .", "the paint of lamp is red .", "note of lamp"),
        ("now dina came .", "the chest is theirs .", "owner of chest"),
    ],
)
def test_read_does_not_look_ahead(early: str, late: str, phrase: str):
    assert phrase in answers(early, late)
    assert phrase not in answers(late, early)


def test_another_order_has_another_owner():
    one, two, holds = "now bob came .", "now dina came .", "the chest is theirs ."
    assert answers(one, two, holds) == {"owner of chest": "dina"}
    assert answers(two, one, holds) == {"owner of chest": "bob"}


def test_crosses():
    assert Question("variable", "", "", (1, 1, 2)).crosses
    assert not Question("variable", "", "", (1, 1)).crosses


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_every_fact_can_be_asked_in_its_order(seed: int, num_documents: int):
    rng = Random(seed)
    order = tuple(rng.sample(range(num_documents), num_documents))
    documents = make_documents(rng, FACTS, orders=[order], num_tokens=400, colours=COLOURS)
    questions = read([make_glossary(rng, COLOURS, 3), *(documents[number] for number in order)])
    counts = {task: sum(question.task == task for question in questions) for task in asdict(FACTS)}
    assert counts.pop("coreference") <= FACTS.coreference  # things before the first name have no owner
    assert counts == {"needle": 4 + 3, "variable": 12, "hop": 3, "glossary": 4}  # homes can be asked for, too
    words = " ".join(documents).split()
    assert vocabulary.VOCABULARY.issuperset(words)
    assert 400 <= len(words) < 408


def test_each_order_has_chains_of_its_own():
    one, two = make_documents(Random(5), Facts(variable=40), orders=[(0, 1), (1, 0)], num_tokens=300)
    crossing = [{question.text for question in read(order) if question.crosses} for order in ((one, two), (two, one))]
    assert crossing[0] - crossing[1]
    assert crossing[1] - crossing[0]


def test_same_seed_same_documents():
    first, again, other = (
        make_documents(Random(seed), FACTS, orders=[(0, 1)], num_tokens=300, colours=COLOURS) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("facts", "arguments", "message"),
    [
        (Facts(needle=3), {"orders": [(0, 1), (0, 2)]}, "permutations"),
        (Facts(needle=3), {"orders": []}, "permutations"),
        (Facts(needle=3), {"orders": [()]}, "permutations"),
        (Facts(needle=3), {"orders": [(0,)], "num_tokens": 20}, "take 21 words, got 20"),
        (Facts(glossary=1), {"orders": [(0,)]}, "colours"),
    ],
)
def test_make_documents_refuses(facts: Facts, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_documents(Random(0), facts, **{"num_tokens": 100, **arguments})


@pytest.mark.parametrize("facts", [{"needle": 60, "glossary": 20}, {"hop": 40}, {"variable": 49}])
def test_facts_refuse_more_than_the_vocabulary_holds(facts: dict[str, int]):
    with pytest.raises(ValueError, match="at most"):
        Facts(**facts)
