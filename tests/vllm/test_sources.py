"""What becomes known, and when: prompts, generated text, text of requests that still run; nothing
approximate."""

import pytest
from engines import BLOCK, EVERYTHING, NAIVE, OFF, Ask, words
from hosts import Host
from processes import HostProcess

from kvgraft.core.matches import MAX_DEPTH

DOCUMENT = words(300, 1)


def test_generated_text_is_a_source(host: Host, plain: HostProcess):
    [first] = host.ask(Ask(words(40, 1), OFF, max_tokens=150))
    prompt = words(7, 2) + first.tokens + words(7, 3)
    [quoting] = host.ask(Ask(prompt, EVERYTHING))
    assert quoting.grafted >= 100
    assert [quoting.tokens] == plain.tokens(prompt)


def test_a_prompt_is_a_source_as_soon_as_it_is_computed(host: Host, plain: HostProcess):
    """While it is prefilled, as far as it has got; then while its request still decodes."""
    text = words(600, 1)
    reader = host.add(Ask(text, OFF, max_tokens=50))
    host.step()
    host.step()
    assert host.request(reader).num_computed_tokens == 512
    prompts = [words(10, 2) + text, words(20, 3) + text]
    [early] = host.ask(Ask(prompts[0], EVERYTHING))
    assert early.grafted == 512
    [late] = host.ask(Ask(prompts[1], EVERYTHING))
    assert not host.outputs[reader].finished
    assert late.grafted == 18 * BLOCK
    assert [early.tokens, late.tokens] == plain.tokens(*prompts)
    assert [host.finish(reader)[0].tokens] == plain.tokens(text, max_tokens=50)


def test_a_conversation_grafts_what_moved(host: Host, plain: HostProcess):
    """History behind another system prompt, with the answers that were generated to it."""
    history = words(50, 1)
    for turn in range(3):
        [answer] = host.ask(Ask(history, OFF, max_tokens=40))
        history = history + answer.tokens + words(30, 10 + turn)
    [moved] = host.ask(Ask(words(33, 9) + history, EVERYTHING))
    assert moved.grafted >= 160
    assert [moved.tokens] == plain.tokens(words(33, 9) + history)


