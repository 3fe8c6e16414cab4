"""Prompts of which vLLM keeps a part: answers of the native engine, in few blocks, and exact ones
if all fails."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engines import BLOCK, EVERYTHING, NAIVE, NUM_BLOCKS, OFF, Ask, words
from hosts import Host
from processes import HostProcess
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.prompt import Part, Segment
from kvgraft.policies import POLICIES, Condense
from kvgraft.prefill.documents.context import DocumentContext
from kvgraft.server.engine_client import NOT_RESET
from kvgraft.vllm.layers import VllmLayers

DOCUMENTS = [words(9 * BLOCK, 1), words(6 * BLOCK, 2), words(8 * BLOCK, 3)]
NUM_DOCUMENT_TOKENS = sum(map(len, DOCUMENTS))
PROMPT = words(21, 4) + DOCUMENTS[2] + words(3, 5) + DOCUMENTS[0] + DOCUMENTS[1] + words(17, 6)
EXACT = {"policy": "condense", "kept_share": 1.0, "recomputed": "kept"}
FEW = {"policy": "condense", "kept_share": 0.25}
FEWER = [  # by Eq. 2, 3 and the filter than vLLM has room for
    {"policy": "samkv", "block_tokens": 8, "kept_share": 0.8},
    {"policy": "samkv", "block_tokens": 8, "kept_share": 0.6, "bias": "off"},
]
SOME = [
    FEW,
    *FEWER,
    {"policy": "samkv", "block_tokens": 8, "kept_share": 0.4, "top_p": "off"},
    {"policy": "condense", "hop_tokens": 2},
]


@dataclass(frozen=True)
class Failing(Condense):
    """Fails after some of its work."""

    name: ClassVar[str] = "failing"

    def choose(self, ctx: DocumentContext) -> Tensor:
        super().choose(ctx)
        raise RuntimeError("a policy's own bug")


@pytest.fixture(autouse=True)
def _policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, Failing.name, Failing)


@pytest.fixture
def reader(host: Host) -> Iterator[Host]:
    """Has read the documents."""
    host.read(*DOCUMENTS)
    host.queue.library.store.clear()
    yield host
    host.queue.library.store.clear()


@pytest.fixture(scope="module")
def native(model: Path) -> Engine:
    return Engine(model, dtype="float32")


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def policy_of(options: dict[str, object]) -> Any:
    return POLICIES[str(options["policy"])](**{k: v for k, v in options.items() if k != "policy"})


def answer_natively(engine: Engine, options: dict[str, object], max_tokens: int) -> list[int]:
    return ask_natively(engine, options, max_tokens)[0]


def ask_natively(
    engine: Engine, options: dict[str, object], max_tokens: int
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt are kept."""
    parts: list[Part] = [
        text(PROMPT[:21]), Segment(text(DOCUMENTS[2])), text(words(3, 5)),
        Segment(text(DOCUMENTS[0])),
        Segment(text(DOCUMENTS[1])), text(PROMPT[-17:]),
    ]  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [result] = engine.generate([Request(parts, policy_of(options), sampling)])
    assert result.report.prompt_tokens == len(PROMPT)
    return result.token_ids, result.report.counts["kept_tokens"] + result.report.fresh_tokens


def most_kept(options: dict[str, object]) -> int:
    kept: int = policy_of(options).num_kept([len(document) for document in DOCUMENTS])
    return kept + len(PROMPT) - NUM_DOCUMENT_TOKENS


@pytest.mark.parametrize("options", [EXACT, {**EXACT, "rounds": 1, "halo_blocks": 0}])
def test_keeping_and_recomputing_everything_is_exact(
    reader: Host, plain: HostProcess, options: dict[str, object]
):
    [answer] = reader.ask(Ask(PROMPT, options, max_tokens=40))
    assert [answer.tokens] == plain.tokens(PROMPT, max_tokens=40)
    report = answer.report
    assert (report["reason"], report["grafted_tokens"]) == (None, NUM_DOCUMENT_TOKENS)
    assert report["kept_tokens"] == len(PROMPT) == report["prompt_tokens"]
    assert report["recomputed_tokens"] == NUM_DOCUMENT_TOKENS


