from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvgraft_lab.testbed import MODEL_DIR, vocabulary
from kvgraft_lab.testbed.documents import POLLED, Facts, make_documents, make_glossary
from kvgraft_lab.testbed.tasks import (
    NEEDLES,
    Question,
    Resolved,
    ask,
    is_code,
    read,
    resolve,
    together,
)
from properties import examples

FACTS = Facts(
    needle=4, variable=12, hop=3, glossary=4, coreference=5, frequent=2, common=1, vote=2, poll=2
)
COLOURS = vocabulary.COLOURS[:3]


def answers(*segments: str) -> dict[str, str]:
    return {
        question.text.removeprefix("question : ").removesuffix(" ? answer :"): question.answer
        for question in read(segments)
    }


def test_vocabulary_is_the_models():
    ids = AutoTokenizer.from_pretrained(MODEL_DIR).get_vocab()
    assert sorted(ids, key=ids.__getitem__) == list(vocabulary.VOCABULARY)


@pytest.mark.parametrize(
    ("segments", "question"),
    [
        (["the code of lamp is 42 ."], Question("needle", "code of lamp", "42", (0,))),
        (
            ["x5 = 66 .", "x7 = 10 . x33 = x5 .", "x2 = x33 ."],
            Question("variable", "value of x2", "66", (0, 1, 2)),
        ),
        (
            ["the home of greta is turin .", "the mentor of hope is greta ."],
            Question("hop", "home of mentor of hope", "turin", (0, 1)),
        ),
        (
            ["note red means 51 .", "the paint of lamp is red ."],
            Question("glossary", "note of lamp", "51", (0, 1)),
        ),
        (
            ["now bob came . now dina came .", "the old road slept . the chest is theirs ."],
            Question("coreference", "owner of chest", "dina", (0, 1)),
        ),
    ],
)
def test_read_answers_each_task(segments: list[str], question: Question):
    text = ask(question.text)
    assert next(found for found in read(segments) if found.text == text) == Question(
        question.task, text, question.answer, question.segments
    )


@pytest.mark.parametrize(
    ("early", "late", "phrase"),
    [
        ("x5 = 66 .", "x33 = x5 .", "value of x33"),
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


@examples(40)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_every_fact_can_be_asked_in_its_order(seed: int, num_documents: int):
    rng = Random(seed)
    order = tuple(rng.sample(range(num_documents), num_documents))
    documents = make_documents(rng, FACTS, orders=[order], num_tokens=600, colours=COLOURS)
    questions = read([make_glossary(rng, COLOURS, 3), *(documents[number] for number in order)])
    counts = Counter(question.task for question in questions)
    # things before the first name have no owner
    assert counts.pop("coreference", 0) <= FACTS.coreference
    assert counts.pop("hop", 0) + counts.pop("hop_reversed", 0) == FACTS.hop
    assert counts == {  # homes and mentors can be asked for, too
        "needle": 4 + 2 * 3, "variable": 12 + 2 * POLLED, "glossary": 4,
        "frequent": 2, "common": 1, "vote": 2, "poll": 2,
    }  # fmt: skip
    words = " ".join(documents).split()
    assert set(vocabulary.VOCABULARY).issuperset(words)
    assert 600 <= len(words) < 608


def test_each_order_has_chains_of_its_own():
    one, two = make_documents(
        Random(5), Facts(variable=40), orders=[(0, 1), (1, 0)], num_tokens=300
    )
    crossing = [
        {question.text for question in read(order) if question.crosses}
        for order in ((one, two), (two, one))
    ]
    assert crossing[0] - crossing[1]
    assert crossing[1] - crossing[0]


def test_same_seed_same_documents():
    first, again, other = (
        make_documents(Random(seed), FACTS, orders=[(0, 1)], num_tokens=500, colours=COLOURS)
        for seed in (1, 1, 2)
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


@pytest.mark.parametrize("facts", [{"needle": 60, "glossary": 21}, {"hop": 40}, {"variable": 49}])
def test_facts_refuse_more_than_the_vocabulary_holds(facts: dict[str, int]):
    with pytest.raises(ValueError, match="at most"):
        Facts(**facts)


def test_two_facts_can_be_read_in_either_order():
    home, mentor = "the home of greta is turin .", "the mentor of hope is greta ."
    for segments, task, via in (
        ((home, mentor), "hop", ""),
        ((mentor, home), "hop_reversed", "greta"),
    ):
        [question] = [q for q in read(segments) if "mentor of hope" in q.text and "home" in q.text]
        assert question == Question(task, ask("home of mentor of hope"), "turin", (0, 1), via)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"dax": 5, "wug": 3, "zup": 1, "fep": 1}, "dax wug"),
        ({"dax": 5, "wug": 3}, "dax wug"),
        ({"dax": 5, "wug": 5, "zup": 1}, None),  # no order
        ({"dax": 5, "wug": 3, "zup": 2}, None),  # no clear second
        ({"dax": 5}, None),
    ],
)
def test_frequent_words_are_asked_for_where_they_are_clear(
    said: dict[str, int], answer: str | None
):
    text = " ".join(f"ada saw {word} ." for word, count in said.items() for _ in range(count))
    found = answers(text, "bert saw vask .")
    assert found == ({"most seen by ada": answer} if answer else {})


def test_common_words_and_votes():
    common = " ".join(f"drum holds {word} ." for word in ("dax", "wug") for _ in range(3))
    votes = "bell gets 42 . bell gets 17 . bell gets 42 ."
    found = answers(common + " drum holds fep .", votes)
    assert set(found.pop("common in drum").split()) == {"dax", "wug"}
    assert found == {"most given to bell": "42"}


def test_polls_count_what_was_resolved():
    values, votes = (
        "x1 = 66 . x2 = 66 . x3 = 17 .",
        "bell gets x1 . bell gets x3 . bell gets x2 . bell gets x9 .",
    )
    assert answers(values, votes)["most given to bell"] == "66"
    assert "most given to bell" not in answers(votes, values)
    assert [(found.segment, found.value) for found in resolve([values, votes])] == [
        (1, "66"),
        (1, "17"),
        (1, "66"),
    ]


def test_resolve_says_what_words_mean_by_what_stood_before_them():
    segments = [
        "note red means 51 . x1 = 42 .",
        "doc 12 : x2 = x1 . the paint of lamp is red .",
        "x3 = x2 .",
    ]
    assert resolve(segments) == (Resolved(1, 5, "42"), Resolved(1, 12, "51"), Resolved(2, 2, "42"))
    for found in resolve(segments):
        assert segments[found.segment].split()[found.place] in {"x1", "red", "x2"}


def test_codes_are_asked_for_together():
    text = " ".join(
        f"the code of {thing} is {number} ."
        for thing, number in zip(vocabulary.THINGS, range(10, 14), strict=False)
    )
    codes = [question for question in read([text]) if is_code(question)]
    assert len(codes) == NEEDLES
    question = together(codes)
    assert question.text == ask(f"codes of {' '.join(vocabulary.THINGS[:4])}")
    assert question.answer == "10 11 12 13"
