"""Answers that requests give: tokens are theirs, log-probabilities those of plain vLLM, and nobody
else notices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import EVERYTHING, NAIVE, OFF, Answer, Ask, words
from hosts import Host
from processes import HostProcess
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from kvgraft.vllm.patches.forced_tokens import SlotAnswers, check_forced_output
from models import VOCAB_SIZE

TOLERANCE = 1e-4  # of float32 log-probabilities
DOCUMENT, ANSWER = words(320, 1), words(7, 2)
PROMPT = [*words(40, 3), *DOCUMENT, *words(20, 4)]
TRANSITIVE = {"policy": "transitive"}


def given(
    options: dict[str, Any], answer: list[int] = ANSWER, prompt: list[int] = PROMPT, **fields: Any
) -> Ask:
    """A request that gives its answer, and no token more unless it says so."""
    return Ask(
        prompt,
        options | {"forced_output": answer},
        logprobs=True,
        **{"max_tokens": len(answer), **fields},
    )


def expected(
    plain: HostProcess, answer: list[int] = ANSWER, prompt: list[int] = PROMPT
) -> list[float]:
    """What plain vLLM says of the answer's tokens where they stand in a prompt."""
    [whole] = plain.ask(Ask([*prompt, *answer], max_tokens=1, prompt_logprobs=True))
    return whole.prompt_logprobs[-len(answer) :]


def distance(ours: Answer, theirs: list[float]) -> float:
    assert len(ours.logprobs) == len(theirs)
    return float(np.abs(np.array(ours.logprobs) - theirs).max())


@pytest.mark.parametrize(
    "options", [OFF, EVERYTHING], ids=["nothing is grafted", "all of it is recomputed"]
)
def test_log_probabilities_are_those_of_plain_vllm(
    host: Host, plain: HostProcess, options: dict[str, Any]
):
    host.read([*words(30, 5), *DOCUMENT])
    [answer] = host.ask(given(options))
    assert answer.tokens == ANSWER
    assert (answer.report["grafted_tokens"] >= 256) == (options != OFF)
    assert distance(answer, expected(plain)) < TOLERANCE


@pytest.mark.parametrize("options", [NAIVE, TRANSITIVE], ids=["naive", "transitive"])
def test_the_policy_chooses_by_the_prompt_alone(
    host: Host, plain: HostProcess, options: dict[str, Any]
):
    def ask(asked: Ask) -> Answer:
        host.forget()
        host.read([*words(30, 5), *DOCUMENT])
        return host.ask(asked)[0]

    own = ask(Ask(PROMPT, options, max_tokens=1, logprobs=True))
    answer = ask(given(options, [*own.tokens, *ANSWER]))
    assert answer.tokens == [*own.tokens, *ANSWER]
    assert answer.grafted >= 256
    for counted in (
        "grafted_tokens",
        "recomputed_tokens",
        "fresh_tokens",
        "computed_share",
        "spans",
    ):
        assert answer.report[counted] == own.report[counted]
    assert answer.logprobs[0] == pytest.approx(own.logprobs[0], abs=1e-6)
    if options == NAIVE:
        assert distance(answer, expected(plain, [*own.tokens, *ANSWER])) > 0.01


