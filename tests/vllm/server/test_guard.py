"""A server whose guard scores every answer: what it finds is what exact KV says of the same
tokens."""

import os
import re
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import httpx
import pytest
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_forced_output import ask, giving, token_ids
from test_pin_routes import LABELS
from test_server import QUESTION, elsewhere

from kvgraft.guard.distances import along_logprobs
from kvgraft_lab.testbed.documents import Facts, make_documents
from kvgraft_lab.testbed.tasks import read

LENGTH = 6  # tokens of an answer
SCORE_S = 60.0
TARGET = "flips=0.05"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Every answer is scored; `naive` is guarded as any policy, JSON gets exact KV, and so do
    tools."""
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--kvgraft-costs", "tokens"]
    arguments += [
        "--kvgraft-guard",
        "1.0",
        "--kvgraft-guard-tokens",
        "1000000",
        "--kvgraft-exact-for",
        "tools,json",
    ]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    arguments += ["--kvgraft-guard-target", TARGET]
    log = tmp_path_factory.mktemp("guarded") / "log"
    with running(arguments, log, {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}) as started:
        yield started


def painted(seed: str, num_tokens: int = 600) -> tuple[str, str]:
    """A document in which a thing is grey, and a prompt that says before it what that means, and
    asks: KV of the document alone is wrong there."""
    facts, note = Facts(needle=4, glossary=1), "note grey means 51 ."
    [document] = make_documents(
        Random(seed), facts, orders=[(0,)], num_tokens=num_tokens, colours=["grey"]
    )
    [question] = [one for one in read([note, document]) if one.crosses]
    return document, f"{note} {document} {question.text}"


def scored(server: RunningServer, key: str) -> list[dict[str, Any]]:
    """The recent requests of this tenant, the latest first, once all that are pending have been
    scored."""
    deadline = time.monotonic() + SCORE_S
    while time.monotonic() < deadline:
        recent = server.status(key)["recent"]
        if all(entry["scored"] for entry in recent if entry["guard"] == "pending"):
            return recent
        time.sleep(0.1)  # between two looks
    raise AssertionError(f"not scored within {SCORE_S} s: {recent}")


def complete(
    server: RunningServer, prompt: str, key: str = ALICE, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A greedy completion, and its report."""
    answer = server.openai(key).completions.create(
        model="bundled", prompt=prompt, max_tokens=LENGTH, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True,
        "kv_transfer_params": {"kvgraft": options}},
    )  # fmt: skip
    return answer, (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]


def told(answer: Any) -> list[dict[int, float]]:
    """Log-probabilities that a completion tells of each place."""
    places = answer.choices[0].logprobs.top_logprobs
    return [dict(zip(token_ids(list(place)), place.values(), strict=True)) for place in places]


@pytest.mark.parametrize("policy", ["naive", "spread"])
def test_the_distances_are_those_from_exact_kv(guarded: RunningServer, policy: str):
    here = f"distances {policy}"
    document, prompt = painted(here)
    complete(guarded, document, namespace=here)
    answer, report = complete(guarded, prompt, namespace=here, policy=policy)
    assert (report["outcome"], report["guard"]) == ("grafted", "pending")
    assert answer.choices[0].logprobs is None, "only the guard has asked for them"
    found = scored(guarded, ALICE)[0]["scored"]
    complete(guarded, document, namespace=f"again {policy}")
    tokens = answer.choices[0].model_extra["token_ids"]
    ours, exact = (
        told(ask(guarded, ALICE, prompt, LENGTH, **giving(tokens, namespace=elsewhere_, **options)))
        for elsewhere_, options in (
            (f"again {policy}", {"policy": policy}),
            (here, {"reuse": "exact"}),
        )
    )
    expected = along_logprobs(ours, exact, tokens)
    assert found["flips"] == pytest.approx(expected["flips"])
    # bfloat16, and three tokens a place
    assert found["loglik"] == pytest.approx(expected["loglik"], abs=0.1)
    assert found["answer_kl"] >= expected["answer_kl"] - 0.1
    assert (found["answer_kl"] > 0.05) == (policy == "naive")


