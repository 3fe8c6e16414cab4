"""Waiting, memory and time: a recovery never waits for itself, never holds up the others, and never
keeps a block."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import BLOCK, EVERYTHING, MAX_LENGTH, NUM_BLOCKS, OFF, STEP_TOKENS, Ask, words
from hosts import Host
from processes import HostProcess

from kvgraft.core.costs import Costs

ALL_LAYERS = {"policy": "sparsex", "boundary_layers": 4}


class Spy:
    """Stands before a method; counts its calls."""

    def __init__(self, owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self._method: Callable[..., Any] = getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._method(*args, **kwargs)


def blocks(number: int, seed: int) -> list[int]:
    """Text that fills this many blocks."""
    return words(number * BLOCK, seed)


# memory


def test_sources_and_blocks_that_do_not_fit_together(host: Host, plain: HostProcess):
    """The pinned sources are what is in the way of the request that they are for: without a cure it
    waits for ever."""
    document = blocks(50, 1)
    host.read(document)
    prompt = words(10, 2) + document + words(10, 3)
    [answer] = host.ask(Ask(prompt, EVERYTHING), limit=100)
    assert [answer.tokens] == plain.tokens(prompt)
    assert (answer.grafted, answer.report["reason"]) == (0, "pool_pressure")
    assert host.count("fallbacks_total", "pool_pressure") == 1


@pytest.mark.parametrize("num_blocks", range(52, 58))
def test_a_request_that_just_fits(host: Host, plain: HostProcess, num_blocks: int):
    """Beside its 40 sources, of 95 blocks."""
    document = blocks(40, 1)
    host.read(document)
    prompt = words(10, 2) + document + words(num_blocks * BLOCK - len(document) - 20, 3)
    [answer] = host.ask(Ask(prompt, EVERYTHING, max_tokens=1), limit=100)
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=1)
    if num_blocks not in (54, 55):  # there either is right
        assert answer.report["reason"] == (None if num_blocks < 54 else "pool_pressure")


@pytest.mark.parametrize(("num_sources", "reason"), [(30, None), (33, "pool_pressure")])
def test_exact_hits_need_room_as_well(
    host: Host, plain: HostProcess, num_sources: int, reason: str | None
):
    """Blocks of an exact prefix that nobody holds count as free until vLLM takes them."""
    prefix, document = blocks(30, 1), blocks(34, 2)
    host.read(prefix, document)
    prompt = prefix + words(20, 3) + document[10 : 10 + BLOCK * (num_sources - 1)]
    # 30 + num_sources blocks, beside the sources
    [answer] = host.ask(Ask(prompt, EVERYTHING), limit=100)
    assert [answer.tokens] == plain.tokens(prompt)
    assert (answer.report["prefix_tokens"], answer.report["reason"]) == (len(prefix), reason)


def test_a_preempted_request_does_not_wait_for_itself(host: Host, plain: HostProcess):
    """It comes back when its text is known elsewhere, and finds itself alone: sources and blocks do
    not fit."""
    document = blocks(40, 1)
    prompt = words(20 * BLOCK, 2) + document
    name = host.add(Ask(prompt, EVERYTHING, max_tokens=8))
    host.step_until(lambda: name in host.outputs)
    host.preempt(name, lambda: host.read(document))
    [answer] = host.finish(name, limit=100)
    assert [answer.tokens] == plain.tokens(prompt)


def test_a_waiting_request_is_matched_once(
    host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    """Until one of its sources is gone: what was planned then is never used."""
    document = blocks(20, 1)
    host.read(document)
    running = host.add(Ask(blocks(60, 2), OFF, max_tokens=60))
    host.step_until(lambda: running in host.outputs)
    match = Spy(host.known.index, "match", monkeypatch)
    prompt = words(10, 3) + document + words(10 * BLOCK, 4)
    name = host.add(Ask(prompt, EVERYTHING))
    state = host.state(name)
    for _ in range(5):
        host.step()
    assert not state.admitted
    assert match.num_calls == 1
    source = state.candidate.sources[-1]
    host.evict([source])
    for _ in range(5):
        host.step()
    assert not state.admitted
    assert match.num_calls == 2
    assert source not in state.candidate.sources
    _, answer = host.finish(running, name)
    assert match.num_calls == 2
    assert answer.grafted == 19 * BLOCK
    assert [answer.tokens] == plain.tokens(prompt)


def test_sources_are_held_until_they_are_copied(host: Host, plain: HostProcess):
    """Blocks that are allocated during a long recovery, for others, are not its sources."""
    document = blocks(22, 1)
    host.read(document)
    name = host.add(Ask(words(10, 2) + document, ALL_LAYERS))
    host.step()
    state = host.state(name)
    assert state.recovering
    sources = set(state.recovery.sources)
    assert len(sources) == 22
    flood = [
        host.add(Ask(words(40 * BLOCK, seed), OFF, salt=str(seed), max_tokens=1))
        for seed in range(3, 6)
    ]
    while state.recovering:
        assert all(host.known.pool.ref_count(page) for page in sources)
        host.step()
    assert {host.known.pool.ref_count(page) for page in sources} == {0}
    answer, *_ = host.finish(name, *flood)
    assert [answer.tokens] == plain.tokens(words(10, 2) + document)


# time


def test_a_long_recovery_spends_its_budget_and_lets_others_decode(
    host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    document = blocks(30, 1)
    host.read(document)
    stream = host.add(Ask(words(20, 2), OFF, max_tokens=40))
    host.step_until(lambda: stream in host.outputs)
    rows: list[int] = []
    spared: list[int] = []
    run_layer, advance = host.model.run_layer, host.queue.advance

    def counting_run_layer(index: int, metadata: Any, slots: Any, *rest: Any) -> Any:
        rows.append(slots.shape[1])
        return run_layer(index, metadata, slots, *rest)

    def recording_advance(spare_tokens: int, costs: Costs) -> Any:
        spared.append(spare_tokens)
        rows.clear()
        ended = advance(spare_tokens, costs)
        assert sum(rows) <= (spare_tokens + costs.pass_s) * host.model.num_layers + STEP_TOKENS
        assert all(number <= STEP_TOKENS for number in rows)
        return ended

    monkeypatch.setattr(host.model, "run_layer", counting_run_layer)
    monkeypatch.setattr(host.queue, "advance", recording_advance)
    prompt = words(10, 3) + document + words(10, 4)
    name = host.add(Ask(prompt, ALL_LAYERS, max_tokens=1))
    num_steps, num_tokens = 0, len(host.outputs[stream].outputs[0].token_ids)
    while not (name in host.outputs and host.outputs[name].finished):
        assert stream in [output.request_id for output in host.step()]
        num_steps += 1
    assert len(host.outputs[stream].outputs[0].token_ids) == num_tokens + num_steps
    assert num_steps > 4
    assert spared[0] == STEP_TOKENS - 1
    assert [host.finish(name)[0].tokens] == plain.tokens(prompt, max_tokens=1)


def test_a_recovery_that_a_step_has_room_for_is_one_forward(
    host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    """And a longer one goes layer by layer, since others must come between."""
    host.read(document := blocks(30, 1))
    forwards = Spy(host.model, "run_model", monkeypatch)
    short, long = (words(10, 3) + document[: count * BLOCK] + words(10, 4) for count in (4, 30))
    for prompt, count in ((short, 1), (long, 0)):
        before = forwards.num_calls
        answers = host.ask(Ask(prompt, EVERYTHING, max_tokens=3))
        assert forwards.num_calls - before == count
        assert [answer.tokens for answer in answers] == plain.tokens(prompt, max_tokens=3)


def test_prompts_that_fill_every_step_do_not_starve_a_recovery(host: Host):
    document = words(400, 1)
    host.read(document)
    name = host.add(Ask(words(10, 2) + document, ALL_LAYERS))
    host.step()
    state = host.state(name)
    flood = host.add(Ask(words(1700, 3), OFF, salt="other"))
    while state.recovering:
        host.step()
        assert host.request(flood).num_computed_tokens % STEP_TOKENS == 0  # the step was full
    assert host.request(flood).num_computed_tokens >= 2 * STEP_TOKENS
    assert host.finish(name, flood)[0].grafted >= 380


# coming and going


def test_preemption(host: Host, plain: HostProcess):
    """Grafted and plain requests that outgrow the pool together."""
    documents = [words(150, 1), words(200, 2)]
    host.read(*documents)
    prompts = [
        words(100 * number + 10, 10 + number) + documents[number % 2] + words(150, 20 + number)
        for number in range(6)
    ]
    options = [EVERYTHING, OFF, ALL_LAYERS, EVERYTHING, OFF, EVERYTHING]
    answers = host.ask(*[Ask(p, o, max_tokens=200) for p, o in zip(prompts, options, strict=True)])
    assert host.num_preemptions > 0
    assert [answer.tokens for answer in answers] == plain.tokens(*prompts, max_tokens=200)
    assert sum(answer.grafted > 100 for answer in answers) == 4


@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_step(host: Host, plain: HostProcess, num_steps: int):
    """Before the first step, in the recovery, when it has just ended, while decoding: the other of
    its batch goes on, and what the aborted one leaves behind is no source of wrong text."""
    document = words(600, 1)
    host.read(document)
    prompt, other = words(10, 2) + document, words(70, 3) + document[100:]
    gone, stays = (
        host.add(Ask(prompt, ALL_LAYERS, max_tokens=3)),
        host.add(Ask(other, ALL_LAYERS, max_tokens=3)),
    )
    for _ in range(num_steps):
        host.step()
    host.abort(gone)
    assert [answer.tokens for answer in host.finish(stays)] == plain.tokens(other, max_tokens=3)
    host.settle()
    assert host.problems() == []
    answers = host.ask(Ask(prompt, EVERYTHING), Ask(prompt, OFF))
    assert [answer.tokens for answer in answers] == plain.tokens(prompt, prompt)


def test_the_aborts_above_hit_every_state(host: Host):
    """Else they show less than they say."""
    document = words(600, 1)
    host.read(document)
    name = host.add(Ask(words(10, 2) + document, ALL_LAYERS, max_tokens=3))
    host.add(Ask(words(70, 3) + document[100:], ALL_LAYERS, max_tokens=3))
    states = []
    for _ in range(8):
        state = host.state(name) if host.is_alive(name) else None
        states.append((state and state.recovering, state and state.request.status.name))
        host.step()
    assert states[0] == (False, "WAITING")
    assert (True, "WAITING_FOR_REMOTE_KVS") in states
    assert (False, "WAITING_FOR_REMOTE_KVS") in states  # recovered, and not yet taken up again
    assert (False, "RUNNING") in states


def test_abort_of_all_requests_of_a_batch_ends_its_work(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    document = words(900, 1)
    host.read(document)
    names = [host.add(Ask(words(10, seed) + document, ALL_LAYERS)) for seed in (2, 3)]
    host.step()
    assert [host.state(name).recovering for name in names] == [True, True]
    work = [Spy(host.model, name, monkeypatch) for name in ("run_layer", "run_model")]
    host.abort(*names)
    host.settle()
    assert [spy.num_calls for spy in work] == [0, 0]
    assert host.count("fallbacks_total", "aborted") == 2


def test_abort_while_waiting_for_memory(host: Host):
    document = blocks(20, 1)
    host.read(document)
    running = host.add(Ask(blocks(60, 2), OFF, max_tokens=30))
    host.step_until(lambda: running in host.outputs)
    name = host.add(Ask(words(10, 3) + document + words(10 * BLOCK, 4), EVERYTHING))
    host.step()
    host.step()
    assert host.state(name).candidate is not None
    host.abort(name)
    host.finish(running)


def test_many_requests_at_once(host: Host, plain: HostProcess):
    """Three that graft in one step under two policies, beside plain ones."""
    documents = [words(150, 1), words(100, 2)]
    host.read(*documents)
    prompts = [words(10 + number, 10 + number) + documents[number % 2] for number in range(6)] + [
        words(99, 30)
    ]
    options = [EVERYTHING, EVERYTHING, ALL_LAYERS, EVERYTHING, OFF, OFF, EVERYTHING]
    names = [host.add(Ask(p, o)) for p, o in zip(prompts, options, strict=True)]
    host.step()
    assert (
        sum(state.admitted and state.reason is None for state in host.side._requests.values()) >= 3
    )
    answers = host.finish(*names)
    assert [answer.tokens for answer in answers] == plain.tokens(*prompts)
    assert [answer.grafted > 0 for answer in answers] == [True] * 4 + [False] * 3


def test_the_longest_prompt(host: Host, plain: HostProcess):
    document = words(900, 1)
    host.read(document)
    prompt = document[100:] + words(MAX_LENGTH - 801, 2)
    [answer] = host.ask(Ask(prompt, EVERYTHING, max_tokens=1))
    assert answer.grafted == 796
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=1)


def test_reset_forgets_everything(host: Host, plain: HostProcess):
    document = words(300, 1)
    host.read(document)
    prompt = words(10, 2) + document
    assert host.ask(Ask(prompt, EVERYTHING))[0].grafted >= 280
    assert host.llm.reset_prefix_cache()
    host.poison(range(1, NUM_BLOCKS + 1))
    [answer] = host.ask(Ask(prompt, EVERYTHING))
    assert (answer.cached, answer.report["reason"]) == (0, "no_known_text")
    assert [answer.tokens] == plain.tokens(prompt)
    # of what was read since
    assert host.ask(Ask(words(3, 3) + document, EVERYTHING))[0].grafted >= 256
    assert np.all(host.known.index.segments.blocks._entries.page >= 0)
