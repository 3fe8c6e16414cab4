"""Prompts that begin with an earlier one go on with its KV in vLLM's blocks; nobody else ever finds
that."""

import pytest
import torch
from engines import BLOCK, EVERYTHING, NAIVE, NUM_BLOCKS, OFF, Answer, Ask, words
from hosts import Host
from processes import HostProcess

from kvgraft.core.admission import Reuse
from kvgraft.policies import SparseX
from kvgraft.prefill.context import Hidden, Policy, PrefillContext

DOCUMENT, OPENING = words(300, 1), words(70, 2)
FIRST = 64  # the first graft stands in the block that begins here


def kinds(answer: Answer) -> tuple[int, int, int]:
    """Prefix, continued and grafted tokens."""
    report = answer.report
    found = report["prefix_tokens"], report["continued_tokens"], report["grafted_tokens"]
    assert sum(found) + report["fresh_tokens"] == report["prompt_tokens"]
    assert answer.cached == sum(found)
    return found


def first_turn(
    host: Host, options: dict = NAIVE, salt: str | None = None, max_tokens: int = 60
) -> list[int]:
    """A conversation with a graft in it: its prompt and answer, and what comes next."""
    host.ask(Ask(DOCUMENT, OFF, salt, max_tokens=1))
    [answer] = host.ask(Ask(OPENING + DOCUMENT, options, salt, max_tokens))
    assert kinds(answer) == (0, 0, 300 // BLOCK * BLOCK)
    return OPENING + DOCUMENT + answer.tokens + words(40, 3)


def test_the_next_turn_goes_on_with_all_of_the_last_one(host: Host):
    prompt = first_turn(host)
    left = (370 + 59) // BLOCK * BLOCK
    [second] = host.ask(Ask(prompt, NAIVE, max_tokens=50))
    assert kinds(second) == (FIRST, left - FIRST, 0)
    assert second.report["outcome"] == "continued"
    assert second.report["reason"] is None
    assert second.report["spans"] == [
        [0, FIRST, "prefix"],
        [FIRST, left, "continued"],
        [left, len(prompt), "fresh"],
    ]
    assert host.count("tokens_total", "continued") == left - FIRST
    assert host.count("misses_total") == 0
    [third] = host.ask(Ask(prompt + second.tokens + words(9, 4), NAIVE))
    assert kinds(third) == (FIRST, (len(prompt) + 49) // BLOCK * BLOCK - FIRST, 0)


def test_it_is_as_plain_vllm_would_have_it(host: Host, plain: HostProcess):
    """Each turn finds as much as a prefix cache would have found, and where all was recomputed
    answers are exact."""
    prompt = first_turn(host, EVERYTHING)
    found = (370 + 59) // BLOCK * BLOCK
    for turn in range(4):
        [answer] = host.ask(Ask(prompt, EVERYTHING, max_tokens=20))
        assert [answer.tokens] == plain.tokens(prompt, max_tokens=20)
        prefix, continued, grafted = kinds(answer)
        assert (prefix, grafted) == (FIRST, 0)
        assert prefix + continued == found
        found = (len(prompt) + 19) // BLOCK * BLOCK
        prompt = prompt + answer.tokens + words(33, 10 + turn)


def spoil_grafted_blocks(host: Host) -> int:
    """Overwrite what was grafted, and what only prompts find which go on with it; how many tokens
    that are."""
    known = host.side.admission.approximate._blocks.values()
    blocks = host.known.pool.find({key for key, _, grafted in known if grafted})
    host.poison(blocks)
    return len(blocks) * BLOCK


def test_it_is_recovered_for_the_new_question_where_it_is(host: Host, plain: HostProcess):
    prompt = first_turn(host, EVERYTHING)
    num_spoilt = spoil_grafted_blocks(host)
    [answer] = host.ask(Ask(prompt, EVERYTHING, max_tokens=20))
    assert kinds(answer)[1] > answer.report["recomputed_tokens"] == num_spoilt > 0
    assert answer.report["outcome"] == "continued"
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=20)
    [again] = host.ask(Ask(prompt, EVERYTHING, max_tokens=20))
    assert again.tokens == answer.tokens


def test_who_comes_while_it_is_recovered_waits(host: Host, plain: HostProcess):
    prompt = first_turn(host, EVERYTHING)
    spoil_grafted_blocks(host)
    prompts = [prompt + words(20, 6), prompt + words(30, 7), prompt + words(9, 8)]
    answers = host.ask(*[Ask(prompt, EVERYTHING, max_tokens=20) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert kinds(answer)[1] > 0
        assert [answer.tokens] == plain.tokens(prompt, max_tokens=20)


def test_a_plan_that_waits_is_made_anew_when_others_have_come_to_read_what_it_rewrites(host: Host):
    name = host.add(Ask(first_turn(host, EVERYTHING), EVERYTHING, max_tokens=2))
    state, known = host.state(name), host.known
    host.side._masking.inject_approximate_prefix(state)
    state.prefix = known.pool.find(state.request.block_hashes)

    def decide() -> Reuse:
        return known.decide(state, dict(enumerate(state.prefix)), state.candidate)

    state.candidate = decide()
    first = state.candidate.in_place[0]
    assert decide() is state.candidate
    known.pool.acquire([first])
    assert decide().in_place == state.candidate.in_place[1:]
    known.pool.release([first])
    assert decide() is state.candidate
    other = state.prefix.index(first)
    state.prefix[other] = next(page for page in range(1, NUM_BLOCKS) if page not in state.prefix)
    assert decide().in_place == (
        state.prefix[other],
        *state.candidate.in_place[1:],
    )
    state.candidate = None
    host.finish(name)


def test_who_would_graft_from_it_waits(host: Host, monkeypatch: pytest.MonkeyPatch):
    """What is half recovered is no source, not even for one step: the recovery may yet fail."""
    host.read(DOCUMENT)
    exact = host.blocks_with_content()
    [first] = host.ask(Ask(OPENING + DOCUMENT, EVERYTHING, max_tokens=1))
    host.settle()
    host.evict(exact)  # the copies are all that is left of the document
    prompt = OPENING + DOCUMENT + first.tokens + words(40, 3)
    with monkeypatch.context() as patched:
        patched.setattr(host.queue, "advance", lambda *given: {})
        rewriting = host.add(Ask(prompt, EVERYTHING, max_tokens=2))
        host.step_until(lambda: bool(host.queue._batches))
        assert host.side._recoveries._rewritten
        other = host.add(Ask(words(9, 6) + DOCUMENT + words(9, 7), NAIVE, max_tokens=2))
        for _ in range(5):
            host.step()
        assert not host.state(other).admitted
    answers = host.finish(rewriting, other)
    assert kinds(answers[0])[1] > 0
    assert kinds(answers[1])[2] > 0
    assert not host.side._recoveries._rewritten


def test_what_others_read_stays_as_it_is(host: Host, plain: HostProcess):
    host.read(DOCUMENT)
    prompt = OPENING + DOCUMENT
    name = host.add(Ask(prompt, EVERYTHING, max_tokens=100))
    host.step_until(lambda: name in host.outputs)
    before = host.read_kv(host.slots(name)[: len(prompt)])
    [answer] = host.ask(Ask(prompt + words(40, 3), EVERYTHING, max_tokens=5))
    after = host.read_kv(host.slots(name)[: len(prompt)])
    assert kinds(answer)[1] > 0
    assert answer.report["recomputed_tokens"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [host.finish(name)[0].tokens] == plain.tokens(prompt, max_tokens=100)


@pytest.mark.parametrize("how", ["fails", "aborts"])
def test_nobody_goes_on_with_what_is_half_recovered(
    host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch, how: str
):
    prompt = first_turn(host, EVERYTHING)

    def fail(self: Policy, ctx: PrefillContext) -> Hidden:
        ctx.run(range(1), ctx.embed(ctx.plan.active))
        raise RuntimeError("as if")

    with monkeypatch.context() as patched:
        if how == "fails":
            patched.setattr(SparseX, "recover", fail)
            [answer] = host.ask(Ask(prompt, EVERYTHING))
            assert (answer.report["outcome"], answer.report["reason"]) == ("fallback", "error")
            assert [answer.tokens] == plain.tokens(prompt)
        else:
            patched.setattr(host.queue, "advance", lambda *given: {})
            name = host.add(Ask(prompt, EVERYTHING))
            host.step_until(lambda: bool(host.queue._batches))
            host.abort(name)
    host.settle()
    assert not host.continuable()
    [exact] = host.ask(Ask(prompt, EVERYTHING))
    assert kinds(exact)[1] == 0
    assert [exact.tokens] == plain.tokens(prompt)


@pytest.mark.parametrize("options", [OFF, {"reuse": "exact"}, {"policy": "full"}], ids=str)
def test_who_wants_exact_kv_gets_it(host: Host, plain: HostProcess, options: dict):
    prompt = first_turn(host)
    [answer] = host.ask(Ask(prompt, options))
    assert kinds(answer) == (FIRST, 0, 0)
    assert [answer.tokens] == plain.tokens(prompt)
    [again] = host.ask(Ask(prompt, NAIVE))
    assert kinds(again) == ((len(prompt) - 1) // BLOCK * BLOCK, 0, 0), (
        "what is exact and reaches as far is better"
    )
    assert [again.tokens] == [answer.tokens]


def test_others_do_not_go_on_with_it(host: Host):
    prompt = first_turn(host, salt="one")
    for salt in ("two", None):
        [answer] = host.ask(Ask(prompt, NAIVE, salt))
        assert kinds(answer) == (0, 0, 0)
    [answer] = host.ask(Ask(prompt, {"policy": "epic"}, "one"))
    assert kinds(answer)[:2] == (FIRST, 0)


def test_a_running_request_can_be_gone_on_with(host: Host):
    host.read(DOCUMENT)
    name = host.add(Ask(OPENING + DOCUMENT, NAIVE, max_tokens=200))
    host.step_until(lambda: name in host.outputs)
    [answer] = host.ask(Ask(OPENING + DOCUMENT + words(40, 3), NAIVE))
    assert kinds(answer) == (FIRST, 370 // BLOCK * BLOCK - FIRST, 0)
    assert not host.outputs[name].finished
    host.finish(name)


def test_known_text_behind_it_is_grafted(host: Host):
    other = words(200, 5)
    host.read(other)
    prompt = first_turn(host) + other + words(9, 6)
    [answer] = host.ask(Ask(prompt, NAIVE))
    prefix, continued, grafted = kinds(answer)
    assert (prefix, continued) == (FIRST, 416 - FIRST)
    assert grafted >= 192
    [again] = host.ask(Ask(prompt + words(3, 7), NAIVE))
    assert kinds(again) == (FIRST, len(prompt) // BLOCK * BLOCK - FIRST, 0)


def test_it_ends_with_its_blocks(host: Host):
    prompt = first_turn(host)
    hidden = sorted(host.blocks_with_content())
    [before] = host.ask(Ask(prompt, NAIVE, max_tokens=1))
    assert kinds(before)[1] > 0
    host.evict(hidden)
    [after] = host.ask(Ask(prompt, NAIVE, max_tokens=1))
    assert kinds(after) == (0, 0, 0)


def test_a_reset_forgets_it(host: Host):
    prompt = first_turn(host)
    host.settle()
    assert host.llm.reset_prefix_cache()
    assert kinds(host.ask(Ask(prompt, NAIVE))[0]) == (0, 0, 0)


def test_a_failed_recovery_behind_it_leaves_nothing_that_poses_as_exact(
    host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    other = words(200, 5)
    host.read(other)
    prompt = first_turn(host) + other + words(9, 6)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("as if")

    with monkeypatch.context() as patched:
        patched.setattr(host.queue, "_recover", fail, raising=False)
        from kvgraft.policies import Naive

        patched.setattr(Naive, "recover", fail)
        [answer] = host.ask(Ask(prompt, NAIVE))
    assert answer.report["reason"] == "error"
    assert kinds(answer) == (FIRST, 416 - FIRST, 0)
    [exact] = host.ask(Ask(prompt, OFF))
    assert kinds(exact)[0] == FIRST
    assert [exact.tokens] == plain.tokens(prompt)


def test_a_preempted_request_goes_on_again(host: Host):
    prompt = first_turn(host)
    name = host.add(Ask(prompt, NAIVE, max_tokens=60))
    host.step_until(lambda: name in host.outputs)
    host.preempt(name)
    [answer] = host.finish(name)
    assert len(answer.tokens) == 60
    [exact] = host.ask(Ask(prompt, OFF))
    assert kinds(exact)[1:] == (0, 0)


def test_a_preempted_request_that_is_aborted_leaves_what_it_can(host: Host):
    """Others have been admitted in between, so that its blocks were known already."""
    host.read(DOCUMENT)
    name = host.add(Ask(OPENING + DOCUMENT, NAIVE, max_tokens=200))
    host.step_until(lambda: name in host.outputs)
    host.ask(Ask(words(40, 3), NAIVE, max_tokens=1))
    assert host.state(name).provenance.num_continuable
    host.preempt(name, meanwhile=lambda: None)
    host.abort(name)
    host.settle()
    assert kinds(host.ask(Ask(words(5, 9) + DOCUMENT, NAIVE))[0])[2] > 0