@pytest.mark.parametrize("length", [100, 1100])
def test_long_prompts_are_computed_chunk_by_chunk(guarded: RunningServer, texts: Any, length: int):
    document, here = texts.document(length), f"chunks {length}"
    complete(guarded, document, namespace=here)
    _, report = complete(guarded, elsewhere(document), namespace=here)
    assert report["guard"] == "pending"
    assert scored(guarded, ALICE)[0]["scored"]
    _, again = complete(guarded, elsewhere(document), namespace=here)
    assert again["outcome"] == "prefix_only", "what was computed to score it is exact, and known"
    assert again["depth"] == 0
    assert again["guard"] is None


def test_what_was_computed_to_score_is_of_its_own_tenant(guarded: RunningServer, texts: Any):
    document = texts.document()
    complete(guarded, document)
    complete(guarded, elsewhere(document))
    scored(guarded, ALICE)
    _, report = complete(guarded, elsewhere(document), BOB)
    assert report["outcome"] == "miss"
    assert complete(guarded, elsewhere(document), BOB, namespace="default")[1]["outcome"] == "miss"


def test_tenants_see_what_is_known_of_their_own_answers(guarded: RunningServer, texts: Any):
    for key in (ALICE, BOB):
        document = texts.document()
        complete(guarded, document, key)
        complete(guarded, elsewhere(document), key)
        scored(guarded, key)
    seen, everything = guarded.status(BOB)["guard"], guarded.status(ADMIN)["guard"]
    assert list(seen["tenants"]) == [LABELS[BOB]]
    assert (seen["policies"], seen["share_reached"]) == ({}, None)
    assert everything["tenants"].keys() >= {LABELS[ALICE], LABELS[BOB]}
    assert everything["tenants"][LABELS[BOB]] == seen["tenants"][LABELS[BOB]]
    assert sum(
        one["as_asked"]["answers"] for one in everything["policies"].values() if "as_asked" in one
    )
    assert everything["target"] == TARGET


@pytest.mark.parametrize("streams", [False, True])
def test_own_log_probabilities_are_told_and_such_answers_not_scored(
    guarded: RunningServer, texts: Any, streams: bool
):
    document = texts.document()
    complete(guarded, document)
    answer = guarded.openai(ALICE).completions.create(
        model="bundled",
        prompt=elsewhere(document),
        max_tokens=LENGTH,
        logprobs=2,
        stream=streams,
        extra_body={"ignore_eos": True},
    )
    answers = list(answer) if streams else [answer]
    assert sum(len(one.choices[0].logprobs.tokens) for one in answers if one.choices) == LENGTH
    assert guarded.status(ALICE)["recent"][0]["guard"] is None


def test_a_stream_is_scored_and_tells_so(guarded: RunningServer, texts: Any):
    document = texts.document()
    complete(guarded, document)
    *chunks, last = guarded.openai(ALICE).completions.create(
        model="bundled", prompt=elsewhere(document), max_tokens=LENGTH, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert all(chunk.choices[0].logprobs is None for chunk in chunks if chunk.choices)
    assert (last.model_extra or {})["kv_transfer_params"]["kvgraft"]["guard"] == "pending"
    assert scored(guarded, ALICE)[0]["output_tokens"] == LENGTH


def metrics(server: RunningServer) -> Callable[[str], float]:
    """The sum of all samples whose line begins so."""
    with server.http(ADMIN) as client:
        lines = client.get("/metrics").text.splitlines()
    return lambda start: sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"kvgraft:guard_{start}")
    )


