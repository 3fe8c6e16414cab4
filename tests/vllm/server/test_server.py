"""`kvgraft serve` on the bundled model, from outside."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from running import ADMIN, ALICE, BOB, RunningServer

from kvgraft.server.body import MAX_BODY
from kvgraft.server.tenancy import Tenant

BLOCK = 32  # tokens
QUESTION = "question : code of lamp ? answer :"
FIELDS = {"prefix_tokens", "grafted_tokens", "recomputed_tokens", "fresh_tokens"}


def complete(
    server: RunningServer, key: str, prompt: str, **extra: Any
) -> tuple[int, dict[str, Any]]:
    """Cached tokens as vLLM counts them, and the report."""
    answer = server.openai(key).completions.create(
        model="bundled", prompt=prompt, max_tokens=1, temperature=0, extra_body=extra
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    params = (answer.model_extra or {})["kv_transfer_params"]
    return answer.usage.prompt_tokens_details.cached_tokens or 0, params["kvgraft"]


def elsewhere(document: str) -> str:
    """A prompt that holds the document at another place."""
    return f"note grey means 51 . the old river slept . {document} {QUESTION}"


def reused(server: RunningServer, key: str) -> int:
    """Prompt tokens of all requests of this tenant that came from a cache."""
    tokens = server.status(key)["totals"]["tokens"]
    return tokens["prefix"] + tokens["continued"] + tokens["grafted"]


def test_known_text_is_grafted_and_both_counts_agree(server: RunningServer, texts: Any):
    document = texts.document()
    cached, first = complete(server, ALICE, document)
    assert (cached, first["grafted_tokens"], first["prefix_tokens"]) == (0, 0, 0)
    cached, second = complete(server, ALICE, elsewhere(document))
    assert second["grafted_tokens"] >= 500
    assert cached == second["grafted_tokens"] + second["prefix_tokens"]
    assert sum(second[kind] for kind in FIELDS - {"recomputed_tokens"}) == second["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_reports_and_usage_of_several_prompts_are_of_all(
    server: RunningServer, texts: Any, stream: bool
):
    known, unknown = texts.document(), texts.document(64)
    complete(server, ALICE, known)
    ask: dict[str, Any] = {
        "model": "bundled",
        "prompt": [known, elsewhere(known), unknown],
        "max_tokens": 1,
    }
    client = server.openai(ALICE).completions
    if stream:
        *_, answer = client.create(**ask, stream=True, stream_options={"include_usage": True})
    else:
        answer = client.create(**ask)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 2 * 500
    reports = (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]
    assert [report["prompt_tokens"] > 500 for report in reports] == [True, True, False], (
        "in the order of the prompts"
    )
    assert [report["outcome"] for report in reports] == ["prefix_only", "grafted", "miss"]
    newest = server.status(ALICE)["recent"][:3]
    assert answer.usage.prompt_tokens_details.cached_tokens == sum(
        entry["tokens"]["prefix"] + entry["tokens"]["grafted"] for entry in newest
    )


@pytest.mark.parametrize("moved", [False, True])
def test_text_of_one_tenant_is_no_hit_for_another_and_a_hit_for_itself(
    server: RunningServer, texts: Any, moved: bool
):
    document = texts.document()
    complete(server, ALICE, document)
    prompt = elsewhere(document) if moved else document
    for key, hits in ((BOB, False), (ALICE, True)):
        cached, report = complete(server, key, prompt)
        assert (cached > 0) == hits
        assert (report["grafted_tokens"] > 0) == (hits and moved)
        assert (report["prefix_tokens"] > 0) == (hits and not moved)


@pytest.mark.parametrize("narrow", ["namespace", "cache_salt"])
def test_a_client_may_narrow_its_cache_and_not_leave_it(
    server: RunningServer, texts: Any, narrow: str
):
    def ask(key: str, name: str, prompt: str) -> int:
        inside: dict[str, Any] = {"kvgraft": {"namespace": name}}
        extra = {"kv_transfer_params": inside} if narrow == "namespace" else {"cache_salt": name}
        return complete(server, key, prompt, **extra)[0]

    document = texts.document()
    ask(ALICE, "one", document)
    for name in ("two", Tenant.of(ALICE).label):
        assert ask(ALICE, name, elsewhere(document)) == 0
    assert complete(server, ALICE, elsewhere(document))[0] == 0
    assert ask(BOB, "one", elsewhere(document)) == 0
    assert ask(ALICE, "one", elsewhere(document)) > 0


def test_bob_cannot_name_the_namespace_of_alice(server: RunningServer, texts: Any):
    document = texts.document()
    complete(server, ALICE, document)
    for name in (Tenant.of(ALICE).label, Tenant.of(ALICE).identity.hex(), ALICE, "default"):
        params = {"kv_transfer_params": {"kvgraft": {"namespace": name}}}
        assert complete(server, BOB, elsewhere(document), cache_salt=name)[0] == 0
        assert complete(server, BOB, elsewhere(document), **params)[0] == 0
    assert complete(server, ALICE, elsewhere(document))[0] > 0


def test_the_log_of_the_start_ends_with_the_address_of_the_page(server: RunningServer):
    log = server.log.read_text()
    assert log.count(f"KVGraft's page: {server.url}/kvgraft\n") == 1
    assert log.index("KVGraft's page") > log.rindex("Route: ")


def test_reuse_can_be_switched_off_for_a_request(server: RunningServer, texts: Any):
    document = texts.document()
    complete(server, ALICE, document)
    off = {"kv_transfer_params": {"kvgraft": {"reuse": "off"}}}
    cached, report = complete(server, ALICE, elsewhere(document), **off)
    assert (cached, report["reason"]) == (0, "off")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# path -> the request that makes the model read a text
ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/invocations": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": said(text), "max_tokens": 1},
    "/v1/chat/completions/batch": lambda text: {"messages": [said(text)], "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/v1/messages": lambda text: {"messages": said(text), "max_tokens": 1},
    "/generative_scoring": lambda text: {
        "query": text,
        "items": ["lamp"],
        "label_token_ids": [5, 6],
    },
}


def make_read(server: RunningServer, path: str, key: str, text: str) -> int:
    """Tokens that came from a cache when this route made the model read a text."""
    before = reused(server, key)
    with server.http(key) as client:
        answer = client.post(path, json={"model": "bundled", **ROUTES[path](text)})
    assert answer.status_code == 200, answer.text
    return reused(server, key) - before


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_on_every_route_the_cache_is_the_tenants_own(server: RunningServer, texts: Any, path: str):
    document = texts.document()
    complete(server, ALICE, document)
    assert make_read(server, path, BOB, document) == 0
    assert make_read(server, path, BOB, document) > 0
    assert make_read(server, path, ALICE, document) > 0


def test_the_official_client_streams_with_the_report_in_the_usage_chunk(
    server: RunningServer, texts: Any
):
    document = texts.document()
    complete(server, ALICE, document)
    options: dict[str, Any] = {
        "model": "bundled",
        "temperature": 0,
        "max_tokens": 4,
        "stream": True,
    }
    client = server.openai(ALICE)
    completion = client.completions.create(
        prompt=elsewhere(document), stream_options={"include_usage": True}, **options
    )
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": elsewhere(document)}],
        stream_options={"include_usage": True},
        **options,
    )
    for stream in (completion, chat):
        *chunks, last = list(stream)
        assert chunks
        assert not any("kv_transfer_params" in (chunk.model_extra or {}) for chunk in chunks)
        report = (last.model_extra or {})["kv_transfer_params"]["kvgraft"]
        assert report["grafted_tokens"] + report["prefix_tokens"] >= 500
        assert (
            last.usage.prompt_tokens_details.cached_tokens
            == report["grafted_tokens"] + report["prefix_tokens"]
        )


def test_a_stream_says_the_same_as_one_answer_and_without_usage_it_is_vllms_own(
    server: RunningServer, texts: Any
):
    client, prompt = server.openai(ALICE), f"{texts.document(300)} {QUESTION}"
    options: dict[str, Any] = {
        "model": "bundled",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = client.completions.create(**options).choices[0].text
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert all(chunk.usage is None for chunk in chunks)
    assert not any("kv_transfer_params" in (chunk.model_extra or {}) for chunk in chunks)


STOP: dict[str, Any] = {
    "stop": [" "],
    "max_tokens": 64,
    # an answer of <eos> alone has spaces, too
    "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
VARYING = ("stages", "estimated_full_s", "estimated_reuse_s")


def reports_of(answer: Any) -> list[dict[str, Any]]:
    """The reports of an answer, or of the last chunk of a stream, without the times."""
    last = answer if hasattr(answer, "choices") else list(answer)[-1]
    told = (last.model_extra or {})["kv_transfer_params"]["kvgraft"]
    reports = told if isinstance(told, list) else [told]
    return [
        {name: value for name, value in report.items() if name not in VARYING} for report in reports
    ]


def report_of(answer: Any) -> dict[str, Any]:
    """That of one prompt."""
    [report] = reports_of(answer)
    return report


def ways_to_ask(
    server: RunningServer, text: str, key: str = ALICE
) -> dict[str, Callable[..., Any]]:
    client, options = server.openai(key), {"model": "bundled", "temperature": 0}
    messages: Any = said(text)
    return {
        "completion": lambda **more: client.completions.create(prompt=text, **options, **more),
        "chat": lambda **more: client.chat.completions.create(messages=messages, **options, **more),
        "completion stream": lambda **more: client.completions.create(
            prompt=text, **options, **STREAM, **more
        ),
        "chat stream": lambda **more: client.chat.completions.create(
            messages=messages, **options, **STREAM, **more
        ),
    }


@pytest.mark.parametrize("way", ["completion", "chat", "completion stream", "chat stream"])
def test_an_answer_that_a_stop_string_ends_has_the_whole_report(
    server: RunningServer, texts: Any, way: str
):
    document = texts.document()
    for key in (ALICE, BOB):  # what one has left the other cannot go on with
        complete(server, key, document)
    expected = report_of(ways_to_ask(server, elsewhere(document), BOB)[way](max_tokens=4))
    assert expected["grafted_tokens"] >= 500
    before = server.status(ALICE)["totals"]["requests"].get("grafted", 0)
    assert report_of(ways_to_ask(server, elsewhere(document))[way](**STOP)) == expected
    seen = server.status(ALICE)
    assert seen["totals"]["requests"]["grafted"] == before + 1
    assert (seen["recent"][0]["outcome"], seen["recent"][0]["spans"]) == (
        "grafted",
        expected["spans"],
    )
    assert 0 < seen["recent"][0]["output_tokens"] < 64


def test_without_known_text_a_stopped_answer_says_so_and_counts_the_blocks_of_its_prompt(
    server: RunningServer, texts: Any
):
    report = report_of(ways_to_ask(server, texts.document(200))["completion"](**STOP))
    assert (report["reason"], report["grafted_tokens"]) == ("no_known_text", 0)
    assert report["registered_blocks"] == report["prompt_tokens"] // BLOCK > 0
    assert server.status(ALICE)["recent"][0]["outcome"] == "miss"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_on_every_route_a_stream_ends_with_the_report(server: RunningServer, texts: Any, path: str):
    document = texts.document()
    complete(server, ALICE, document)
    usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    with server.http(ALICE) as client:
        body = {"model": "bundled", **ROUTES[path](elsewhere(document)), "stream": True, **usage}
        answer = client.post(path, json=body).text
    events = [
        line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")
    ]
    last = json.loads(events[-1])
    report = last.get("response", last)["kv_transfer_params"]["kvgraft"]
    assert report["grafted_tokens"] >= 500
    assert "kv_transfer_params" not in "".join(events[:-1]).replace('"kv_transfer_params":null', "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_of_several_answers_to_a_prompt_the_first_one_is_reported(
    server: RunningServer, texts: Any, stream: bool, seed: int
):
    document = texts.document()
    complete(server, ALICE, document)
    ask: dict[str, Any] = {
        "model": "bundled",
        "n": 3,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 8,
    }
    with server.http(ALICE) as client:
        body = {**ask, "messages": said(elsewhere(document)), "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.post("/v1/chat/completions", json=body).text
    last = [line for line in answer.splitlines() if '"usage"' in line][-1]
    report = json.loads(last.removeprefix("data: "))["kv_transfer_params"]["kvgraft"]
    assert (report["outcome"], report["grafted_tokens"] >= 500) == ("grafted", True)


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_or_answers_that_stop_each_is_reported(
    server: RunningServer, texts: Any, stream: bool
):
    documents = [texts.document(), texts.document(300)]
    for document in documents:
        complete(server, ALICE, document)
    more: dict[str, Any] = {**STOP, **(STREAM if stream else {}), "model": "bundled"}
    client = server.openai(ALICE)
    prompts = [elsewhere(document) for document in documents]
    first, second = reports_of(client.completions.create(prompt=prompts, temperature=0, **more))
    assert first["grafted_tokens"] >= 500 > second["grafted_tokens"] >= 200
    assert {entry["outcome"] for entry in server.status(ALICE)["recent"][:2]} == {"grafted"}
    report = report_of(
        client.completions.create(prompt=prompts[1], n=2, temperature=1.0, seed=1, **more)
    )
    assert 500 > report["continued_tokens"] >= 200, "the second prompt was asked before"
    assert server.status(ALICE)["recent"][0]["outcome"] == "continued"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kvgraft": {"bondary": 1}}, "no option 'bondary'"),
    ({"kvgraft": {"control": {"op": "list", "name": "", "token": ""}}}, "no option 'control'"),
    ({"kvgraft": {"control": {"op": "refresh", "name": "", "token": ""}}}, "no option 'control'"),
    ({"do_remote_decode": True}, "no field 'do_remote_decode'"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize(("params", "message"), BAD)
def test_bad_options_are_a_400_that_names_the_field(
    server: RunningServer, path: str, params: Mapping[str, Any], message: str, stream: bool
):
    body = {
        "model": "bundled",
        **ROUTES[path]("the code"),
        "kv_transfer_params": params,
        "stream": stream,
    }
    before = server.status(ALICE)["totals"]["requests"]
    with server.http(ALICE) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert server.status(ALICE)["totals"]["requests"] == before


def test_bad_options_that_are_spelt_otherwise_meet_the_guard_of_the_engine(server: RunningServer):
    """A key with an escape in it is no plain text in the body, and is still the same key."""
    options = '"\\u006bv_transfer_params": {"\\u006bvgraft": {"bondary": 1}}'
    smuggled = '"vllm_xargs": {"\\u006bv_transfer_params": ["a"]}'
    for given, message in (
        (options, "no option 'bondary'"),
        (smuggled, "must be an object, got list"),
    ):
        body = f'{{"model": "bundled", "prompt": "the", {given}}}'
        with server.http(ALICE) as client:
            refused = client.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "kv_transfer_params.kvgraft"


def test_a_prompt_that_the_engine_refuses_is_no_request(server: RunningServer):
    before = server.status(ALICE)["totals"]["requests"]
    with server.http(ALICE) as client:
        answer = client.post(
            "/v1/completions", json={"model": "bundled", "prompt": [10**6], "max_tokens": 1}
        )
    assert answer.status_code == 400
    assert server.status(ALICE)["totals"]["requests"] == before


def test_the_official_client_gets_its_own_kind_of_error(server: RunningServer):
    with pytest.raises(BadRequestError, match="no option 'bondary'") as refused:
        complete(server, ALICE, "the code", kv_transfer_params={"kvgraft": {"bondary": 1}})
    assert refused.value.status_code == 400
    with pytest.raises(BadRequestError, match="4608"):
        complete(server, ALICE, "the " * 5000)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "prompt"',
    ],
)
def test_malformed_bodies_are_client_errors_and_the_server_lives_on(
    server: RunningServer, content: bytes
):
    with server.http(ALICE) as client:
        answer = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert 400 <= answer.status_code < 500
        assert client.get("/v1/models").status_code == 200


def test_huge_bodies_are_refused(server: RunningServer):
    def parts() -> Any:
        for _ in range(MAX_BODY // (1 << 20) + 1):
            yield bytes(1 << 20)

    with server.http(ALICE) as client:
        headers = {"Content-Type": "application/json"}
        assert (
            client.post("/v1/completions", content=bytes(MAX_BODY + 1), headers=headers).status_code
            == 413
        )
        assert client.post("/v1/completions", content=parts(), headers=headers).status_code == 413
        assert client.get("/v1/models").status_code == 200


def test_nobody_without_a_key_gets_further_than_health_and_metrics(server: RunningServer):
    with server.http(None) as client:
        assert [client.get(path).status_code for path in ("/health", "/ping", "/metrics")] == [
            200,
            200,
            200,
        ]
        for path in ("/v1/models", "/version", "/kvgraft", "/v1/kvgraft/status", "/docs"):
            assert client.get(path).status_code == 401
        assert (
            client.post("/v1/completions", json={"model": "bundled", "prompt": "the"}).status_code
            == 401
        )
        assert (
            client.post("/invocations", json={"model": "bundled", "prompt": "the"}).status_code
            == 401
        )


def test_a_tenant_sees_its_own_requests_and_no_text_is_shown_to_anybody(
    server: RunningServer, texts: Any
):
    document = texts.document(200)
    complete(server, ALICE, document)
    complete(server, BOB, document)
    alice, bob = (Tenant.of(key).label for key in (ALICE, BOB))
    assert {entry["tenant"] for entry in server.status(ALICE)["recent"]} == {alice}
    assert {entry["tenant"] for entry in server.status(BOB)["recent"]} == {bob}
    everything = server.status(ADMIN)
    assert {entry["tenant"] for entry in everything["recent"]} >= {alice, bob}
    assert everything["totals"]["requests"].keys() >= {"miss"}
    newest = server.status(ALICE)["recent"][0]
    assert newest["route"] == "/v1/completions"
    assert newest["ttft_s"] > 0
    assert sum(stop - start for start, stop, _ in newest["spans"]) == newest["prompt_tokens"]
    shown = json.dumps([server.status(key) for key in (ALICE, BOB, ADMIN)])
    assert document[:40] not in shown
    assert ALICE not in shown
    assert len(everything["recent"]) <= 50


def test_metrics_are_those_of_the_server_and_name_no_tenant(server: RunningServer):
    with server.http(None) as client:
        metrics = client.get("/metrics").text
    assert 'kvgraft:pool_blocks{engine="0",model_name="bundled",state="free"}' in metrics
    assert (
        'kvgraft:time_to_first_token_seconds_count{model_name="bundled",outcome="fallback"}'
        in metrics
    )
    for key in (ALICE, BOB, ADMIN):
        assert Tenant.of(key).label not in metrics
    assert server.status(ADMIN)["pool"].keys() == {"used", "free", "pinned"}


def test_a_client_that_leaves_ends_its_request(server: RunningServer, texts: Any):
    # on a busy machine the client may get its first line after the whole answer was made
    assert any(outcome_after_leaving(server, texts.document(200)) == "aborted" for _ in range(5))
    assert running_requests(server) == 0


def outcome_after_leaving(server: RunningServer, prompt: str) -> str:
    """Leave a stream after its first line; return the outcome that the server records."""
    before = server.status(ALICE)["totals"]["requests"]
    body = {
        "model": "bundled",
        "prompt": prompt,
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    with (
        server.http(ALICE) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert next(answer.iter_lines()).startswith("data: ")
    deadline = time.monotonic() + 30
    while (status := server.status(ALICE))["totals"]["requests"] == before:
        assert time.monotonic() < deadline, server.log.read_text()[-3000:]
        time.sleep(0.05)
    outcome = status["recent"][0]["outcome"]
    assert status["totals"]["requests"][outcome] == before.get(outcome, 0) + 1
    return outcome


def running_requests(server: RunningServer) -> float:
    """What vLLM has in its batch, once a short request has made it look."""
    complete(server, ALICE, "the code of lamp")
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:num_requests_running{")
    )
