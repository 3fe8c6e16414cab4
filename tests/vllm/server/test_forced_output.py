"""Answers that requests give, over HTTP: what plain vLLM says of the same tokens, and what is
refused."""

from typing import Any

import pytest
from openai import BadRequestError
from running import ALICE, BOB, RunningServer
from test_server import QUESTION, complete, elsewhere

TOLERANCE = 0.05  # of log-probabilities of a model in bfloat16, whose logits are of order 10
ANSWER = [40, 7, 203, 7, 99]


def token_ids(tokens: list[str]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in tokens]


def ask(
    server: RunningServer, key: str, prompt: Any, max_tokens: int = len(ANSWER), **extra: Any
) -> Any:
    """One completion, whose tokens are told by their ids."""
    body = {"return_tokens_as_token_ids": True, "ignore_eos": True, **extra}
    return server.openai(key).completions.create(
        model="bundled",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=3,
        extra_body=body,
    )


def giving(answer: Any, **options: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvgraft": {**options, "forced_output": answer}}}


def plain(server: RunningServer, prompt: str) -> list[float]:
    """What vLLM says of the answer's tokens behind the prompt, which it computes in full for
    that."""
    with server.http(ALICE) as client:
        read = client.post("/tokenize", json={"model": "bundled", "prompt": prompt}).json()[
            "tokens"
        ]
    answer = ask(server, ALICE, [*read, *ANSWER], 1, prompt_logprobs=0)
    report = answer.model_extra["kv_transfer_params"]["kvgraft"]
    assert (report["reason"], report["fresh_tokens"]) == (
        "prompt_logprobs",
        len(read) + len(ANSWER),
    )
    places = answer.choices[0].model_extra["prompt_logprobs"][-len(ANSWER) :]
    return [place[str(token)]["logprob"] for place, token in zip(places, ANSWER, strict=True)]


@pytest.mark.parametrize(
    "options",
    [{"reuse": "exact"}, {"policy": "sparsex", "recompute_share": 1.0}, {"policy": "naive"}],
    ids=["nothing is grafted", "all of it is recomputed", "nothing is recomputed"],
)
def test_log_probabilities_are_those_of_plain_vllm(
    server: RunningServer, texts: Any, options: dict[str, Any]
):
    document, here = texts.document(300), f"given {len(options)} {options.get('policy')}"
    prompt = elsewhere(document)
    truth = plain(server, prompt)
    complete(server, ALICE, document, kv_transfer_params={"kvgraft": {"namespace": here}})
    answer = ask(server, ALICE, prompt, **giving(ANSWER, namespace=here, **options))
    told, report = answer.choices[0].logprobs, answer.model_extra["kv_transfer_params"]["kvgraft"]
    assert token_ids(told.tokens) == ANSWER
    assert (report["grafted_tokens"] >= 200) == ("policy" in options)
    far = max(abs(ours - theirs) for ours, theirs in zip(told.token_logprobs, truth, strict=True))
    assert (far < TOLERANCE) == (options != {"policy": "naive"})
    for token, here_told, place in zip(ANSWER, told.token_logprobs, told.top_logprobs, strict=True):
        assert place[f"token_id:{token}"] == here_told
        assert len(place) >= 3


def test_an_answer_is_given_in_a_stream_too(server: RunningServer, texts: Any):
    client = server.openai(ALICE).completions
    body = {"return_tokens_as_token_ids": True, "ignore_eos": True, **giving(ANSWER[:3])}
    found: list[int] = []
    for chunk in client.create(
        model="bundled",
        prompt=texts.document(64),
        max_tokens=4,
        temperature=1.0,
        logprobs=1,
        stream=True,
        extra_body=body,
    ):
        found += token_ids(chunk.choices[0].logprobs.tokens)
    assert found[:3] == ANSWER[:3]
    assert len(found) == 4


def test_an_answer_is_that_of_its_own_request_alone(server: RunningServer, texts: Any):
    prompt = f"{texts.document(64)} {QUESTION}"
    own = ask(server, BOB, prompt).choices[0].logprobs.tokens
    given = ask(server, ALICE, [prompt, prompt], **giving(ANSWER))
    assert [token_ids(choice.logprobs.tokens) for choice in given.choices] == [ANSWER, ANSWER]
    assert ask(server, BOB, prompt).choices[0].logprobs.tokens == own
    assert ask(server, ALICE, prompt).choices[0].logprobs.tokens == own


@pytest.mark.parametrize(
    ("answer", "extra", "message"),
    [
        ([476], {}, "forced_output must hold token ids below 476, got 476"),
        ([10**30], {}, "kv_transfer_params"),
        ([-1], {}, "forced_output must be a list of token ids"),
        ("lamp", {}, "forced_output must be a list of token ids, got 'lamp'"),
        ([3] * 6, {}, "forced_output has 6 tokens, but max_tokens is 5"),
        (
            [3],
            {"structured_outputs": {"regex": "a"}},
            "forced_output does not go with structured outputs",
        ),
    ],
    ids=["beyond", "far beyond", "negative", "words", "too long", "structured"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_given_is_refused(
    server: RunningServer, answer: Any, extra: dict[str, Any], message: str, stream: bool
):
    with pytest.raises(BadRequestError, match=message):
        server.openai(ALICE).completions.create(
            model="bundled",
            prompt="the old river",
            max_tokens=5,
            stream=stream,
            extra_body=extra | giving(answer),
        )
