"""Replays: who is sent what and when, what is counted; and two real servers on a tiny model."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner, Result

import replay as command
import replay_traffic
from load import Client, Outcome
from replay_tables import (
    Prediction,
    Violation,
    all_turns,
    as_json,
    draw,
    endings,
    kinds_of,
    lines_of_replay,
    ttft_ratio,
    turn_rows,
    turns_of,
    violations,
)  # fmt: skip
from replay_traffic import Replayed, Run, Script, Sending, check_bodies, replay
from scenarios import Pair
from sessions import SessionShape, as_completions, bundled_words, make_sessions
from traces import Session, hashed

SHAPE = SessionShape(turns=3, tool_share=0.0).scaled(0.01)
ENCODE = hashed(4096)


@dataclass
class Sent:
    """A request that a server got."""

    url: str
    asked: Mapping[str, Any]
    namespace: str


@dataclass(eq=False)
class FakeServer:
    """Answers with its name and notes who else was being answered; from `fails_at` on it
    refuses."""

    url: str
    log: list[Sent]
    fails_at: int = 10**9
    under_way: int = 0
    most_under_way: int = 0
    count: Counter[str] = field(default_factory=Counter)

    async def send(
        self,
        kind: str,
        asked: Mapping[str, Any],
        max_tokens: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Outcome:
        namespace = (extra or {})["cache_salt"]
        self.log.append(Sent(self.url, asked, namespace))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        self.count[namespace] += 1
        if namespace != "warm-up" and self.count[namespace] >= self.fails_at:
            return Outcome(kind, 0.0, None, 1.0, error="refused")
        return Outcome(kind, 0.0, 1.0, 2.0, (), 100, max_tokens, 0, None, self.url)


def sessions(count: int, kind: str = "append_only") -> list[Session]:
    return make_sessions(kind, SHAPE, count, bundled_words(), 0)


def play(
    made: Sequence[Session],
    sending: Sending,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: int = 10**9,
) -> tuple[list[Sent], list[Replayed], list[FakeServer]]:
    """(what was sent after the warm-up, what came of it, the servers)."""
    monkeypatch.setattr(replay_traffic, "SETTLE_S", 0.0)
    log: list[Sent] = []
    servers = [FakeServer("plain", log), FakeServer("ours", log, fails_at)]
    pair = Pair(*(cast(Client, server) for server in servers))
    progress: list[tuple[int, int]] = []
    found = asyncio.run(
        replay(pair, [Script(s, ENCODE) for s in made], sending, lambda *at: progress.append(at))
    )
    assert progress == sorted(set(progress))
    assert progress[-1] == (len(progress), len(progress)), (
        "one step for each session, of each server if they run whole"
    )
    if sending.max_model_len > 4000:
        assert {sent.url for sent in log if sent.namespace == "warm-up"} == {"plain", "ours"}
    return [sent for sent in log if sent.namespace != "warm-up"], found, servers


def test_a_session_runs_whole_on_one_server_and_then_on_the_other(monkeypatch: pytest.MonkeyPatch):
    made = sessions(3)
    sent, found, _ = play(made, Sending(batch=1), monkeypatch)
    order = [(one.namespace, one.url) for one in sent]
    runs = [one for number, one in enumerate(order) if not number or one != order[number - 1]]
    assert runs == [
        ("session 0", "plain"), ("session 0", "ours"), ("session 1", "ours"), ("session 1",
        "plain"),
        ("session 2", "plain"), ("session 2", "ours"),
    ]  # fmt: skip
    prompts = [ENCODE(turn.body) for session in made for turn in session.turns]
    assert [one.asked["prompt"] for one in sent if one.url == "plain"] == prompts
    assert [one.asked["prompt"] for one in sent if one.url == "ours"] == prompts
    assert [(one.name, one.requests, len(one.pairs)) for one in found] == [
        (session.name, 3, 3) for session in made
    ]


def test_one_session_at_a_time_goes_request_by_request_from_server_to_server(
    monkeypatch: pytest.MonkeyPatch,
):
    made = sessions(2)
    sent, found, _ = play(made, Sending(), monkeypatch)
    plain, ours = "plain", "ours"
    assert [one.url for one in sent] == [
        plain,
        ours,
        ours,
        plain,
        plain,
        ours,
        ours,
        plain,
        plain,
        ours,
        ours,
        plain,
    ]
    assert [one.namespace for one in sent] == ["session 0"] * 6 + ["session 1"] * 6
    prompts = [ENCODE(turn.body) for session in made for turn in session.turns]
    for server in (plain, ours):
        assert [one.asked["prompt"] for one in sent if one.url == server] == prompts
    assert [(one.name, one.requests, len(one.pairs)) for one in found] == [
        (session.name, 3, 3) for session in made
    ]


def test_batches_run_at_once_and_shared_sessions_have_one_namespace(
    monkeypatch: pytest.MonkeyPatch,
):
    sent, _, servers = play(sessions(5), Sending(concurrency=2, shared=True), monkeypatch)
    assert {one.namespace for one in sent} == {"shared"}
    assert [server.most_under_way for server in servers] == [2, 2]
    urls = [one.url for one in sent]
    assert [a for a, b in pairwise([*urls, ""]) if a != b] == ["plain", "ours", "plain", "ours"]
    assert len(urls) == 30
    sent, _, servers = play(sessions(4), Sending(rate=1e6), monkeypatch)
    assert [one.url for one in sent] == ["plain"] * 6 + ["ours"] * 12 + ["plain"] * 6
    assert servers[0].most_under_way == 2
    assert Sending(rate=1.0, batch=3).batch_of(10) == 3
    assert (
        play(sessions(4), Sending(rate=1e6, concurrency=1), monkeypatch)[2][0].most_under_way == 1
    )


def test_messages_are_sent_to_chat_as_they_are(monkeypatch: pytest.MonkeyPatch):
    [session] = sessions(1)
    sent, _, _ = play([session], Sending(chat=True), monkeypatch)
    for one, turn in zip([one for one in sent if one.url == "plain"], session.turns, strict=True):
        assert one.asked == {
            "messages": turn.body["messages"],
            "tools": turn.body["tools"],
            "tool_choice": "none",
        }


@pytest.mark.parametrize("sending", [Sending(chat=True), Sending(own_answers=True)])
def test_prompts_are_neither_messages_nor_have_answers(sending: Sending):
    made = sessions(1)
    check_bodies(made, sending)
    check_bodies(as_completions(made), Sending())
    with pytest.raises(ValueError, match=r"append_only-0: .* need bodies with messages"):
        check_bodies([*made, *as_completions(made)], sending)


def test_own_answers_take_the_place_of_recorded_ones(monkeypatch: pytest.MonkeyPatch):
    [session] = sessions(1)
    sent, _, _ = play([session], Sending(chat=True, own_answers=True), monkeypatch)
    for one in sent:
        answers = [
            message["content"]
            for message in one.asked["messages"]
            if message["role"] == "assistant"
        ]
        assert answers == [one.url] * len(answers)
    assert [len(one.asked["messages"]) for one in sent] == [2, 2, 4, 4, 6, 6]


def test_a_session_ends_before_what_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    [session] = sessions(1)
    lengths = [len(ENCODE(turn.body)) for turn in session.turns]
    sent, [found], _ = play([session], Sending(16, lengths[1] + 16), monkeypatch)
    assert len(sent) == 4
    assert len(found.pairs) == 2
    why = f"request 3 has {lengths[2]} tokens and 16 to answer, the context {lengths[1] + 16}"
    assert endings([found]) == [f"append_only-0 was cut (both): {why}"]
    assert not found.pairs[0][0].error


def test_a_session_ends_on_a_server_that_fails(monkeypatch: pytest.MonkeyPatch):
    sent, [found], _ = play(sessions(1), Sending(), monkeypatch, fails_at=2)
    assert [one.url for one in sent] == ["plain", "ours", "ours", "plain", "plain"]
    assert len(found.pairs) == 1
    assert endings([found]) == ["append_only-0 was cut (ours): request 2 failed: refused"]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"rate": -1.0}, {"batch": -1}, {"max_model_len": 1}]
)
def test_how_to_send_is_checked(wrong: dict[str, Any]):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be at least .*, got {value}"):
        Sending(**wrong)


def answered(ttft: float, cached: int, **kinds: int) -> Outcome:
    kinds = {"prefix": 0, "continued": 0, "grafted": 0, "recomputed": 0} | kinds
    fresh = 100 - kinds["prefix"] - kinds["continued"] - kinds["grafted"]
    report = {f"{kind}_tokens": count for kind, count in kinds.items()} | {
        "fresh_tokens": fresh,
        "outcome": "grafted",
    }
    return Outcome("reordered", 10.0, 10.0 + ttft, 15.0, (0.1, 0.3), 100, 3, cached, report)


def replayed(*pairs: tuple[Outcome, Outcome], name: str = "one") -> Replayed:
    plain, ours = ([pair[side] for pair in pairs] for side in (0, 1))
    return Replayed(name, "reordered", len(pairs), Run(tuple(plain), None), Run(tuple(ours), None))


FOUND = [
    replayed(
        (answered(1.0, 0), answered(1.0, 0)),
        (answered(3.0, 50), answered(1.0, 90, prefix=30, continued=20, grafted=40, recomputed=10)),
    ),
    replayed((answered(4.0, 60), answered(2.0, 59, prefix=59)), name="two"),
]


def test_kinds_are_counted_turn_by_turn():
    first, second = turn_rows(FOUND)
    assert (first.turn, first.requests, first.prompt_tokens, first.plain) == (1, 2, 100.0, 0.3)
    assert first.kinds == pytest.approx(
        {"prefix": 0.295, "continued": 0.0, "grafted": 0.0, "fresh": 0.705}
    )
    assert (first.plain_ttft_s, first.ours_ttft_s) == (2.5, 1.5)
    assert second.kinds == pytest.approx(
        {"prefix": 0.3, "continued": 0.2, "grafted": 0.4, "fresh": 0.1}
    )
    assert second.recomputed == pytest.approx(0.1)
    assert second.reused == pytest.approx(0.9)
    assert all_turns(FOUND).requests == 3
    assert kinds_of(turn_rows(FOUND), all_turns(FOUND)).row_count == 3
    assert turns_of(turn_rows(FOUND), all_turns(FOUND)).row_count == 3


def test_a_request_that_finds_less_than_plain_is_told():
    assert violations(FOUND) == [Violation("two", 1, 60, 59)]
    lines = lines_of_replay(FOUND, own_answers=False)
    assert (
        "less exact and continued than plain's prefix: 1 of 3 requests: two request 1 (59 < 60)"
        in lines
    )
    many = lines_of_replay([replace(FOUND[1], name=str(n)) for n in range(7)], own_answers=False)
    assert many[1].endswith("4 request 1 (59 < 60), 2 more")
    assert violations(FOUND[:1]) == [], "continued tokens count"
    assert "not compared" in lines_of_replay(FOUND, own_answers=True)[1]
    assert as_json(FOUND, own_answers=True)["violations"] is None


def test_the_ratio_is_that_of_sessions():
    ratio = ttft_ratio(FOUND)
    assert ratio.value == pytest.approx(0.5), "2 / 4 and 2 / 4"
    assert ratio.low == pytest.approx(0.5)
    slower = ttft_ratio([*FOUND, replayed((answered(1.0, 0), answered(2.0, 0)))])
    assert slower.value == pytest.approx((0.5 * 0.5 * 2) ** (1 / 3))
    assert slower.low < slower.value < slower.high
    assert (
        f"total TTFT of a session, ours / plain: {slower.value:.3f}"
        in lines_of_replay(
            [*FOUND, replayed((answered(1.0, 0), answered(2.0, 0)))], own_answers=False
        )[0]
    )


def told(one: Outcome, **more: Any) -> Outcome:
    estimates = {"shadow_graftable_tokens": 0, "estimated_full_s": None, "estimated_reuse_s": None}
    return replace(one, report={**(one.report or {}), **estimates, **more})


def test_what_was_foretold_and_what_came():
    would = told(
        answered(3.0, 0), shadow_graftable_tokens=40, estimated_full_s=2.5, estimated_reuse_s=1.0
    )
    did = told(answered(1.0, 40, grafted=40), estimated_full_s=2.5, estimated_reuse_s=0.5)
    missed = told(answered(3.0, 0)), told(answered(2.0, 0))
    found = Prediction.of([replayed((would, did), missed)])
    assert found == Prediction(0.2, 0.2, 1.5, 2.0, 2.0)
    assert "would graft 20.0% of the tokens and save 1.50 s" in found.line


def test_all_of_it_is_json_and_a_picture(tmp_path: Path):
    found = json.loads(json.dumps(as_json(FOUND, own_answers=False)))
    assert [len(session["ours"]) for session in found["sessions"]] == [2, 1]
    assert found["sessions"][0]["ours"][1]["continued_tokens"] == 20
    assert found["latencies"]["plain"]["ttft_s"]["median"] == 3.0
    assert found["violations"] == [{"session": "two", "turn": 1, "plain": 60, "ours": 59}]
    draw(turn_rows(FOUND), tmp_path / "replay.png")
    assert (tmp_path / "replay.png").stat().st_size > 10_000


def test_an_answer_without_a_report_is_an_error():
    silent = replayed((answered(1.0, 0), replace(answered(1.0, 0), report=None)))
    with pytest.raises(RuntimeError, match="carries no report"):
        turn_rows([silent])
    with pytest.raises(ValueError, match="no request was answered by both"):
        all_turns([])


def run_command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat"], "--chat needs --model"),
        (["--tiny", "--model", "."], "leave out --model"),
        (["--answers", "mine"], "--answers must be one of recorded, own, got 'mine'"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
        (["--trace", ".", "--turns", "3"], "--turns has no meaning with --trace"),
        (["--kind", "rag"], "got 'rag'"),
        (["--max-model-len", "70000"], "at most 65536"),
        (["--rate", "-1"], "rate must be at least 0, got -1.0"),
    ],
)
def test_arguments_are_checked_before_a_server_starts(arguments: list[str], message: str):
    result = run_command(*arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert message in words


@pytest.mark.soak
def test_real_servers_answer_the_same_sessions_and_ours_reuses_more(tmp_path: Path):
    shape = ("--tiny", "--sessions", "2", "--turns", "4", "--max-tokens", "4", "--kv-gib", "1")
    result = run_command(*shape, "--plot", str(tmp_path / "replay.png"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["violations"] == []
    whole = found["all"]
    assert whole["requests"] == sum(session["recorded"] for session in found["sessions"]) >= 8
    assert sum(whole["kinds"].values()) == pytest.approx(1.0)
    assert whole["kinds"]["grafted"] > 0.02
    assert whole["kinds"]["continued"] > 0.02
    assert 1 - whole["kinds"]["fresh"] > whole["plain"] > 0.3
    assert found["turns"][0]["kinds"]["fresh"] == 1.0, "every session has a namespace of its own"
    for session in found["sessions"]:
        for plain, ours in zip(session["plain"], session["ours"], strict=True):
            assert plain["prompt_tokens"] == ours["prompt_tokens"]
            assert (
                ours["cached_tokens"]
                == ours["prefix_tokens"] + ours["continued_tokens"] + ours["grafted_tokens"]
            )
    assert (tmp_path / "replay.png").stat().st_size > 10_000