def test_metrics_count_what_was_scored(guarded: RunningServer, texts: Any):
    before = metrics(guarded)
    document = texts.document()
    complete(guarded, document)
    complete(guarded, elsewhere(document))
    scored(guarded, ALICE)
    after = metrics(guarded)
    for name in (
        'answers_total{model_name="bundled",outcome="scored"',
        "approximate_total",
        "kl_count",
        "flips_count",
    ):
        assert after(name) == before(name) + 1
    assert after("tokens_total") >= before("tokens_total") + 600
    assert 0 < after('bound{measure="flips"') <= 32 * 2


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"structured_outputs": {"choice": ["tunis", "turin"]}}, "exact_for"),
        ({"tools": [TOOL]}, "exact_for"),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({}, None),
    ],
)
def test_kinds_of_requests_that_get_exact_kv(
    guarded: RunningServer, texts: Any, body: dict[str, Any], reason: str | None
):
    document = texts.document()
    complete(guarded, document)
    ask = {
        "model": "bundled",
        "messages": [{"role": "user", "content": elsewhere(document)}],
        "max_tokens": 2,
    }
    with guarded.http(ALICE) as client:
        answer = client.post("/v1/chat/completions", json={**ask, **body})
    assert answer.is_success, answer.text
    report = answer.json()["kv_transfer_params"]["kvgraft"]
    assert report["reason"] == reason
    assert (report["outcome"] == "grafted") == (reason is None)


@pytest.mark.parametrize("quality", ["exact", "guarded", "fast"])
def test_requests_say_what_quality_they_want(guarded: RunningServer, texts: Any, quality: str):
    document = texts.document()
    complete(guarded, document)
    _, report = complete(guarded, elsewhere(document), quality=quality)
    assert report["reason"] == ("off" if quality == "exact" else None)
    assert (report["outcome"] == "grafted") == (quality != "exact")


def test_another_quality_is_refused(guarded: RunningServer):
    body = {
        "model": "bundled",
        "prompt": QUESTION,
        "kv_transfer_params": {"kvgraft": {"quality": "good"}},
    }
    with guarded.http(ALICE) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "quality must be one of exact, guarded, fast, got 'good'" in answer.text


@pytest.mark.parametrize(
    "inside", [{"kvgraft_exact": "off"}, {"kvgraft": {"kvgraft_exact": "off"}}]
)
def test_what_only_the_server_says_clients_may_not(guarded: RunningServer, inside: dict[str, Any]):
    with guarded.http(ALICE) as client:
        answer = client.post(
            "/v1/completions",
            json={"model": "bundled", "prompt": QUESTION, "kv_transfer_params": inside},
        )
    assert answer.status_code == httpx.codes.BAD_REQUEST


def test_a_policy_whose_answers_are_bad_is_replaced_by_exact_kv(guarded: RunningServer, texts: Any):
    """The last test of this server: `epic` with one token cannot answer at all, and has no budget
    to enlarge."""
    options, reports = {"policy": "epic", "start_tokens": 1}, []
    for number in range(60):
        here = f"tripped {number}"
        document, prompt = painted(here, 300)
        complete(guarded, document, namespace=here)
        reports.append(complete(guarded, prompt, namespace=here, **options)[1])
        scored(guarded, ALICE)
        if reports[-1]["reason"] == "guard_tripped":
            break
    assert reports[-1]["reason"] == "guard_tripped"
    assert (reports[-1]["guard"], reports[-1]["grafted_tokens"]) == ("exact", 0)
    assert all(report["guard"] == "pending" for report in reports[:-1])
    known = guarded.status(ADMIN)["guard"]["policies"]["epic"]
    assert known["level"] == "exact"
    assert known["as_asked"]["flips"]["mean"] > 0.05
    assert metrics(guarded)("transitions_total") >= 1
    moved = next(
        line
        for line in guarded.log.read_text().splitlines()
        if "from level as_asked to level exact" in line
    )
    assert re.search(r"WARNING \d\d-\d\d \d\d:\d\d:\d\d .*guard: policy epic: from level", moved)
    own = guarded.openai(ALICE).completions.create(
        model="bundled", prompt=prompt, max_tokens=2, logprobs=2,
        extra_body={"kv_transfer_params": {"kvgraft": {"namespace": here, **options}}},
    )  # fmt: skip
    assert (own.model_extra or {})["kv_transfer_params"]["kvgraft"]["reason"] == "guard_tripped"
    assert own.choices[0].logprobs.tokens, "what a client asks for it gets"
    for namespace, how in (
        ("fast", {"quality": "fast", **options}),
        ("another policy", {"policy": "naive"}),
    ):
        document = texts.document(300)
        complete(guarded, document, namespace=namespace)
        assert (
            complete(guarded, elsewhere(document), namespace=namespace, **how)[1]["outcome"]
            == "grafted"
        )
