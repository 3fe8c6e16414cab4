"""Idle refresh: an idle engine recomputes popular approximate blocks exactly."""

import asyncio
import logging
import secrets
from typing import Any

from kvgraft.server.call import Call
from kvgraft.server.engine_client import TenantEngineClient
from kvgraft.server.pins import NO_TEXT
from kvgraft.vllm.options import READ, REFRESH, Control

logger = logging.getLogger("kvgraft")
# seconds without a running request before a refresh starts
IDLE_S = 0.5
# tokens that are computed at a time; a new request waits for one step of this size at most
CHUNK = 512
# seconds between aborts of a request that may not have reached the engine yet
ABORT_S = 0.01


class IdleRefresher:
    """Background task that recomputes popular text exactly, in chunks, and stops at any new
    request.

    Computed chunks stay in the cache, and a later refresh continues with the rest of the text. Once
    the engine has nothing to refresh, the task waits for the next request before it asks again.

    Args:
        engine_client: gate to the engine; its `before_request` is set to `stop`.
    """

    def __init__(self, engine_client: TenantEngineClient) -> None:
        self._engine_client = engine_client
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._request_id = ""
        engine_client.before_request = self.stop
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Abort the current refresh, and start none before the server is idle again."""
        self._arrived.set()
        while self._reading is not None and not self._reading.done():
            await self._engine_client.abort(self._request_id)
            await asyncio.wait({self._reading}, timeout=ABORT_S)

    async def _run(self) -> None:
        """Wait for a request and then for an idle server, and refresh; repeat."""
        while True:
            await self._arrived.wait()
            while self._arrived.is_set() or not self._engine_client.is_idle:
                self._arrived.clear()
                await asyncio.sleep(IDLE_S)

            self._reading = asyncio.create_task(self._read())
            await asyncio.wait({self._reading})
            if (error := self._reading.exception()) is not None:
                logger.warning("the idle refresh has ended: %s", error)
                return

    async def _read(self) -> None:
        """Refresh one engine after the other, until nothing is left to refresh or a request
        arrives."""
        for engine in self._engine_client.engines:
            while await self._read_text(engine):
                pass

    async def _read_text(self, engine: int) -> bool:
        """Refresh the next text of an engine.

        Returns:
            False if nothing is left to refresh, or if a request has arrived.
        """
        if self._arrived.is_set():
            return False
        text = await self._operate(REFRESH, secrets.token_hex(32), NO_TEXT, engine)
        tokens = text.get("tokens")
        if not tokens:
            return False

        for stop in [*range(CHUNK, len(tokens), CHUNK), len(tokens)]:
            if self._arrived.is_set() or not await self._operate(
                READ, text["cache_salt"], tokens[:stop], engine
            ):
                return False
        return True

    async def _operate(
        self, op: str, salt: str, token_ids: list[int], engine: int
    ) -> dict[str, Any]:
        """Run a control operation as a low-priority request, under an id that `stop` can abort."""
        self._request_id = f"kvgraft-{op}-{secrets.token_hex(8)}"
        return await self._engine_client.operate(
            Call.internal_request(salt, engine=engine), Control(op), token_ids, self._request_id
        )
