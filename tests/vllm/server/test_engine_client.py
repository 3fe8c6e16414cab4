"""The gate to the engine, for what no HTTP request reaches; test_server.py drives it from
outside."""

import asyncio
import contextvars
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from kvgraft.guard.guard import Ticket
from kvgraft.policies import parse_policy
from kvgraft.server.call import CURRENT, Call
from kvgraft.server.engine_choice import EngineChoice
from kvgraft.server.engine_client import NOT_RESET, TenantEngineClient
from kvgraft.server.keys import Keys
from kvgraft.server.logprob_recorder import LogprobRecorder
from kvgraft.server.request_log import RequestLog
from kvgraft.server.scorer import AnswerSample
from kvgraft.server.sharing import SHARED, Grants, NotGranted
from kvgraft.server.tenancy import Keyring, Principal, Salts, Tenant
from kvgraft.vllm.namespace_grants import GRANTED, granted_salts
from kvgraft.vllm.options import CONTROL_TOKEN, PARAMS, RequestOptions, ServedReport
from kvgraft.vllm.patches.reports import HEADER, StoppedReports, send_ahead, stop_sending

ALICE = Tenant.of("alice")
GRANTS = Grants(["wiki=alice", "law=*", "hidden=bob"], Keyring(Keys(("alice", "bob"), "admin")))
REPORT = ServedReport(policy="naive", prompt_tokens=1, fresh_tokens=1, spans=[[0, 1, "fresh"]])


