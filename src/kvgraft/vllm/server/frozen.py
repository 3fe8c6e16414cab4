"""The frozen segments of all tenants, as this process knows them from the engine's answers."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from kvgraft.vllm.options import CONTROL_TOKEN, Control
from kvgraft.vllm.server.engine_client import GuardedEngineClient
from kvgraft.vllm.server.errors import Refused
from kvgraft.vllm.server.tenancy import Principal, Tenant

NO_TEXT = [0]  # operations other than freeze ignore their prompt, which must have a token
FRESH_FOR_S = 5.0  # how long an answer may be shown again before the engine is asked again


class FrozenSegments:
    """Operations on frozen segments, and their last known state.

    Args:
        guard: gives the way into the engine, once there is one.
    """

    def __init__(self, guard: Callable[[], GuardedEngineClient]) -> None:
        self._engine_client = guard
        self._known: dict[tuple[Tenant, str], list[dict[str, Any]]] = {}  # only namespaces that have segments
        self._asked_at: dict[tuple[Tenant, str], float] = {}
        self._refreshing = asyncio.Lock()

    async def operate(
        self, tenant: Tenant, namespace: str, control: Control, token_ids: list[int] | None = None
    ) -> list[dict[str, Any]]:
        """Run an operation; returns the segments of the namespace after it.

        Raises:
            Refused: the engine refused it, or has no connector of ours.
        """
        if not os.environ.get(CONTROL_TOKEN):
            raise Refused(503, f"the engine trusts nobody: set {CONTROL_TOKEN} to a secret before the server starts")
        answer = await self._engine_client().control(tenant, namespace, control, token_ids or NO_TEXT)
        if "error" in answer:
            raise Refused(int(answer.get("status", 400)), str(answer["error"]))
        if "segments" not in answer:
            raise Refused(503, "the engine runs without KVGraft: start the server with `kvgraft serve`")
        place = tenant, namespace
        self._known[place], self._asked_at[place] = answer["segments"], time.monotonic()
        if not answer["segments"]:
            del self._known[place], self._asked_at[place]
        return answer["segments"]

    async def view(self, principal: Principal) -> list[dict[str, Any]]:
        """The segments that this caller may see: its own, or all for the admin; at most FRESH_FOR_S old."""
        async with self._refreshing:
            mine = [place for place in self._known if principal.is_admin or place[0] == principal.tenant]
            for tenant, namespace in mine:
                if time.monotonic() - self._asked_at[tenant, namespace] > FRESH_FOR_S:
                    await self.operate(tenant, namespace, Control("list"))
        return [
            {"tenant": tenant.label, "namespace": namespace, **segment}
            for tenant, namespace in mine
            for segment in self._known.get((tenant, namespace), ())
        ]