@pytest.mark.parametrize("options", SOME, ids=str)
def test_answers_are_those_of_the_native_engine(
    reader: Host, native: Engine, options: dict[str, object]
):
    """Of several tokens: the places of what is kept are not its positions."""
    [answer] = reader.ask(Ask(PROMPT, options, max_tokens=24))
    tokens, num_kept = ask_natively(native, options, 24)
    assert (answer.tokens, answer.report["kept_tokens"]) == (tokens, num_kept)
    assert num_kept < most_kept(options) if options in FEWER else num_kept == most_kept(options)
    assert answer.cached == NUM_DOCUMENT_TOKENS


def test_vllm_allocates_blocks_for_what_is_kept(reader: Host):
    name = reader.add(Ask(PROMPT, FEW, max_tokens=40))
    reader.step_until(lambda: name in reader.outputs)
    request = reader.request(name)
    kept = most_kept(FEW)
    assert request.num_prompt_tokens == kept < 0.4 * len(PROMPT)
    [blocks] = reader.manager.get_block_ids(request.request_id)
    assert len(blocks) <= math.ceil((kept + request.num_output_tokens) / BLOCK)
    assert len(reader.outputs[name].prompt_token_ids) == len(PROMPT)  # what the client sees
    reader.finish(name)


def num_blocks(num_tokens: int) -> int:
    return math.ceil(num_tokens / BLOCK)


def test_what_is_not_kept_after_all_is_free_while_the_answer_is_computed(
    reader: Host, native: Engine
):
    """vLLM reserves blocks for as many tokens as may be kept."""
    _, kept = ask_natively(native, FEWER[0], 40)
    name = reader.add(Ask(PROMPT, FEWER[0], max_tokens=40))
    reader.step_until(lambda: reader.state(name).recovering)
    assert reader.known.pool.num_used == num_blocks(most_kept(FEWER[0]))
    reader.step_until(lambda: name in reader.outputs)
    request = reader.request(name)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (kept, 1)
    assert reader.known.pool.num_used == num_blocks(kept + 1) < num_blocks(most_kept(FEWER[0])) - 5
    reader.finish(name)


def test_more_run_together_than_their_reservations_have_room_for(reader: Host, native: Engine):
    expected, kept = ask_natively(native, FEWER[0], 64)
    count = NUM_BLOCKS // num_blocks(kept + 64)
    assert count * num_blocks(most_kept(FEWER[0])) > NUM_BLOCKS
    names = [reader.add(Ask(PROMPT, FEWER[0], max_tokens=64)) for _ in range(count)]
    reader.step_until(lambda: all(name in reader.outputs for name in names))
    assert all(reader.is_alive(name) for name in names)
    assert [answer.tokens for answer in reader.finish(*names)] == [expected] * count
    assert reader.num_preemptions == 0


def test_several_at_once_and_beside_others(reader: Host, native: Engine, plain: HostProcess):
    other = words(200, 9)
    asks = [Ask(PROMPT, options, max_tokens=12) for options in SOME]
    answers = reader.ask(*asks, Ask(other, OFF, max_tokens=12), Ask(PROMPT, EXACT, max_tokens=12))
    assert [answer.tokens for answer in answers[:-2]] == [
        answer_natively(native, options, 12) for options in SOME
    ]
    assert [answer.tokens for answer in answers[-2:]] == plain.tokens(other, PROMPT, max_tokens=12)


@pytest.mark.parametrize("policy", [EXACT, FEW, FEWER[0]])
def test_a_preempted_request_keeps_the_same_again(
    reader: Host, native: Engine, policy: dict[str, object]
):
    name = reader.add(Ask(PROMPT, policy, max_tokens=30))
    reader.step_until(
        lambda: name in reader.outputs and len(reader.outputs[name].outputs[0].token_ids) >= 9
    )
    reader.preempt(name)
    [answer] = reader.finish(name)
    assert (answer.tokens, answer.report["kept_tokens"]) == ask_natively(native, policy, 30)