class Engine:
    """Keeps what is sent to it; answers with two outputs."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(add_request_async=self.keep)
        self.output_processor = SimpleNamespace(
            request_states={}, process_outputs=lambda outputs: list(outputs)
        )
        self.requests: list[EngineCoreRequest] = []
        self.closed = False

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            raise RuntimeError(
                f"Call to reset_prefix_cache method failed: {NOT_RESET if self.closed else 'else'} "
                "..."
            )
        return True

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return True

    async def keep(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        try:
            for finished in (False, True):
                params = REPORT.as_params() if finished else None
                known: dict[str, Any] = (
                    {"num_cached_tokens": 5, "kv_transfer_params": params} if finished else {}
                )
                yield RequestOutput("r", "the", [1], None, [], finished, **known)
        finally:
            self.closed = True


def request(**params: Any) -> EngineCoreRequest:
    extra = {PARAMS: {"kvgraft": params}} if params else None
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(extra_args=extra),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt="what the client said",
        data_parallel_rank=None,
    )


@pytest.fixture
def salts() -> Salts:
    return Salts()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture(autouse=True)
def client(engine: Engine, salts: Salts) -> TenantEngineClient:
    return TenantEngineClient(
        engine, salts, GRANTS, RequestLog((ALICE,)), RequestOptions(parse_policy("sparsex"))
    )


def admit(engine: Engine, sent: EngineCoreRequest, call: Call | None) -> str | None:
    async def run() -> None:
        CURRENT.set(call)
        await engine.engine_core.add_request_async(sent)

    asyncio.run(run())
    return engine.requests[-1].cache_salt


def test_the_cache_key_is_the_tenants_narrowed_by_what_the_client_said(
    engine: Engine, salts: Salts
):
    call = Call(Principal(ALICE), "/v1/completions")
    assert admit(engine, request(), call) == salts.of(ALICE, "", "what the client said")
    assert admit(engine, request(namespace="n"), call) == salts.of(
        ALICE, "n", "what the client said"
    )
    assert admit(engine, request(), Call(Principal(ALICE), "", salt="chosen")) == "chosen"


def test_what_the_guard_notes_is_of_the_callers_own_request_whatever_id_clients_choose(
    engine: Engine, salts: Salts
):
    bob = Tenant.of("bob")
    notes = {
        tenant: LogprobRecorder(Ticket("naive", parse_policy("naive")), "")
        for tenant in (ALICE, bob)
    }
    for tenant in (bob, ALICE):
        sent = request()
        sent.lora_request = LoRARequest(tenant.label, 1, "/a")
        admit(engine, sent, Call(Principal(tenant), "", watched={"r": notes[tenant]}))
    said = "what the client said"
    assert {one: note.cache_salt for one, note in notes.items()} == {
        one: salts.of(one, "", said) for one in notes
    }
    assert all(note.lora_request.lora_name == one.label for one, note in notes.items())


def granted(engine: Engine, sent: EngineCoreRequest, call: Call | None) -> tuple[str, ...]:
    """The cache keys of the namespaces that the engine lets a request read."""
    salt = admit(engine, sent, call)
    assert sent.sampling_params is not None
    params = (sent.sampling_params.extra_args or {}).get(PARAMS) or {}
    return granted_salts(params.get(GRANTED), salt or "")


def test_what_is_shared_with_a_tenant_goes_with_its_requests(
    engine: Engine, salts: Salts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CONTROL_TOKEN, "secret")
    call, wiki, law = (
        Call(Principal(ALICE), "/v1/completions"),
        salts.of(SHARED, "wiki"),
        salts.of(SHARED, "law"),
    )
    assert (
        granted(engine, request(), call)
        == granted(engine, request(namespace="n"), call)
        == (wiki, law)
    )
    assert granted(engine, request(shared=["law", "wiki"]), call) == (law, wiki)
    assert granted(engine, request(shared=[]), call) == granted(engine, request(), None) == ()
    assert granted(engine, request(), Call(Principal(Tenant.of("bob")), "")) == (
        law,
        salts.of(SHARED, "hidden"),
    )
    assert (
        granted(engine, request(), Call(Principal(ALICE, is_admin=True), "", salt="chosen")) == ()
    )
    assert engine.requests[0].sampling_params.extra_args[PARAMS].keys() == {GRANTED}


def test_what_is_not_shared_with_a_tenant_is_refused_like_what_does_not_exist(engine: Engine):
    def ask(name: str) -> None:
        CURRENT.set(Call(Principal(ALICE), "/v1/completions"))
        engine.generate(
            "the", SamplingParams(extra_args={PARAMS: {"kvgraft": {"shared": [name]}}}), "r"
        )

    for name in ("hidden", "none"):
        with pytest.raises(
            NotGranted, match=f"^shared: no namespace '{name}' for this key: it has wiki, law$"
        ):
            contextvars.copy_context().run(ask, name)


def test_a_request_of_nobody_shares_nothing(engine: Engine):
    first, second = (admit(engine, request(), None) for _ in range(2))
    assert first
    assert second
    assert len({first, second, "what the client said"}) == 3


def test_bad_options_are_refused_when_they_are_given_not_when_the_answer_is_read(engine: Engine):
    params = SamplingParams(extra_args={PARAMS: {"kvgraft": {"bondary": 1}}})
    with pytest.raises(VLLMValidationError, match="no option 'bondary'"):
        engine.generate("the", params, "r")


def test_the_report_is_there_before_the_last_output_and_in_the_order_of_the_prompts(engine: Engine):
    async def run() -> list[dict[str, Any] | None]:
        call = Call(Principal(ALICE), "/v1/completions")
        CURRENT.set(call)
        first, second = (engine.generate("the", SamplingParams(), name) for name in "ab")
        async for output in second:
            assert (call.reports[1] is not None) == output.finished
        await first.aclose()
        assert call.cached == [0, 5]
        return call.reports

    assert asyncio.run(run()) == [None, REPORT.as_params()["kvgraft"]]


def test_who_stops_reading_stops_the_engine_at_once(engine: Engine):
    async def run() -> None:
        CURRENT.set(Call(Principal(ALICE), "/v1/completions"))
        outputs = engine.generate("the", SamplingParams(), "r")
        await anext(outputs)
        assert not engine.closed
        await outputs.aclose()
        assert engine.closed

    asyncio.run(run())


def test_a_reset_that_cannot_be_is_no_error(engine: Engine):
    assert asyncio.run(engine.reset_prefix_cache()) is True
    with pytest.raises(RuntimeError, match="else"):
        asyncio.run(engine.reset_prefix_cache(reset_running_requests=True))
    engine.closed = True
    assert asyncio.run(engine.reset_prefix_cache(reset_running_requests=True)) is False


def test_a_reset_ends_what_the_guard_scores_first(engine: Engine, client: TenantEngineClient):
    order = []

    async def reset() -> None:
        order.append("guard")

    async def reset_cache() -> bool:
        order.append("cache")
        return True

    client.guard, client._reset = SimpleNamespace(reset=reset), reset_cache  # type: ignore[assignment]
    assert asyncio.run(engine.reset_prefix_cache())
    assert order == ["guard", "cache"]


def test_other_weights_of_an_adapter_end_what_the_guard_scores_first(
    engine: Engine, client: TenantEngineClient
):
    order = []

    async def reset() -> None:
        order.append("guard")

    client.guard = SimpleNamespace(reset=reset)  # type: ignore[assignment]
    for load_inplace in (False, True):
        assert asyncio.run(engine.add_lora(LoRARequest("a", 1, "/a", load_inplace=load_inplace)))
    assert order == ["guard"], "a new adapter has no answers yet"


class State:
    """What vLLM keeps of a request in the front end."""

    def __init__(self, parent_req: object = None, request_index: int = 0) -> None:
        self.parent_req, self.request_index = parent_req, request_index


def sent(request_id: str, headers: dict[str, str] | None, **last: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [1], trace_headers=headers, **last)


def test_a_report_that_went_ahead_is_handed_out_with_any_output_that_may_be_the_last():
    processor = Engine().output_processor
    kept, asked = StoppedReports(processor), SimpleNamespace(trace_headers={"traceparent": "t"})
    send_ahead(asked, REPORT.as_params())
    first = asked.trace_headers
    stop_sending(asked)
    assert asked.trace_headers == {"traceparent": "t"}
    processor.request_states |= {"a": State(), "b": State()}
    outputs = [
        sent("a", first),
        sent("a", asked.trace_headers),
        sent("b", None),
        sent("gone", first),
    ]
    last = sent("a", None, kv_transfer_params={"kvgraft": {"the engine's": "own"}})
    assert processor.process_outputs([*outputs, last]) == [*outputs, last]
    assert [output.kv_transfer_params for output in outputs] == [REPORT.as_params()] * 2 + [
        None
    ] * 2
    assert [output.trace_headers for output in outputs[:2]] == [{"traceparent": "t"}] * 2
    assert last.kv_transfer_params == {"kvgraft": {"the engine's": "own"}}
    assert len(kept) == 1
    del processor.request_states["a"]
    assert len(kept) == 0, "nothing is kept of what has ended"


class Parent:
    """What vLLM keeps of the answers to one prompt."""


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("stopped", [False, True])
def test_of_several_answers_to_a_prompt_the_last_has_the_report_of_the_first(
    order: tuple[int, ...], stopped: bool
):
    processor, parent = Engine().output_processor, Parent()
    kept = StoppedReports(processor)
    reports = [{"kvgraft": {"answer": number}} for number in range(3)]
    processor.request_states |= {str(number): State(parent, number) for number in range(3)}
    processor.request_states["other"] = State()
    headers = {HEADER: json.dumps(reports[0])} if stopped else None
    processor.process_outputs([sent("0", headers), sent("1", None), sent("2", None)])
    outputs = [sent(str(number), None, kv_transfer_params=reports[number]) for number in order]
    other = sent("other", None, kv_transfer_params={"kvgraft": {}})
    processor.process_outputs([*outputs, other])
    assert outputs[-1].kv_transfer_params == reports[0]
    assert other.kv_transfer_params == {"kvgraft": {}}
    processor.request_states.clear()
    del parent
    assert len(kept) == len(kept._of_first) == 0, "nothing is kept of what has ended"


def test_each_request_goes_to_the_engine_that_is_chosen_or_settled(engine: Engine, salts: Salts):
    """And the guard tries a plan in the engine that has made it."""
    choice = EngineChoice(3, 10_000, {})
    TenantEngineClient(
        engine, salts, GRANTS, RequestLog((ALICE,)), RequestOptions(parse_policy("naive")), choice
    )
    note = LogprobRecorder(Ticket("naive", parse_policy("naive")), "")
    sent = request()
    sent.data_parallel_rank = 2
    admit(engine, sent, Call(Principal(ALICE), "", watched={"r": note}))
    assert (sent.data_parallel_rank, note.engine) == (2, 2), "the client's own choice"
    trial = AnswerSample.of(note, 0, would=True).call
    assert (trial.engine, trial.low_priority) == (2, True)

    chosen = request()
    admit(engine, chosen, Call(Principal(ALICE), ""))
    assert chosen.data_parallel_rank == 0, "the first of those that were given least"
    for call in (trial, Call(Principal(ALICE), "", "salt", engine=2)):
        settled = request()
        admit(engine, settled, call)
        assert settled.data_parallel_rank == 2
    warm_up = request()
    admit(engine, warm_up, Call.internal_request("salt"))
    assert warm_up.data_parallel_rank is None, "vLLM's own choice"


@pytest.mark.parametrize(
    ("params", "may"),
    [
        ({}, True),
        ({"reuse": "off"}, False),
        ({"reuse": "exact"}, False),
        ({"policy": "full"}, False),
    ],
)
def test_requests_that_must_not_graft_are_sent_by_their_prefix_alone(
    engine: Engine, salts: Salts, params: dict[str, Any], may: bool, monkeypatch: pytest.MonkeyPatch
):
    choice, texts = EngineChoice(2, 10_000, {}), list[Any]()
    monkeypatch.setattr(choice, "choose", lambda _, text, given: texts.append(text) or 0)
    TenantEngineClient(
        engine, salts, GRANTS, RequestLog((ALICE,)), RequestOptions(parse_policy("naive")), choice
    )
    admit(engine, request(**params), Call(Principal(ALICE), ""))
    assert texts[0].grafts == may
    assert len(texts[0].shared) == 2, "wiki and law"
