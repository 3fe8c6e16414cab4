"""What the API server remembers of pinned documents, with an engine that only counts what it is
asked."""

import asyncio
from typing import Any

import pytest

from kvgraft.server import pins
from kvgraft.server.errors import Refused
from kvgraft.server.pins import TenantPins
from kvgraft.server.tenancy import Principal, Tenant
from kvgraft.vllm.options import CONTROL_TOKEN, Control

ALICE, BOB = Tenant.of("alice"), Tenant.of("bob")


class Engine:
    """Answers as the connector does; `shed` is what it gives back by itself."""

    def __init__(self) -> None:
        self.engines = range(1)
        self.all: dict[str, dict[str, dict[str, Any]]] = {"": {}, "adapter": {}}
        self.held = self.all[""]
        self.asked: list[str] = []

    async def control(
        self,
        tenant: Tenant,
        namespace: str,
        control: Control,
        token_ids: list[int],
        lora_request: Any,
        engine: int,
    ) -> dict[str, Any]:
        assert engine in self.engines
        self.held = self.all[control.adapter]
        assert (control.owner, control.quota) == (tenant.label, 0.25), "whatever the namespace"
        self.asked.append(control.op)
        if control.op == "list":
            return {"pins": [dict(segment) for segment in self.held.values()]}
        if control.op == "pin":
            self.held[control.name] = {
                "name": control.name,
                "num_tokens": len(token_ids),
                "num_shed": 0,
                "hits": 0,
            }
            segment = self.held[control.name]
        else:
            segment = self.held.pop(control.name)
        return {"pin": segment, "num_pins": len(self.held)}

    def shed(self, name: str) -> None:
        del self.held[name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv(CONTROL_TOKEN, "secret")
    return Engine()


@pytest.fixture
def segments(engine: Engine) -> TenantPins:
    return TenantPins(lambda: engine, 0.25)


def operate(
    segments: TenantPins, op: str, name: str = "", length: int = 1, adapter: str = ""
) -> dict[str, Any]:
    return asyncio.run(
        segments.operate(ALICE, "", Control(op, name, adapter=adapter), [0] * length)
    )


def names(segments: TenantPins, tenant: Tenant = ALICE) -> list[tuple[str, int]]:
    return [
        (one["name"], one["num_tokens"]) for one in asyncio.run(segments.view(Principal(tenant)))
    ]


def test_the_view_follows_each_operation_and_asks_once_in_a_while(
    engine: Engine, segments: TenantPins
):
    for number in range(20):
        operate(segments, "pin", str(number))
        assert len(names(segments)) == number + 1
    assert engine.asked.count("list") == 1
    operate(segments, "pin", "7", length=5)
    operate(segments, "delete", "3")
    assert dict(names(segments)) == {str(n): 5 if n == 7 else 1 for n in range(20) if n != 3}
    assert engine.asked.count("list") == 1
    assert names(segments, BOB) == []


def test_what_the_engine_has_let_go_is_noticed_by_the_count(engine: Engine, segments: TenantPins):
    for name in "abc":
        operate(segments, "pin", name)
    assert len(names(segments)) == 3
    engine.shed("b")
    operate(segments, "delete", "c")
    assert names(segments) == [("a", 1)]
    engine.shed("a")
    operate(segments, "pin", "d")
    assert names(segments) == [("d", 1)]
    operate(segments, "delete", "d")
    num_asked = len(engine.asked)
    assert names(segments) == []
    assert len(engine.asked) == num_asked, "nothing is left to ask about"


def test_segments_of_an_adapter_are_apart(segments: TenantPins, monkeypatch: pytest.MonkeyPatch):
    operate(segments, "pin", "a")
    operate(segments, "pin", "a", 2, "adapter")
    monkeypatch.setattr(pins, "FRESH_FOR_S", 0.0)
    view = asyncio.run(segments.view(Principal(ALICE)))
    assert [(one["num_tokens"], one.get("model")) for one in view] == [(1, None), (2, "adapter")]
    operate(segments, "delete", "a")
    assert names(segments) == [("a", 2)]


def test_an_old_view_is_asked_for_again(
    engine: Engine, segments: TenantPins, monkeypatch: pytest.MonkeyPatch
):
    operate(segments, "pin", "a")
    assert names(segments) == [("a", 1)]
    engine.held["a"]["num_tokens"] = 9
    assert names(segments) == [("a", 1)]
    monkeypatch.setattr(pins, "FRESH_FOR_S", 0.0)
    assert names(segments) == [("a", 9)]


class SeveralEngines:
    """An `Engine` of data parallelism each; an engine in `full` pins nothing."""

    def __init__(self, number: int) -> None:
        self.engines = range(number)
        self.each = [Engine() for _ in self.engines]
        self.full: set[int] = set()

    async def control(self, *asked: Any) -> dict[str, Any]:
        *rest, engine = asked
        control, held = asked[2], self.each[engine].held
        if control.op == "pin" and engine in self.full:
            return {"error": "no room", "status": 409}
        if control.op == "delete" and control.name not in held:
            return {"error": f"no pinned document {control.name!r}", "status": 404}
        return await self.each[engine].control(*rest, 0)


def test_a_document_is_pinned_in_all_engines_or_in_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CONTROL_TOKEN, "secret")
    engines = SeveralEngines(3)
    segments = TenantPins(lambda: engines, 0.25)  # type: ignore[arg-type, return-value]

    operate(segments, "pin", "a")
    assert [list(one.held) for one in engines.each] == [["a"]] * 3

    engines.full = {2}
    with pytest.raises(Refused, match="no room"):
        operate(segments, "pin", "b")
    assert [list(one.held) for one in engines.each] == [["a"]] * 3

    engines.each[1].shed("a")
    assert operate(segments, "delete", "a")["num_pins"] == 0
    assert [list(one.held) for one in engines.each] == [[]] * 3
    with pytest.raises(Refused, match="no pinned document 'a'"):
        operate(segments, "delete", "a")


def test_hits_of_all_engines_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CONTROL_TOKEN, "secret")
    engines = SeveralEngines(2)
    segments = TenantPins(lambda: engines, 0.25)  # type: ignore[arg-type, return-value]
    operate(segments, "pin", "a")
    for hits, one in enumerate(engines.each, start=3):
        one.held["a"] |= {"hits": hits, "num_shed": hits}
    [pin] = operate(segments, "list")["pins"]
    assert (pin["hits"], pin["num_shed"]) == (7, 4)