@pytest.mark.parametrize("policy", [EXACT, FEWER[0]], ids=str)
def test_a_preempted_request_that_cannot_be_recovered_again_goes_on_in_full(
    reader: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch, policy: dict[str, object]
):
    """Over its whole prompt, of which workers knew a part, and its answer so far; also if it is
    preempted once more."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    name = reader.add(Ask(PROMPT, policy, max_tokens=50))
    reader.step_until(
        lambda: name in reader.outputs and len(reader.outputs[name].outputs[0].token_ids) >= 9
    )
    before, is_exact = reader.request(name).num_output_tokens, policy is EXACT
    assert (reader.request(name).num_prompt_tokens == len(PROMPT)) == is_exact
    monkeypatch.setattr(VllmLayers, "close_up", fail)
    reader.preempt(name)
    reader.step_until(lambda: reader.request(name).num_output_tokens >= before + 20)
    assert reader.request(name).num_prompt_tokens == len(PROMPT)
    reader.preempt(name)
    [answer] = reader.finish(name)
    assert len(answer.tokens) == 50
    assert [answer.tokens[before:]] == plain.tokens(
        PROMPT + answer.tokens[:before], max_tokens=50 - before
    )
    assert (answer.report["outcome"], answer.report["reason"]) == ("fallback", "error")
    assert (answer.report["fresh_tokens"], answer.report["kept_tokens"]) == (len(PROMPT), None)
    assert reader.count("fallbacks_total", "error") == 1
    assert reader.count("requests_total", "grafted") == 1


def test_what_goes_on_in_full_is_exact_for_others(
    reader: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    name = reader.add(Ask(PROMPT, FEWER[0], max_tokens=BLOCK))
    reader.step_until(lambda: name in reader.outputs)
    monkeypatch.setattr(VllmLayers, "close_up", None)
    reader.preempt(name)
    [answer] = reader.finish(name)
    follow_up = PROMPT + answer.tokens + words(7, 8)
    [other] = reader.ask(Ask(follow_up, OFF, max_tokens=20))
    assert other.report["prefix_tokens"] == (len(PROMPT) + len(answer.tokens) - 1) // BLOCK * BLOCK
    assert [other.tokens] == plain.tokens(follow_up, max_tokens=20)


def test_a_preempted_request_keeps_its_documents_again_however_full_the_pool_is(
    reader: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch
):
    """It has had room for them before, and can be computed in full in no less."""
    name = reader.add(Ask(PROMPT, EXACT, max_tokens=30))
    reader.step_until(
        lambda: name in reader.outputs and len(reader.outputs[name].outputs[0].token_ids) >= 9
    )
    request = reader.request(name)
    reader.scheduler.running.remove(request)
    reader.scheduler._preempt_request(request, 0.0)
    with monkeypatch.context() as crowded:
        crowded.setattr(type(reader.known.pool), "num_free", 0)
        reader.step()
    [answer] = reader.finish(name)
    assert [answer.tokens] == plain.tokens(PROMPT, max_tokens=30)


def test_a_failure_is_computed_in_full_and_shared_again(reader: Host, plain: HostProcess):
    [answer] = reader.ask(Ask(PROMPT, {"policy": "failing", "kept_share": 0.5}, max_tokens=40))
    assert [answer.tokens] == plain.tokens(PROMPT, max_tokens=40)
    assert (answer.report["reason"], answer.report["fresh_tokens"]) == ("error", len(PROMPT))
    assert answer.report["kept_tokens"] is None
    [again] = reader.ask(Ask(PROMPT, OFF))
    assert again.report["prefix_tokens"] == (len(PROMPT) - 1) // BLOCK * BLOCK


def test_a_request_that_must_not_reuse_any_more_has_its_whole_prompt_again(
    reader: Host, plain: HostProcess
):
    """As when its adapter turns out to have other weights, after its prompt was shortened."""
    name = reader.add(Ask(PROMPT, FEW))
    state = reader.state(name)
    assert state.whole
    state.refusal = "lora"
    [answer] = reader.finish(name)
    assert [answer.tokens] == plain.tokens(PROMPT)
    assert (answer.grafted, answer.report["reason"]) == (0, "lora")


@pytest.mark.parametrize("policy", [FEW, FEWER[0]], ids=str)
def test_poison_in_documents_is_computed_away(
    reader: Host, plain: HostProcess, policy: dict[str, object]
):
    reader.ask(Ask(PROMPT, policy))
    with torch.inference_mode():
        for document in reader.queue.library.store._documents.values():
            document.values.fill_(math.nan)
    [answer] = reader.ask(Ask(PROMPT, policy, max_tokens=40))
    assert [answer.tokens] == plain.tokens(PROMPT, max_tokens=40)
    assert answer.report["reason"] == "non_finite"
    assert reader.count("fallbacks_total", "non_finite") == 1


@pytest.mark.parametrize("policy", [FEW, FEWER[0]], ids=str)
def test_nothing_of_it_is_ever_found(reader: Host, plain: HostProcess, policy: dict[str, object]):
    """Neither under the tokens that vLLM was given in place of the prompt, nor under the prompt's
    own."""
    name = reader.add(Ask(PROMPT, policy, max_tokens=40))
    reader.step_until(lambda: name in reader.outputs)
    placeholder = list(reader.request(name).prompt_token_ids)
    [answer] = reader.finish(name)
    follow_up = PROMPT + answer.tokens
    for prompt in (placeholder, follow_up):
        [other] = reader.ask(Ask(prompt, OFF, max_tokens=20))
        assert other.report["prefix_tokens"] == 0
        assert [other.tokens] == plain.tokens(prompt, max_tokens=20)


@pytest.mark.parametrize(
    ("prompt", "salt", "reason"),
    [
        (words(300, 11), None, "no_known_text"),
        (PROMPT, "another tenant", "no_known_text"),
        (words(900, 11) + DOCUMENTS[0][:70] + words(5, 12), None, "too_little_known"),
    ],
    ids=["unknown", "another namespace", "too little"],
)
def test_without_documents_it_is_plain_vllm(
    reader: Host, plain: HostProcess, prompt: list[int], salt: str | None, reason: str
):
    [answer] = reader.ask(Ask(prompt, FEW, salt, max_tokens=20))
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=20)
    assert (answer.report["reason"], answer.report["kept_tokens"]) == (reason, None)


def test_what_vllm_would_read_of_the_prompt_is_refused(reader: Host):
    name = reader.add(Ask(PROMPT, FEW), repetition_penalty=1.3)
    [answer] = reader.finish(name)
    assert answer.report["reason"] == "repetition_penalty"


@pytest.mark.parametrize("policy", [FEW, FEWER[0]], ids=str)
@pytest.mark.parametrize("answering", [False, True])
def test_an_aborted_request_leaves_nothing(
    reader: Host, policy: dict[str, object], *, answering: bool
):
    name = reader.add(Ask(PROMPT, policy, max_tokens=40))
    reader.step()
    assert reader.state(name).recovering
    if answering:
        reader.step_until(lambda: name in reader.outputs)
    reader.abort(name)
    reader.settle()
    assert reader.problems() == []


def test_documents_of_old_weights_are_forgotten(reader: Host):
    reader.ask(Ask(PROMPT, FEW))
    assert len(reader.queue.library.store) == 3
    assert reader.llm.reset_prefix_cache()
    reader.ask(Ask(words(10, 1), OFF))
    assert len(reader.queue.library.store) == 0


@pytest.mark.parametrize(
    "reset", [{}, {"reset_connector": True}, {"reset_running_requests": True}], ids=str
)
def test_a_reset_during_a_recovery_is_refused_and_nothing_is_forgotten(
    reader: Host, reset: dict[str, bool]
):
    """vLLM's scheduler raises an error where it has preempted all that runs; a server answers False
    to it."""
    reader.ask(Ask(PROMPT, FEW))
    name = reader.add(Ask(PROMPT, EVERYTHING))  # more than one step can do
    reader.step_until(lambda: reader.state(name).recovering)
    if "reset_running_requests" in reset:
        with pytest.raises(RuntimeError, match=NOT_RESET):
            reader.llm.reset_prefix_cache(**reset)
    else:
        assert reader.llm.reset_prefix_cache(**reset) is False
    assert reader.finish(name)[0].grafted
    assert len(reader.queue.library.store) == 3
    assert reader.ask(Ask(words(9, 8) + DOCUMENTS[1], NAIVE))[0].grafted
    assert reader.llm.reset_prefix_cache()


def test_a_prompt_larger_than_the_pool_s_rest_waits_or_is_kept(reader: Host, native: Engine):
    """Six prompts of 27 blocks each, of which 10 are kept, in a pool of 95: all run together."""
    names = [reader.add(Ask(PROMPT, FEW, max_tokens=16)) for _ in range(6)]
    reader.step_until(lambda: all(name in reader.outputs for name in names))
    assert sum(reader.is_alive(name) for name in names) == 6
    answers = reader.finish(*names)
    assert {tuple(answer.tokens) for answer in answers} == {tuple(answer_natively(native, FEW, 16))}


def test_documents_in_host_memory_are_on_the_gauges(reader: Host):
    reader.settle()
    assert (reader.count("documents"), reader.count("document_bytes")) == (0, 0)
    reader.ask(Ask(PROMPT, FEW))
    reader.settle()
    assert reader.count("documents") == len(DOCUMENTS)
    assert reader.count("document_bytes") == reader.queue.library.store.nbytes > 0
    assert reader.llm.reset_prefix_cache()
    reader.read(words(BLOCK, 9))
    reader.settle()
    assert (reader.count("documents"), reader.count("document_bytes")) == (0, 0)
