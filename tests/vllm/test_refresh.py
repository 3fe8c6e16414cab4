"""Reading anew inside vLLM: what the API server asks of the scheduler side, and who may not ask
it."""

from typing import Any

import pytest
from engines import BLOCK, MAX_LENGTH, NAIVE, OFF, STEP_TOKENS, Ask, words
from hosts import Host

from kvgraft.vllm.connector.controls import MAX_TRIES, RefreshControls
from kvgraft.vllm.options import CONTROL_TOKEN, READ, REFRESH, Control

KNOWN, NEW, LONG = words(8 * BLOCK, 1), words(6 * BLOCK, 2), words(20 * BLOCK, 3)
NOTHING: dict[str, Any] = {"tokens": []}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, "a token of the test's own")


@pytest.fixture
def reading(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host that reads as many tokens anew as requests bring."""
    allow(host, monkeypatch, 1.0)
    return host


def allow(host: Host, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(
        host.side._controls,
        "refresh",
        RefreshControls(host.known, host.side.reporting, share, MAX_LENGTH - 1),
    )


def control(
    host: Host, op: str, text: list[int] | None = None, salt: str = "nobody"
) -> dict[str, Any]:
    options = Control(op).as_params()["kvgraft"]
    [answer] = host.ask(Ask(text or [5], options, salt, max_tokens=1), limit=200)
    return answer.report


def use(host: Host, times: int = 2, text: list[int] = NEW, salt: str = "a") -> list[int]:
    """Read a text behind a graft, and graft it so often elsewhere; the depths of what came of
    it."""
    host.read(KNOWN, salt=salt)
    host.ask(Ask([*words(BLOCK, 10), *KNOWN, *text, 7], NAIVE, salt))
    return [graft(host, text, salt, time) for time in range(times)]


def graft(host: Host, text: list[int] = NEW, salt: str = "a", seed: int = 99) -> int:
    """The depth of what an answer to a prompt with this text rests on."""
    [answer] = host.ask(Ask([*words(5, 20 + seed), *text, *words(9, 40 + seed)], NAIVE, salt))
    return int(answer.report["depth"])


def test_text_that_is_grafted_is_read_and_grafted_exact(reading: Host):
    use(reading, 0)
    assert control(reading, REFRESH) == NOTHING
    assert graft(reading) == 2
    chosen = control(reading, REFRESH)
    assert chosen == {"tokens": NEW, "cache_salt": "a"}
    assert control(reading, READ, NEW, "a") == {"num_tokens": len(NEW)}
    assert reading.count("idle_refresh_tokens_total") == len(NEW)
    assert control(reading, REFRESH) == NOTHING
    assert graft(reading, seed=100) == 1
    [alone] = reading.ask(Ask(NEW, OFF, "a"))
    assert alone.cached == len(NEW) - BLOCK, "its last token is always computed"


def test_a_text_is_read_in_pieces_and_each_token_once(reading: Host):
    use(reading, text=LONG)
    chosen = control(reading, REFRESH)
    assert chosen["tokens"] == LONG
    for stop in (8 * BLOCK, 16 * BLOCK, 20 * BLOCK):
        assert control(reading, READ, LONG[:stop], "a") == {"num_tokens": stop}
    assert reading.count("idle_refresh_tokens_total") == len(LONG)
    assert graft(reading, LONG) == 1


def test_what_was_read_before_an_interruption_stays_and_the_rest_comes_next(reading: Host):
    use(reading, text=LONG)
    chosen = control(reading, REFRESH)
    name = reading.add(Ask(LONG, Control(READ).as_params()["kvgraft"], "a", max_tokens=1))
    reading.step()
    reading.abort(name)
    [answer] = reading.ask(Ask(words(40, 7), NAIVE, "b"))
    assert len(answer.tokens) == 8
    assert reading.count("idle_refresh_tokens_total") == STEP_TOKENS
    assert control(reading, REFRESH) == chosen
    assert control(reading, READ, LONG, "a") == {"num_tokens": len(LONG)}
    assert reading.count("idle_refresh_tokens_total") == len(LONG)
    assert control(reading, REFRESH) == NOTHING
    assert graft(reading, LONG) == 1


def test_who_is_always_interrupted_gives_up(reading: Host):
    use(reading)
    tries = [control(reading, REFRESH)["tokens"] for _ in range(MAX_TRIES + 2)]
    assert tries == [NEW] * MAX_TRIES + [[]] * 2


def test_a_reading_that_never_began_counts_nothing(reading: Host):
    use(reading)
    chosen = control(reading, REFRESH)
    name = reading.add(Ask(NEW, Control(READ).as_params()["kvgraft"], "a", max_tokens=1))
    reading.abort(name)
    reading.settle()
    assert reading.count("idle_refresh_tokens_total") == 0
    assert control(reading, REFRESH) == chosen


def test_a_text_is_read_where_it_is_known_and_nowhere_else(reading: Host):
    use(reading, salt="a")
    use(reading, salt="b")
    salts = set()
    for seed, depths in ((50, [1, 2]), (60, [1, 1])):
        chosen = control(reading, REFRESH)
        salts.add(chosen["cache_salt"])
        control(reading, READ, chosen["tokens"], chosen["cache_salt"])
        assert sorted(graft(reading, salt=salt, seed=seed) for salt in "ab") == depths
    assert salts == {"a", "b"}
    assert graft(reading, salt="c") == 0, "nothing is known there"


def test_it_takes_its_share_of_what_requests_bring_and_no_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    allow(host, monkeypatch, 0.1)
    use(host)
    brought = len(KNOWN) + BLOCK + len(KNOWN) + len(NEW) + 1 + 2 * (14 + len(NEW))
    assert brought * 0.1 < len(NEW)
    assert control(host, REFRESH) == NOTHING
    host.read(words(10 * len(NEW) - brought - 1, 8))
    assert control(host, REFRESH) == NOTHING, "one token is missing"
    host.read([5])
    assert control(host, REFRESH)["tokens"] == NEW
    control(host, READ, NEW, "a")
    other = words(6 * BLOCK, 4)
    use(host, text=other)
    assert control(host, REFRESH) == NOTHING, "it has been spent"


def test_control_requests_bring_nothing(host: Host, monkeypatch: pytest.MonkeyPatch):
    allow(host, monkeypatch, 0.1)
    use(host)
    for _ in range(3):
        control(host, REFRESH, LONG)
    assert control(host, REFRESH) == NOTHING


def test_pinned_text_is_not_shed_for_it(reading: Host, monkeypatch: pytest.MonkeyPatch):
    use(reading)
    monkeypatch.setattr(reading.known.pins, "watermark", 0.05)
    assert control(reading, REFRESH) == NOTHING


def test_it_is_off_unless_asked_for(host: Host):
    assert host.side.settings.idle_refresh == 0
    use(host, 3)
    assert control(host, REFRESH) == NOTHING


@pytest.mark.parametrize("op", [REFRESH, READ])
@pytest.mark.parametrize("token", ["", "wrong", None])
def test_a_client_can_neither_ask_what_to_read_nor_have_it_read(
    reading: Host, op: str, token: str | None
):
    use(reading)
    [answer] = reading.ask(Ask(words(50, 6), {"control": {"op": op, "token": token}}, "a"))
    assert answer.report["reason"] == "invalid_params"
    assert not {"tokens", "cache_salt", "num_tokens"} & answer.report.keys()
    assert reading.count("idle_refresh_tokens_total") == 0
    assert control(reading, REFRESH)["tokens"] == NEW, "so it could have been told"


def test_a_server_that_nobody_would_ask_does_not_start(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CONTROL_TOKEN)
    with pytest.raises(ValueError, match=r"idle_refresh is 0\.5.*kvgraft serve"):
        allow(host, monkeypatch, 0.5)
    allow(host, monkeypatch, 0.0)
