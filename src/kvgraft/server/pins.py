"""Pinned documents of all tenants, in the state that the engine last reported."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from kvgraft.server.engine_client import TenantEngineClient
from kvgraft.server.errors import Refused
from kvgraft.server.tenancy import Principal, Tenant
from kvgraft.vllm.options import CONTROL_TOKEN, Control

# key of a list of pins: tenant, namespace, adapter
PinPlace = tuple[Tenant, str, str]
PinFields = dict[str, Any]
# prompt of operations other than `pin`: the engine ignores it, and a prompt needs a token
NO_TEXT = [0]
# age up to which an answer is shown again without asking the engine
FRESH_FOR_S = 5.0


class TenantPins:
    """Operations on pinned documents, and the last known state of these documents.

    Args:
        guard: returns the gate to the engine, once the engine is connected.
        quota: share of the pinned capacity that one tenant may use.
    """

    def __init__(self, guard: Callable[[], TenantEngineClient], quota: float) -> None:
        self._engine_client, self.quota = guard, quota
        # by name; only namespaces that have pinned documents
        self._known: dict[PinPlace, dict[str, PinFields]] = {}
        # monotonic time of the last complete list
        self._asked_at: dict[PinPlace, float] = {}
        self._refreshing = asyncio.Lock()
        # one change at a time, so that all engines have the same documents
        self._changing = asyncio.Lock()

    async def operate(
        self,
        tenant: Tenant,
        namespace: str,
        control: Control,
        token_ids: list[int] | None = None,
        lora_request: Any = None,
    ) -> dict[str, Any]:
        """Run an operation on pinned documents, in all engines or in none.

        Args:
            token_ids: the text to pin; None for other operations.
            lora_request: the adapter with which the text is computed, or None.

        Returns:
            The engine's answer: all `pins`, or one `pin` and `num_pins`.

        Raises:
            Refused: the engine refused the operation, or does not use KVGraft's connector.
        """
        if not os.environ.get(CONTROL_TOKEN):
            raise Refused(
                503,
                f"the engine trusts nobody: set {CONTROL_TOKEN} to a secret before the server "
                "starts",
            )

        charged = replace(control, owner=tenant.label, quota=self.quota)
        client = self._engine_client()

        async def ask(engine: int, op: str) -> dict[str, Any]:
            text = token_ids if token_ids and op == "pin" else NO_TEXT
            asked = replace(charged, op=op)
            return await client.control(tenant, namespace, asked, text, lora_request, engine)

        async with nullcontext() if control.op == "list" else self._changing:
            answer = await _in_all_engines(ask, client.engines, control.op)

        if "error" in answer:
            raise Refused(int(answer.get("status", 400)), str(answer["error"]))
        if not answer.keys() & {"pins", "pin"}:
            raise Refused(
                503, "the engine runs without KVGraft: start the server with `kvgraft serve`"
            )

        self._note((tenant, namespace, control.adapter), control, answer)
        return answer

    async def view(self, principal: Principal) -> list[dict[str, Any]]:
        """Return the pinned documents that this caller may see, at most FRESH_FOR_S old.

        A tenant sees its own documents, the admin those of all tenants.
        """
        async with self._refreshing:
            mine = [
                place for place in self._known if principal.is_admin or place[0] == principal.tenant
            ]
            for place in mine:
                asked_at = self._asked_at.get(place)
                if asked_at is None or time.monotonic() - asked_at > FRESH_FOR_S:
                    tenant, namespace, adapter = place
                    await self.operate(tenant, namespace, Control("list", adapter=adapter))
        return [
            {**shown(*place), **segment}
            for place in mine
            for segment in self._known.get(place, {}).values()
        ]

    def _note(self, place: PinPlace, control: Control, answer: dict[str, Any]) -> None:
        """Record what an answer says about a namespace."""
        known = self._known.setdefault(place, {})
        if "pins" in answer:
            self._known[place] = known = {segment["name"]: segment for segment in answer["pins"]}
            self._asked_at[place] = time.monotonic()
        else:
            known.pop(control.name, None)
            if control.op == "pin":
                known[control.name] = answer["pin"]
            # the engine has removed other documents: list them again
            if len(known) != answer["num_pins"]:
                self._asked_at.pop(place, None)

        if not answer.get("pins", answer.get("num_pins")):
            self._known.pop(place, None)
            self._asked_at.pop(place, None)


async def _in_all_engines(
    ask: Callable[[int, str], Awaitable[dict[str, Any]]], engines: Iterable[int], op: str
) -> dict[str, Any]:
    """Run an operation in one engine after the other, and return their merged answer.

    If one of several engines does not pin a document, it is deleted in all of them.

    Args:
        ask: runs an operation in an engine.
    """
    answers, is_pinned = list[dict[str, Any]](), False
    try:
        for engine in engines:
            answers.append(await ask(engine, op))
            if op == "pin" and "pin" not in answers[-1]:
                break
        else:
            is_pinned = True
    finally:
        if op == "pin" and answers and not is_pinned and "pin" in answers[0]:
            for engine in engines:
                await ask(engine, "delete")
    return merged(answers)


def merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one answer for those of all engines to the same operation.

    Every engine has all documents. Each prompt goes to one engine, so their hits add up. An error
    of one engine counts, except that a document to delete may be missing in some of them.
    """
    done = [answer for answer in answers if answer.keys() & {"pins", "pin"}]
    failed = [answer for answer in answers if answer not in done]
    if not done or any(answer.get("status") != HTTPStatus.NOT_FOUND for answer in failed):
        return dict((failed or answers)[0])

    if "pins" in done[0]:
        by_name: dict[str, list[PinFields]] = {}
        for answer in done:
            for pin in answer["pins"]:
                by_name.setdefault(pin["name"], []).append(pin)
        return {"pins": [_merged_pin(pins) for pins in by_name.values()]}
    num_pins = max(answer["num_pins"] for answer in done)
    return {"pin": _merged_pin([answer["pin"] for answer in done]), "num_pins": num_pins}


def _merged_pin(pins: Sequence[PinFields]) -> PinFields:
    """Return one description of a document that several engines describe."""
    return {
        **pins[0],
        "num_shed": max(pin["num_shed"] for pin in pins),
        "hits": sum(pin["hits"] for pin in pins),
    }


def shown(tenant: Tenant, namespace: str, adapter: str) -> dict[str, str]:
    """Return the fields that locate pinned documents in an answer; `model` only for an adapter."""
    return {"tenant": tenant.name, "namespace": namespace} | ({"model": adapter} if adapter else {})
