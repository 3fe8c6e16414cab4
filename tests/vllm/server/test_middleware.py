"""The middleware around small applications: what it lets through, when, and how much of it it
holds."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from running import ADMIN, ALICE, BOB
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from kvgraft.policies import parse_policy
from kvgraft.server.body import MAX_BODY
from kvgraft.server.call import CURRENT
from kvgraft.server.engine_client import parse_params
from kvgraft.server.keys import Keys
from kvgraft.server.middleware import ServerMiddleware
from kvgraft.server.sharing import Grants
from kvgraft.server.tenancy import Keyring, Tenant
from kvgraft.vllm.options import RequestOptions

KEYRING = Keyring(Keys((ALICE, BOB), ADMIN))
GRANTS = Grants([f"wiki={ALICE}", f"law={BOB}"], KEYRING)
DEFAULT = RequestOptions(parse_policy("sparsex"))
REPORT = {"policy": "naive", "grafted_tokens": 3}
# of further prompts; of one the engine said nothing
OTHERS = [None, {"policy": "epic", "grafted_tokens": 0}]
FIRST = {"kvgraft": REPORT}
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3}}\n\n'
DELTA = b'event: content_block_delta\ndata: {"delta":{"text":"event: message_stop\\ndata: {}"}}\n\n'
Application = Callable[..., Coroutine[Any, Any, None]]


async def converse(
    app: Application,
    *messages: dict[str, Any],
    key: str | None = ALICE,
    headers: dict[str, str] | None = None,
    path: str = "/v1/completions",
) -> list[dict[str, Any]]:
    """What the server sends when the client sends these messages."""
    sent: list[dict[str, Any]] = []
    inbox = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(inbox)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await ServerMiddleware(app, KEYRING, GRANTS, DEFAULT)(scope(key, headers, path), receive, send)
    return sent


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"tools": [{"type": "function"}]}', True),
        (b'{"tools": [{"type": "function"}], "tool_choice": "auto"}', True),
        (b'{"tools": [{"type": "function"}], "tool_choice": "none"}', False),
        (b'{"tools": []}', False),
        (b'{"prompt": "about \\"tools\\""}', False),
        (b"[1]", False),
        (b"", False),
        (rb'{"tools": [{"description": "cut \ud83d"}]}', True),
        (rb'{"\u0074ools": [{}]}', True),
        (b'{"tools": [{}], "ignored": NaN}', True),
        ('{"tools": [{}]}'.encode("utf-16"), True),
        (b"not JSON, and somebody may understand it", True),
    ],
)
def test_requests_that_may_call_tools_are_known_as_such(body: bytes, expected: bool):
    found = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        found.append(call.kinds)

    async def nothing() -> dict[str, Any]:
        return part(body)

    async def send(message: dict[str, Any]) -> None: ...

    for finds in (True, False):
        middleware = ServerMiddleware(app, KEYRING, GRANTS, DEFAULT, finds_tools=finds)
        asyncio.run(middleware(scope(ALICE), nothing, send))
    assert found == [frozenset({"tools"} if expected else ()), frozenset()]


def scope(
    key: str | None, headers: dict[str, str] | None = None, path: str = "/v1/completions"
) -> dict[str, Any]:
    given = {"Authorization": f"Bearer {key}", **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    return {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b""}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(body)(scope, receive, send)


def status_and_text(sent: list[dict[str, Any]]) -> tuple[int, str]:
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode(
        "latin-1"
    )


def test_the_application_gets_the_whole_body_and_then_what_the_client_sends_next():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == part(b"one two")
        assert await receive() == {"type": "http.disconnect"}
        await PlainTextResponse("heard")(scope, receive, send)

    sent = asyncio.run(
        converse(app, part(b"one ", more=True), part(b"two"), {"type": "http.disconnect"})
    )
    assert status_and_text(sent) == (200, "heard")


def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_nothing():
    async def app(*_: Any) -> None:
        raise AssertionError("half a request reached the application")

    assert asyncio.run(converse(app, part(b"one ", more=True), {"type": "http.disconnect"})) == []


@pytest.mark.parametrize("announced", [str(MAX_BODY + 1), "9" * 19, "-1", "many"])
def test_a_body_announced_too_long_is_refused_unread(announced: str):
    sent = asyncio.run(converse(echo, headers={"Content-Length": announced}))
    status, text = status_and_text(sent)
    assert status == 413
    assert json.loads(text)["error"]["code"] == 413


def test_a_body_that_turns_out_too_long_is_refused_where_it_passes_the_limit():
    half = bytes(MAX_BODY // 2)
    allowed = asyncio.run(converse(echo, part(half, more=True), part(half)))
    assert allowed[0]["status"] == 200
    sent = asyncio.run(
        converse(echo, part(half, more=True), part(half, more=True), part(b"x", more=True))
    )
    assert status_and_text(sent)[0] == 413


@pytest.mark.parametrize("key", [None, "unknown"])
def test_without_a_key_nothing_is_read(key: str | None):
    assert status_and_text(asyncio.run(converse(echo, key=key)))[0] == 401


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"kv_transfer_params": {"kvgraft": {"nonsense": 1}}',
        b'["kv_transfer_params"]',
        b'{"prompt": "\\"kv_transfer_params\\": {}"}',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_request_with_options_is_left_to_vllm(body: bytes):
    assert status_and_text(asyncio.run(converse(echo, part(body)))) == (200, body.decode("latin-1"))


BAD_PARAMS = [
    ([], "must be an object, got list"),
    ("kvgraft", "must be an object, got str"),
    ({"do_remote_prefill": True}, "no field 'do_remote_prefill' here: allowed is kvgraft"),
    ({"kvgraft": {}, "remote_block_ids": [1]}, "no field 'remote_block_ids'"),
    ({"kvgraft": None}, "must be an object, got NoneType"),
    ({"kvgraft": {"bondary": 1}}, "no option 'bondary': it has rows"),
    ({"kvgraft": {"control": {"op": "delete", "name": "x", "token": ""}}}, "no option 'control'"),
    ({"kvgraft": {"recompute_share": 2}}, "recompute_share must be a share"),
    ({"kvgraft": {"recompute_share": [[[]]]}}, "recompute_share must be a share"),
    ({"kvgraft": {"boundary_layers": 2**70}}, "can't serialize ints"),
    ({"kvgraft": {"boundary_layers": True}}, "boundary_layers must be an integer"),
    ({"kvgraft": {"policy": "magic"}}, "unknown policy 'magic'"),
    ({"kvgraft": {"policy": "naive", "topk": 0.1}}, "no option 'topk'"),
    ({"kvgraft": {"reuse": False}}, "reuse must be one of auto, exact, off, got False"),
    (
        {"kvgraft": {"shared": "wiki"}},
        "shared must be a list of distinct names of 1 to 128 printable characters, got 'wiki'",
    ),
    (
        {"kvgraft": {"shared": [""]}},
        "shared must be a list of distinct names of 1 to 128 printable characters, got ['']",
    ),
    ({"kvgraft": {"shared": ["wiki", 3]}}, "shared must be a list of distinct names"),
    (
        {"kvgraft": {"shared": ["wiki", "wiki"]}},
        "shared must be a list of distinct names of 1 to 128 printable characters, got ['wiki', ",
    ),
    ({"kvgraft": {}, "kvgraft_granted": {}}, "no field 'kvgraft_granted'"),
    ({"kvgraft": {"namespace": "a\n"}}, "namespace must be a printable string"),
    ({"kvgraft": {"namespace": "n" * 129}}, "namespace must be a printable string"),
]


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS)
def test_bad_options_are_refused_before_the_application_by_name(params: Any, message: str):
    body = json.dumps({"stream": True, "kv_transfer_params": params}).encode()
    status, text = status_and_text(asyncio.run(converse(echo, part(body))))
    error = json.loads(text)["error"]
    assert (status, error["code"], error["param"]) == (400, 400, "kv_transfer_params.kvgraft")
    assert message in error["message"]


OPTIONS = {"kvgraft": {"reuse": "exact"}}
WRAPPED = {"kv_transfer_params": OPTIONS}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (OPTIONS, "kvgraft"),
        ({**WRAPPED, **OPTIONS}, "kvgraft"),
        ({"extra_body": WRAPPED}, "extra_body.kv_transfer_params"),
        ({"extra_body": OPTIONS}, "extra_body.kvgraft"),
        ({"extra_body": {"extra_body": WRAPPED}}, "extra_body.extra_body.kv_transfer_params"),
        ({"extra_body": json.dumps(WRAPPED)}, "extra_body.kv_transfer_params"),
        (
            {"extra_body": json.dumps({"extra_body": json.dumps(WRAPPED)})},
            "extra_body.extra_body.kv_transfer_params",
        ),
        ({"top_p": float("nan"), "extra_body": WRAPPED}, "extra_body.kv_transfer_params"),
        ({"vllm_xargs": {"kvgraft": "exact"}}, "vllm_xargs.kvgraft"),
        ({"model_kwargs": {"extra_body": WRAPPED}}, "model_kwargs.extra_body.kv_transfer_params"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_options_where_nothing_reads_them_are_refused_with_the_place_where_they_belong(
    path: str, body: Any, field: str
):
    sent = asyncio.run(converse(echo, part(json.dumps(body).encode()), path=path))
    status, text = status_and_text(sent)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, field)
    assert error["message"].startswith(
        f'{field} has no effect here: send "kv_transfer_params": {{"kvgraft": {{...}}}}'
    )


@pytest.mark.parametrize(
    "body",
    [
        {"extra_body": {"top_k": 5}, "user": "kvgraft"},
        {"extra_body": "about kvgraft"},
        {"extra_body": ["kvgraft"]},
        {"messages": [{"role": "user", "content": json.dumps({"extra_body": OPTIONS})}]},
        {"tools": [{"function": {"parameters": {"properties": {"kvgraft": {"type": "string"}}}}}]},
        {"metadata": {"kvgraft": "a tag"}},
        {"extra_body": "[" * 10_000 + "kvgraft"},
    ],
    ids=range(7),
)
def test_what_only_mentions_an_option_passes(body: Any):
    raw = json.dumps(body).encode()
    assert status_and_text(asyncio.run(converse(echo, part(raw)))) == (200, raw.decode())


@pytest.mark.parametrize(
    ("key", "name", "status"), [(ALICE, "wiki", 200), (BOB, "wiki", 404), (BOB, "none", 404)]
)
def test_what_is_not_shared_with_a_key_is_refused_before_the_application(
    key: str, name: str, status: int
):
    body = json.dumps(
        {"stream": True, "kv_transfer_params": {"kvgraft": {"shared": [name]}}}
    ).encode()
    got, text = status_and_text(asyncio.run(converse(echo, part(body), key=key)))
    assert got == status
    assert status == 200 or json.loads(text)["error"] == {
        "message": f"shared: no namespace '{name}' for this key: it has law",
        "type": "Not Found",
        "param": "kv_transfer_params.kvgraft.shared",
        "code": 404,
    }


def test_an_error_does_not_repeat_more_than_a_line_of_what_was_sent():
    for params in (
        {"kvgraft": {"x" * 10**6: 1}},
        {"kvgraft": {"policy": "x" * 10**6}},
        {"x" * 10**6: 1},
    ):
        with pytest.raises(ValueError, match="kv_transfer_params") as error:
            parse_params(params, DEFAULT)
        assert len(str(error.value)) == 300
        assert str(error.value).endswith("…")


def test_good_options_pass():
    options = parse_params(
        {"kvgraft": {"boundary_layers": 2, "reuse": "off", "namespace": "n"}}, DEFAULT
    )
    assert (options.policy, options.reuse, options.namespace) == (
        parse_policy("sparsex:boundary_layers=2"),
        False,
        "n",
    )
    body = b'{"kv_transfer_params": {"kvgraft": {"policy": "naive"}}}'
    assert status_and_text(asyncio.run(converse(echo, part(body)))) == (200, body.decode())


def test_whose_request_it_is_is_known_inside_and_forgotten_outside():
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        seen.append((call.principal.tenant, call.route))
        await PlainTextResponse("")(scope, receive, send)

    async def both() -> None:
        await asyncio.gather(converse(app, part(b"")), converse(app, part(b""), key=BOB))
        await converse(app, part(b""))
        assert CURRENT.get() is None

    asyncio.run(both())
    assert sorted(tenant.label for tenant, _ in seen) == sorted(
        Tenant.of(key).label for key in (ALICE, ALICE, BOB)
    )
    assert {route for _, route in seen} == {"/v1/completions"}


def stream_of(*chunks: bytes, report: dict[str, Any] | None = REPORT) -> Application:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> AsyncIterator[bytes]:
            call = CURRENT.get()
            assert call is not None
            call.reports.append(report)
            for chunk in (*chunks, USAGE):
                yield chunk

        await StreamingResponse(body(), media_type="text/event-stream")(scope, receive, send)

    return app


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent[1:] if message["body"]]


def test_a_stream_passes_chunk_by_chunk_as_it_comes():
    async def check() -> None:
        go_on, sent = asyncio.Event(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"text/event-stream")],
                }
            )
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"second", "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message.get("body") == b"first":
                # only the arrival of the first chunk lets the application produce the second
                go_on.set()

        async def receive() -> dict[str, Any]:
            return part(b"")

        middleware = ServerMiddleware(
            app, (keyring := Keyring(Keys((ALICE,)))), Grants((), keyring), DEFAULT
        )
        await asyncio.wait_for(middleware(scope(ALICE), receive, send), 30)
        assert bodies(sent) == [b"first", b"second"]

    asyncio.run(check())


def test_the_chunk_with_the_usage_gets_the_report_and_no_other_chunk_changes():
    says = json.dumps({"choices": [{"text": '"choices":[],"usage":{'}]}, separators=(",", ":"))
    chunks = [
        b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3}}\n\n',
        f"data: {says}\n\n".encode(),
        b": ping\n\n",
    ]
    *others, usage = bodies(
        asyncio.run(converse(stream_of(*chunks), part(b""), {"type": "http.disconnect"}))
    )
    assert others == chunks
    assert usage.startswith(b"data: ")
    assert usage.endswith(b"\n\n")
    expected = {**json.loads(USAGE[6:]), "kv_transfer_params": {"kvgraft": REPORT}}
    assert json.loads(usage[6:]) == expected


def test_the_last_event_of_a_message_gets_the_report():
    last = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> AsyncIterator[bytes]:
            call = CURRENT.get()
            assert call is not None
            yield DELTA
            call.reports.append(REPORT)
            yield last

        await StreamingResponse(body(), media_type="text/event-stream")(scope, receive, send)

    delta, stop = bodies(
        asyncio.run(converse(app, part(b""), {"type": "http.disconnect"}, path="/v1/messages"))
    )
    assert delta == DELTA
    prefix, _, data = stop.partition(b"data: ")
    assert (prefix, data[-2:]) == (b"event: message_stop\n", b"\n\n")
    assert json.loads(data) == {"type": "message_stop", "kv_transfer_params": {"kvgraft": REPORT}}


def test_without_a_report_or_outside_a_stream_nothing_changes():
    silent = stream_of(b"data: {}\n\n", report=None)
    assert (
        bodies(asyncio.run(converse(silent, part(b""), {"type": "http.disconnect"})))[-1] == USAGE
    )

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        call.reports.append(REPORT)
        await PlainTextResponse(USAGE)(scope, receive, send)

    assert bodies(asyncio.run(converse(whole, part(b"")))) == [USAGE]


def answer_of(
    cached: list[int], usage: Any, *, streams: bool = False, params: Any = FIRST
) -> Application:
    """An application that has asked the engine for as many prompts; `params` is what vLLM says of
    the first one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = CURRENT.get()
        assert call is not None
        call.reports.extend([REPORT, *OTHERS][: len(cached)])
        call.cached.extend(cached)
        answer: dict[str, Any] = {"id": "x", "choices": [], "usage": usage}
        if streams:

            async def events() -> AsyncIterator[str]:
                yield f"data: {json.dumps(answer, separators=(',', ':'))}\n\n"

            await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)
        else:
            await JSONResponse(answer | {"kv_transfer_params": params})(scope, receive, send)

    return app


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_to_several_prompts_has_the_reports_and_the_cached_tokens_of_all(streams: bool):
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0}}
    app = answer_of([32, 0, 64], usage, streams=streams)
    sent = asyncio.run(converse(app, part(b""), {"type": "http.disconnect"}))
    [body] = bodies(sent)
    answer = json.loads(body.removeprefix(b"data: "))
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 96, "audio_tokens": 0},
    }
    assert answer["kv_transfer_params"] == {"kvgraft": [REPORT, *OTHERS]}
    lengths = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths == ([] if streams else [len(body)])


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 9}, {"prompt_tokens_details": None}])
def test_an_answer_without_cached_tokens_gets_none(usage: Any):
    [body] = bodies(asyncio.run(converse(answer_of([32, 64], usage), part(b""))))
    answer = {"id": "x", "choices": [], "usage": usage}
    assert json.loads(body) == answer | {"kv_transfer_params": {"kvgraft": [REPORT, None]}}


def test_an_answer_of_which_vllm_reports_nothing_gets_no_report():
    """As that of a beam search, for which the engine runs many requests."""
    [body] = bodies(asyncio.run(converse(answer_of([32, 64], {}, params=None), part(b""))))
    assert json.loads(body)["kv_transfer_params"] is None


def test_the_usage_of_one_prompt_is_vllms_own():
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    [body] = bodies(asyncio.run(converse(answer_of([32], usage), part(b""))))
    assert json.loads(body)["usage"] == usage
    assert json.loads(body)["kv_transfer_params"] == FIRST
