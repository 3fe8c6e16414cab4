"""Generated sessions have the shape that their kind says, and come back from JSONL as they were
written."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvgraft_lab.testbed import MODEL_DIR
from sessions import KINDS, SessionShape, as_completions, bundled_words, make_sessions
from sessions import main as write_sessions
from traces import (
    Body,
    OwnAnswers,
    Session,
    Turn,
    hashed,
    lines_of,
    read_traces,
    text_of_body,
    tokenised,
)

WORDS = bundled_words()
SHAPE = SessionShape(turns=5).scaled(0.02)
RUN = 16  # equal words in a row are known text


def bodies(kind: str, shape: SessionShape = SHAPE, count: int = 3) -> list[list[Body]]:
    return [
        [turn.body for turn in session.turns]
        for session in make_sessions(kind, shape, count, WORDS, 0)
    ]


def questions(session: list[Body]) -> list[Body]:
    """The requests that are no summaries."""
    return [body for body in session if body.get("tools")]


def documents(body: Body) -> list[str]:
    """Of the last question, in order."""
    asked = [m["content"] for m in body["messages"] if m["role"] == "user"][-1]
    return [part.split(":\n", 1)[1] for part in asked.split("\n\n")[:-1]]


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def alike(one: str, other: str) -> bool:
    """Whether two documents are the same but for some words."""
    words, others = one.split(), other.split()
    same = sum(a == b for a, b in zip(words, others, strict=False))
    return len(words) == len(others) and same > 0.7 * len(words)


def common_start(one: list[int], other: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_sessions(kind: str):
    made = make_sessions(kind, SHAPE, 3, WORDS, 7)
    assert made == make_sessions(kind, SHAPE, 3, WORDS, 7)
    assert made != make_sessions(kind, SHAPE, 3, WORDS, 8)
    assert len({session.name for session in made}) == 3
    times = [[turn.at_s for turn in session.turns] for session in made]
    assert all(a < b for one in times for a, b in pairwise(one))
    assert [session.kind for session in made] == (
        list(KINDS[:3]) if kind == "mixed" else [kind] * 3
    )


def test_an_append_only_session_is_a_chain_of_prefixes():
    encode = hashed(4096)
    for session in bodies("append_only"):
        assert len(session) >= SHAPE.turns
        for one, two in pairwise(session):
            assert two["messages"][: len(one["messages"])] == one["messages"]
            assert encode(two)[: len(encode(one))] == encode(one)
            assert len(encode(two)) > len(encode(one))
        answers = sum(message["role"] == "assistant" for message in session[-1]["messages"])
        assert answers >= SHAPE.turns - 1


def test_nothing_of_a_novel_session_was_read_before():
    seen: set[tuple[str, ...]] = set()
    for body in (body for session in bodies("novel") for body in session):
        found = runs(text_of_body(body))
        assert found
        assert not found & seen
        seen |= found


def test_documents_come_back_in_another_order():
    moved, total = 0, 0
    for session in bodies("reordered", SessionShape(turns=8, edited_share=0.0).scaled(0.02)):
        for one, two in pairwise(questions(session)):
            before, after = documents(one), documents(two)
            assert len(set(after)) == len(after)
            both = [text for text in after if text in before]
            total += len(both) > 1
            moved += both != [text for text in before if text in both]
    assert total > 10
    assert moved > total / 3, "two documents in random order keep it half of the time"


def test_a_reordered_session_begins_with_the_last_request_until_it_is_summarised():
    shape = SessionShape(turns=8, tool_share=0.0, context_tokens=10**6)
    for session in bodies("reordered", shape.scaled(0.02)):
        assert len(session) == 8
        assert all(
            two["messages"][: len(one["messages"])] == one["messages"]
            for one, two in pairwise(session)
        )
    for session in bodies("reordered", SessionShape(turns=8, context_tokens=40_000).scaled(0.02)):
        summaries = [n for n, body in enumerate(session) if "tools" not in body]
        assert summaries
        for n in summaries:
            before, after = session[n - 1]["messages"], session[n + 1]["messages"]
            assert len(after) < len(before) + 2
            assert after[0] == before[0], "the system prompt stays"
            assert [message["role"] for message in after[1:3]] == ["user", "user"], (
                "the summary, and the last exchange"
            )
            assert after[2] == [message for message in before if message["role"] == "user"][-1]
            assert session[n]["messages"][-1]["content"].count("assistant :") >= 1


def test_known_and_edited_documents_have_their_shares():
    shape = SessionShape(turns=12, documents=8, corpus=400, edited_share=0.5, document_tokens=100)
    known, edited, total = 0, 0, 0
    for session in bodies("reordered", shape, 6):
        first, *later = questions(session)
        seen = set(documents(first))
        for texts in map(documents, later):
            near = [text for text in texts if any(alike(text, other) for other in seen)]
            total, known, edited = (
                total + len(texts),
                known + len(near),
                edited + len([t for t in near if t not in seen]),
            )
            seen |= set(texts)
    assert 0.65 < known / total < 0.9
    assert 0.3 < edited / known < 0.7


def test_tool_results_follow_their_calls():
    found = 0
    for session in bodies(
        "reordered", SessionShape(turns=8, tool_share=0.5, context_tokens=40_000).scaled(0.02)
    ):
        for body in questions(session):
            messages = body["messages"]
            names = [tool["function"]["name"] for tool in body["tools"]]
            for before, message in pairwise(messages):
                if message["role"] == "tool":
                    [call] = before["tool_calls"]
                    assert call["id"] == message["tool_call_id"]
                    assert call["function"]["name"] in names
                    found += 1
    assert found


def test_sessions_open_alike_and_go_on_with_texts_of_their_own():
    one, two = (session[0] for session in bodies("append_only", count=2))
    assert one["tools"] == two["tools"]
    assert one["messages"][0] == two["messages"][0]
    own = [runs(text_of_body({"messages": body["messages"][1:]})) for body in (one, two)]
    assert own[0]
    assert not own[0] & own[1]


def test_sessions_draw_from_one_corpus_and_mostly_its_first_documents():
    shape = SessionShape(turns=3, edited_share=0.0).scaled(0.02)
    drawn = Counter[str]()
    for session in bodies("reordered", shape, 30):
        drawn.update({text for body in questions(session) for text in documents(body)})
    most = [count for _, count in drawn.most_common()]
    assert most[0] > 10
    assert most[len(most) // 2] < most[0] / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"known_share": 1.5}, r"known_share must be in \[0, 1\], got 1.5"),
        ({"turns": 0}, "turns must be at least 1, got 0"),
        ({"corpus": 10}, "corpus must be at least 108"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        SessionShape(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kind must be one of reordered, .*, got 'rag'"):
        make_sessions("rag", SHAPE, 1, WORDS, 0)


def test_the_command_writes_what_is_read_again(tmp_path: Path):
    out = tmp_path / "sessions.jsonl"
    app = typer.Typer()
    app.command()(write_sessions)
    arguments = ["--out", str(out), "--sessions", "3", "--turns", "3", "--scale", "0.01"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(entry.keys() == {"session", "timestamp", "body"} for entry in entries)
    assert [entry["timestamp"] for entry in entries] == sorted(
        entry["timestamp"] for entry in entries
    )
    made = make_sessions("reordered", SessionShape(turns=3).scaled(0.01), 3, WORDS, 0)
    found, skipped = read_traces([out], 9)
    assert skipped == 0
    assert {s.name: [t.body for t in s.turns] for s in found} == {
        s.name: [t.body for t in s.turns] for s in made
    }
    assert CliRunner().invoke(app, [*arguments, "--completions"]).exit_code == 0
    prompts = [
        turn.body["prompt"] for session in read_traces([out], 9)[0] for turn in session.turns
    ]
    assert prompts == [text_of_body(turn.body) for session in made for turn in session.turns]
    refused = CliRunner().invoke(app, [*arguments, "--kind", "rag"])
    assert refused.exit_code == 2
    assert "got 'rag'" in " ".join(refused.output.replace("│", " ").split())


def test_recordings_of_other_forms_are_read(tmp_path: Path):
    parts = [{"type": "text", "text": "known"}, {"type": "text", "text": " words"}]
    asked = {"messages": [{"role": "user", "content": parts}]}
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (
        {"type": "request", "timestamp_rel_s": 2.0, "body": asked | {"model": "late"}},
        {"type": "response", "timestamp_rel_s": 3.0, "body": {"choices": []}},
        {"type": "request", "timestamp_rel_s": 1.0, "body": asked},
        {"type": "request", "timestamp_rel_s": 0.0, "body": None},
    )))  # fmt: skip
    dated = {"session": "c", "timestamp": "1970-01-01T00:00:05+00:00", "body": {"prompt": "dated"}}
    lines = (
        {"prompt": "bare"},
        dated,
        {"prompt": "x", "user": "d"},
        {"session_id": 7, "body": {"prompt": "y"}},
    )
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found, skipped = read_traces([tmp_path], 9)
    assert [session.name for session in found] == ["a", "b", "c", "d", "7"]
    assert found[2].turns[0].at_s == 5.0
    assert [turn.at_s for turn in found[0].turns] == [1.0, 2.0]
    assert skipped == 2
    assert text_of_body(found[0].turns[0].body) == "user : known\n words\n\n"
    assert text_of_body(found[1].turns[0].body) == "bare"
    assert [session.name for session in read_traces([tmp_path], 1)[0]] == ["a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl:1: Expecting"),
        ("[]", r"bad.jsonl:1: a line must be a JSON object, got list"),
        (
            '{"timestamp": "noon", "body": {"prompt": "x"}}',
            r"bad.jsonl:1: timestamp is .noon.: must be seconds, or",
        ),
        ('{"type": "response"}', "no requests with messages or a prompt in .*bad.jsonl"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, line: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_traces([path], 1)


def test_what_is_no_text_is_refused():
    with pytest.raises(ValueError, match="a prompt must be a string here, got 2 token ids"):
        text_of_body({"prompt": [1, 2]})
    with pytest.raises(ValueError, match='a content part of type "image_url": only text'):
        text_of_body({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_hashed_text_keeps_its_repetitions_and_no_others():
    encode = hashed(4096)
    text = bodies("novel")[0][0]["messages"][0]["content"]
    ids = encode({"prompt": text})
    assert len(ids) == pytest.approx(len(text.split()), rel=0.02), (
        "nearly every word of the bundled model is a piece"
    )
    assert len(set(ids)) > 0.8 * len(set(text.split())), "few words share an id"
    assert min(ids) >= 1
    assert max(ids) < 4096
    assert encode({"prompt": f"{text}\n\n{text}"})[-len(ids) + 1 :] == ids[1:], "wherever it stands"


def test_a_models_own_template_makes_a_chain_of_prefixes():
    encode = tokenised(MODEL_DIR)
    session = bodies("append_only", SessionShape(turns=3, tool_share=1.0).scaled(0.005), 1)[0]
    prompts = [encode(body) for body in session]
    assert len(prompts) == 6
    for one, two in pairwise(prompts):
        assert common_start(one, two) >= len(one) - 2, "all but the opening of the answer"
        assert len(two) > len(one)
    assert encode({"prompt": "the code of ada"})


def test_own_answers_stand_where_the_recorded_ones_did():
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    recorded = {"role": "assistant", "content": "recorded"}
    own = OwnAnswers()
    first: Body = {"messages": [user("one")]}
    assert own.body(first) == first
    own.answered("ours")
    second = own.body({"messages": [user("one"), recorded, user("two")]})
    assert [message["content"] for message in second["messages"]] == ["one", "ours", "two"]
    own.answered("unused")
    aside = own.body({"messages": [user("summarise")]})
    assert [message["content"] for message in aside["messages"]] == ["summarise"]
    own.answered("a summary")
    later = own.body({"messages": [user("a recorded summary"), recorded, user("three")]})
    assert [message["content"] for message in later["messages"]] == [
        "a recorded summary",
        "ours",
        "three",
    ]


def test_prompts_are_the_text_of_bodies():
    [session] = make_sessions("append_only", SHAPE, 1, WORDS, 0)
    [written] = as_completions([session])
    assert written.name == session.name
    assert [turn.body["prompt"] for turn in written.turns] == [
        text_of_body(turn.body) for turn in session.turns
    ]
    late = Session("x", "recorded", (Turn(2.0, {"prompt": "b"}), Turn(1.0, {"prompt": "a"})))
    lines = [json.loads(line) for line in lines_of([late])]
    assert [line["body"]["prompt"] for line in lines] == ["a", "b"]
