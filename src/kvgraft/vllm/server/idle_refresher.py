"""Reading anew: while no request is in flight, the engine reads what is popular and known only
approximately."""

import asyncio
import logging
import secrets
from typing import Any

from kvgraft.vllm.options import READ, REFRESH, Control
from kvgraft.vllm.server.call import Call
from kvgraft.vllm.server.engine_client import TenantEngineClient
from kvgraft.vllm.server.pins import NO_TEXT

logger = logging.getLogger("kvgraft")
IDLE_S = 0.5  # without a request in flight, before anything is read
CHUNK = 512  # tokens that are read at a time: who arrives waits for a step of so many at most
ABORT_S = 0.01  # until a request is aborted that was not in the engine yet


class IdleRefresher:
    """Asks the engine what to read, reads it chunk by chunk, and stops when any request arrives.
    What was read until then stays known, and the rest of the text comes next.

    Nothing is asked while nothing has arrived since there was nothing left to read.

    Args:
        engine_client: the way into the engine; it says when a request arrives.
    """

    def __init__(self, engine_client: TenantEngineClient) -> None:
        self._engine_client = engine_client
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._request_id = ""
        engine_client.before_request = self.stop
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Read nothing before it is quiet again; what is being read is aborted."""
        self._arrived.set()
        while self._reading is not None and not self._reading.done():
            await self._engine_client.abort(self._request_id)
            await asyncio.wait({self._reading}, timeout=ABORT_S)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            while self._arrived.is_set() or not self._engine_client.is_idle:
                self._arrived.clear()
                await asyncio.sleep(IDLE_S)
            self._reading = asyncio.create_task(self._read())
            await asyncio.wait({self._reading})
            if (error := self._reading.exception()) is not None:
                logger.warning("nothing is read anew any more: %s", error)
                return

    async def _read(self) -> None:
        """Read until there is nothing to read, or a request arrives."""
        while not self._arrived.is_set():
            text = await self._operate(REFRESH, secrets.token_hex(32), NO_TEXT)
            tokens = text.get("tokens")
            if not tokens:
                return
            for stop in [*range(CHUNK, len(tokens), CHUNK), len(tokens)]:
                if self._arrived.is_set() or not await self._operate(
                    READ, text["cache_salt"], tokens[:stop]
                ):
                    return

    async def _operate(self, op: str, salt: str, token_ids: list[int]) -> dict[str, Any]:
        self._request_id = f"kvgraft-{op}-{secrets.token_hex(8)}"
        return await self._engine_client.operate(
            Call.internal_request(salt), Control(op), token_ids, self._request_id
        )