@pytest.mark.parametrize("allowed", [False, True])
def test_what_follows_a_graft_is_a_source_only_if_configured(
    host: Host, monkeypatch: pytest.MonkeyPatch, allowed: bool
):
    monkeypatch.setattr(host.known.index, "max_depth", int(allowed))
    host.read(DOCUMENT)
    question = words(200, 3)
    [first] = host.ask(Ask(words(70, 2) + DOCUMENT + question, NAIVE, max_tokens=100))
    assert first.grafted == 288
    assert first.report["registered_blocks"] == ((570 + 99) // BLOCK if allowed else 70 // BLOCK)
    again, continued = host.ask(
        Ask(words(5, 4) + question, NAIVE), Ask(words(6, 5) + first.tokens, NAIVE)
    )
    assert [answer.grafted > 60 for answer in (again, continued)] == [allowed, allowed]


def test_approximate_sources_are_told_from_exact_ones(host: Host, monkeypatch: pytest.MonkeyPatch):
    """What has been named while they were allowed is no source when they are not."""
    monkeypatch.setattr(host.known.index, "max_depth", 1)
    host.read(DOCUMENT)
    opening, question = words(70, 2), words(200, 3)
    host.ask(Ask(opening + DOCUMENT + question, NAIVE))
    monkeypatch.setattr(host.known.index, "max_depth", 0)
    host.stats.reset()
    [hidden] = host.ask(Ask(words(5, 4) + question, NAIVE))
    assert (hidden.grafted, hidden.report["reason"], hidden.report["outcome"]) == (
        0,
        "too_deep",
        "miss",
    )
    assert 160 <= hidden.report["too_deep_tokens"] <= 200
    assert host.stats.data["kvgraft:misses_total"] == {"too_deep": 1}
    assert host.stats.data["kvgraft:too_deep_tokens_total"] == {
        "": hidden.report["too_deep_tokens"]
    }
    assert host.ask(Ask(words(6, 5) + opening, NAIVE))[0].grafted == 64


@pytest.mark.parametrize("required", [False, True])
def test_what_was_read_behind_other_text_is_a_source_unless_clean_context_is_required(
    host: Host, monkeypatch: pytest.MonkeyPatch, required: bool
):
    monkeypatch.setattr(host.known.index, "require_clean_context", required)
    host.read(words(70, 2) + DOCUMENT)
    assert (host.ask(Ask(words(5, 3) + DOCUMENT, NAIVE))[0].grafted > 0) != required
    host.read(DOCUMENT)
    assert host.ask(Ask(words(9, 4) + DOCUMENT, NAIVE))[0].grafted >= 288


def test_a_session_without_an_end_finds_its_last_text_however_deep_it_is(host: Host):
    host.read(DOCUMENT)
    known, depths = DOCUMENT, []
    for turn in range(8):
        text = words(200, 30 + turn)
        [answer] = host.ask(Ask(words(5, 50 + turn) + known + text, NAIVE))
        assert answer.grafted >= 160
        known, depths = text, [*depths, answer.report["depth"]]
    assert depths == [*range(1, 9)]


@pytest.mark.parametrize("max_depth", [1, MAX_DEPTH])
def test_text_that_is_hidden_for_its_depth_is_reported_beside_what_is_grafted(
    host: Host, monkeypatch: pytest.MonkeyPatch, max_depth: int
):
    """Registered while the limit holds, unlike above."""
    monkeypatch.setattr(host.known.index, "max_depth", max_depth)
    host.read(DOCUMENT)
    first, second = words(200, 3), words(200, 4)
    host.ask(Ask(words(70, 2) + DOCUMENT + first, NAIVE))
    host.ask(Ask(words(5, 5) + first + second, NAIVE))
    [answer] = host.ask(Ask(words(9, 6) + second + DOCUMENT, NAIVE))
    limited = max_depth == 1
    assert (answer.report["outcome"], answer.report["reason"]) == ("grafted", None)
    assert (answer.report["too_deep_tokens"] >= 160) == limited
    assert (answer.grafted > 400) != limited
    assert answer.report["depth"] == (1 if limited else 3)


def test_what_precedes_a_graft_is_a_source(host: Host, plain: HostProcess):
    """It was computed from exact keys and values only."""
    host.read(DOCUMENT)
    opening = words(200, 2)
    assert host.ask(Ask(opening + DOCUMENT, NAIVE))[0].report["prefix_tokens"] == 0
    [moved] = host.ask(Ask(words(9, 3) + opening, EVERYTHING))
    assert moved.grafted == 192
    assert [moved.tokens] == plain.tokens(words(9, 3) + opening)


def test_others_find_the_text_of_a_request_with_reuse_off(host: Host):
    [answer] = host.ask(Ask(DOCUMENT, OFF, max_tokens=50))
    assert answer.report["registered_blocks"] == 349 // BLOCK
    assert host.ask(Ask(words(3, 2) + DOCUMENT, NAIVE))[0].grafted == 299


def test_evicted_text_is_no_source(host: Host, plain: HostProcess):
    host.read(DOCUMENT)
    host.evict(sorted(host.blocks_with_content())[:4])
    prompt = words(10, 2) + DOCUMENT
    [answer] = host.ask(Ask(prompt, EVERYTHING))
    assert answer.grafted == 5 * BLOCK
    assert [answer.tokens] == plain.tokens(prompt)


def test_others_find_the_text_of_a_preempted_request_again(host: Host):
    """It lies elsewhere when the request comes back."""
    text = words(900, 1)
    name = host.add(Ask(text, OFF, max_tokens=60))
    host.step_until(lambda: name in host.outputs)
    host.read(words(9, 3))  # who comes is offered what is there
    host.preempt(name)
    [answer] = host.finish(name)
    assert answer.report["registered_blocks"] == 900 // BLOCK + 959 // BLOCK
    assert host.ask(Ask(words(6, 2) + text, NAIVE))[0].grafted == 899
