"""Prompts have the length and the share of known text that was asked for, counted in tokens."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft_lab.testbed import MODEL_DIR
from load import local_tokenizer
from properties import examples
from workload import (
    KINDS,
    Ask,
    Output,
    Shape,
    arrivals,
    make_workload,
    needed_by,
    single_token_words,
    text_of,
)  # fmt: skip

ENCODE, CANDIDATES = local_tokenizer(MODEL_DIR)
WORDS = single_token_words(ENCODE, CANDIDATES)
RUN = 6  # equal tokens in a row are known text: by chance they are not


def answer(ask: Ask) -> str:
    """Words that depend on the request, as many as it may have."""
    return " ".join(Random(prompt(ask)).choices(WORDS, k=ask.max_tokens))


def prompt(ask: Ask) -> str:
    return text_of([piece for message in ask.messages for piece in message.pieces], answer)


def known_share(tokens: list[int], earlier: list[list[int]]) -> float:
    """Share of the tokens that lie in a run of RUN tokens of an earlier text."""
    runs = {tuple(text[i : i + RUN]) for text in earlier for i in range(len(text) - RUN + 1)}
    known = set()
    for i in range(len(tokens) - RUN + 1):
        if tuple(tokens[i : i + RUN]) in runs:
            known |= set(range(i, i + RUN))
    return len(known) / len(tokens)


def replay(asks: tuple[Ask, ...]) -> list[tuple[Ask, list[int], float]]:
    """(request, its tokens, share known when it is sent), for the timed ones."""
    earlier: list[list[int]] = []
    timed = []
    for ask in asks:
        tokens = list(ENCODE(prompt(ask)))
        if ask.timed:
            timed.append((ask, tokens, known_share(tokens, earlier)))
        earlier += [tokens, list(ENCODE(answer(ask)))]
    return timed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "reuse"), [(1000, 0.9), (1500, 0.5), (701, 0.75)])
def test_prompts_are_as_long_and_as_known_as_asked(kind: str, tokens: int, reuse: float):
    shape = Shape(tokens, reuse, max_tokens=24)
    timed = replay(make_workload(kind, shape, 12, WORDS, seed=3))
    assert len(timed) == 12
    longest = max(len(ids) for _, ids, _ in timed)
    assert longest == tokens
    for ask, ids, share in timed:
        assert len(ids) == tokens or (ask.kind == "chat" and len(ids) < tokens)
        assert share == pytest.approx(reuse, abs=0.02), ask.kind


def test_interleaved_prompts_hold_new_text_before_each_document():
    asks = make_workload("rag", Shape(1500, 0.5, 24, interleaved=True), 4, WORDS, seed=3)
    read = [list(ENCODE(prompt(ask))) for ask in asks if not ask.timed]
    for ask in (ask for ask in asks if ask.timed):
        pieces = [list(ENCODE(str(piece))) for piece in ask.messages[0].pieces]
        assert [known_share(piece, read) for piece in pieces] == [0, 1, 0, 1, 0]
        assert sum(map(len, pieces)) == 1500


@pytest.mark.parametrize("kind", ["rag", "chat"])
def test_without_reuse_nothing_is_known(kind: str):
    timed = replay(make_workload(kind, Shape(400, 0.0, 8), 5, WORDS, seed=0))
    assert [share for _, _, share in timed] == [0.0] * 5


@examples(40)
@given(st.integers(200, 3000), st.floats(0, 0.98), st.integers(1, 40), st.integers(0, 9))
def test_rag_prompts_have_exactly_the_length_asked(
    tokens: int, reuse: float, max_tokens: int, seed: int
):
    for ask in make_workload("rag", Shape(tokens, reuse, max_tokens), 3, WORDS, seed):
        if ask.timed:
            assert len(ENCODE(prompt(ask))) == tokens


def test_no_prompt_begins_like_another_one():
    asks = [
        *make_workload("rag", Shape(600, 0.9, 8), 20, WORDS, 0),
        *make_workload("agents", Shape(600, 0.9, 8), 20, WORDS, 0),
    ]
    beginnings = [tuple(ENCODE(prompt(ask))[:16]) for ask in asks]
    assert len(set(beginnings)) == len(beginnings), "the exact prefix cache would know them"


def test_a_chat_grows_by_question_and_answer():
    *session, quote = make_workload("chat", Shape(1200, 0.8, 16), 4, WORDS, 0)
    texts = [prompt(ask) for ask in session]
    for (before, now), ask in zip(pairwise(texts), session, strict=False):
        assert now.startswith(f"{before} {answer(ask)} ")
    assert [m.role for m in session[-1].messages] == ["user", "assistant"] * (len(session) - 1) + [
        "user"
    ]
    assert answer(session[-1]) in prompt(quote)
    assert not prompt(quote).startswith(texts[0][:40])


def test_a_judge_reads_the_answers_of_all_agents():
    timed = [ask for ask in make_workload("agents", Shape(900, 0.8, 16), 8, WORDS, 0) if ask.timed]
    for team, judge in ((timed[0:3], timed[3]), (timed[4:7], timed[7])):
        assert needed_by(judge) == team
        assert all(answer(agent) in prompt(judge) for agent in team)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_need_only_earlier_ones(kind: str):
    asks = make_workload(kind, Shape(900, 0.8, 16), 11, WORDS, 0)
    for number, ask in enumerate(asks):
        assert all(other in asks[:number] for other in needed_by(ask))
    assert [ask.timed for ask in asks] == sorted(ask.timed for ask in asks), (
        "untimed ones come first"
    )


def test_equal_arguments_make_equal_text_and_others_do_not():
    shape = Shape(600, 0.8, 8)

    def texts(
        kind: str = "mixed", shape: Shape = shape, count: int = 9, seed: object = 1
    ) -> list[list[int]]:
        return [list(ENCODE(prompt(ask))) for ask in make_workload(kind, shape, count, WORDS, seed)]

    assert texts() == texts()
    others = [
        *texts(seed=2),
        *texts("rag"),
        *texts("chat"),
        *texts(shape=Shape(601, 0.8, 8)),
        *texts(count=12),
    ]
    assert max(known_share(text, others) for text in texts()) == 0.0


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"reuse must be in \[0, 1\)"):
        Shape(100, 1.0, 1)
    with pytest.raises(ValueError, match="needs two new tokens"):
        Shape(100, 0.99, 1)
    with pytest.raises(ValueError, match="workload must be one of rag"):
        make_workload("ragg", Shape(100, 0.5, 1), 1, WORDS, 0)
    with pytest.raises(ValueError, match="are more than 50 known tokens"):
        make_workload("agents", Shape(100, 0.5, 20), 4, WORDS, 0)


def test_words_are_single_tokens_wherever_they_stand():
    assert len(WORDS) > 300
    text = " ".join(WORDS)
    assert len(ENCODE(text)) == len(WORDS)

    def pieces(text: str) -> list[str]:  # as a tokenizer that knows short words only
        return [
            part
            for word in text.split()
            for part in ([word] if len(word) < 5 else [word[:4], word[4:]])
        ]

    short = single_token_words(pieces, [f"w{i}" for i in range(1200)])
    assert len(short) == 1000
    assert max(map(len, short)) == 4
    with pytest.raises(ValueError, match="only 0 of"):
        single_token_words(list, WORDS)


def test_arrivals_are_a_poisson_process():
    times = arrivals(4000, 5.0, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.06)
    assert variance == pytest.approx(mean**2, rel=0.15), "exponential gaps"
    assert times == sorted(times) == arrivals(4000, 5.0, seed=1)
    assert arrivals(3, 0, seed=1) == [0.0] * 3


def test_answers_stand_where_they_belong():
    first = make_workload("rag", Shape(100, 0.0, 2), 1, WORDS, 0)[0]
    assert (
        text_of(["a", Output(first), "b", ""], lambda ask: "x y" if ask is first else "?")
        == "a x y b"
    )