def test_company_neither_gives_nor_takes(host: Host, plain: HostProcess):
    prompts = [words(count, count) for count in (30, 150, 90, 200)]
    answers = [words(count, 100 + count) for count in (3, 6, 9, 5)]
    free = [
        host.add(Ask(prompt, OFF, f"free {n}", logprobs=True)) for n, prompt in enumerate(prompts)
    ]
    bound = [
        host.add(given(OFF, answer, prompt, salt=f"bound {n}", max_tokens=12))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    host.step_until(lambda: len(host.request(bound[2]).output_token_ids) >= 3)
    host.preempt(bound[2])
    alone = plain.tokens(*prompts)
    assert [answer.tokens for answer in host.finish(*free)] == alone
    for answer, prompt, found in zip(answers, prompts, host.finish(*bound), strict=True):
        [rest] = plain.tokens([*prompt, *answer], max_tokens=12 - len(answer))
        assert found.tokens == [*answer, *rest], "behind what is given the model goes on by itself"
        assert (
            distance(
                Answer([], 0, {}, found.logprobs[: len(answer)]), expected(plain, answer, prompt)
            )
            < TOLERANCE
        )


def test_what_is_given_is_found_in_its_own_namespace_only(host: Host):
    prompt, answer = words(90, 6), words(40, 7)
    host.ask(given(OFF, answer, prompt, salt="alice"))
    longer = [*prompt, *answer, *words(5, 8)]
    [mine], [theirs] = (host.ask(Ask(longer, OFF, salt, max_tokens=1)) for salt in ("alice", "bob"))
    assert (mine.cached, theirs.cached) == (128, 0)


@pytest.mark.parametrize(
    "answer", [[VOCAB_SIZE], ["w3"], [], [3] * 9], ids=["beyond", "words", "empty", "too long"]
)
def test_what_cannot_be_given_is_said_in_the_report(
    host: Host, plain: HostProcess, answer: list[Any]
):
    [found] = host.ask(Ask(PROMPT, NAIVE | {"forced_output": answer}, max_tokens=8))
    assert found.report["reason"] == "invalid_params"
    assert [found.tokens] == plain.tokens(PROMPT)


@pytest.mark.parametrize(
    ("fields", "engine", "message"),
    [
        ({}, {}, None),
        ({"max_tokens": 1}, {}, "forced_output has 2 tokens, but max_tokens is 1"),
        ({}, {"speculative_config": object()}, "does not go with speculative decoding"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a")},
            {},
            "does not go with structured outputs",
        ),
        ({"thinking_token_budget": 1}, {}, "does not go with a budget of thinking tokens"),
        (
            {"logprobs": 1},
            {"mode": "processed_logprobs"},
            "does not go with --logprobs-mode processed_logprobs",
        ),
        ({}, {"mode": "processed_logprobs"}, None),
    ],
)
def test_what_an_answer_does_not_go_with(
    fields: dict[str, Any], engine: dict[str, Any], message: str | None
):
    mode = engine.get("mode", "raw_logprobs")
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE, logprobs_mode=mode)
    config: Any = SimpleNamespace(
        model_config=model, speculative_config=engine.get("speculative_config")
    )
    params = SamplingParams(**{"max_tokens": 2, **fields})
    check_forced_output((), params, config)
    if message is None:
        check_forced_output((3, 4), params, config)
        return
    with pytest.raises(ValueError, match=message):
        check_forced_output((3, 4), params, config)


def test_the_second_model_runner_gives_answers_by_slots():
    """Three slots: one gives two tokens, one is still reading its prompt, one gives none any
    more."""
    model = SimpleNamespace(get_vocab_size=lambda: 6, logprobs_mode="raw_logprobs")
    config: Any = SimpleNamespace(model_config=model, speculative_config=None)
    num_prompt = np.array([10, 20, 30])
    answers = SlotAnswers(config, SimpleNamespace(prompt_len=SimpleNamespace(np=num_prompt)))

    def params(*answer: int) -> SamplingParams:
        said = (
            {"kv_transfer_params": {"kvgraft": {"forced_output": list(answer)}}} if answer else None
        )
        return SamplingParams(max_tokens=4, extra_args=said)

    assert [
        answers.add_request(slot, params(*given))
        for slot, given in ((2, (5, 1)), (1, (4,)), (0, (3,)))
    ] == [True] * 3
    assert not answers.add_request(0, params())
    for after, chosen in ((0, 5), (1, 1), (2, None)):
        batch: Any = SimpleNamespace(
            idx_mapping_np=np.array([1, 2, 0]),
            seq_lens_upper_bound_np=np.array([12, 30 + after, 10]),
        )
        logits = torch.arange(18.0).view(3, 6)
        changed = answers.apply(logits.clone(), batch)
        assert torch.equal(changed[[0, 2]], logits[[0, 2]])
        if chosen is None:
            assert torch.equal(changed, logits)
        else:
            assert changed[1].softmax(0).tolist() == [float(token == chosen) for token in range(6)]
