"""Probe of the engine's silence: a frozen engine ends no request and raises no error."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from kvgraft.server.metrics import EngineSilence

# seconds between an answer and the next question
PERIOD_S = 1.0
ACCELERATOR_LIMIT_S = 120.0
CPU_MARGIN_S = 30.0


def default_limit_s() -> float:
    """Return the seconds of silence after which an engine counts as frozen.

    An engine answers between its steps. On a CPU a step may take minutes, but no longer than vLLM's
    executor waits for its workers. After that time vLLM ends the engine itself.
    """
    if current_platform.is_cpu():
        return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) + CPU_MARGIN_S
    return ACCELERATOR_LIMIT_S


class EngineProbe:
    """Periodic question to the engine; it exports the age of the last answer as a metric.

    Args:
        client: vLLM's `AsyncLLM`.
        limit_s: seconds of silence after which the engine counts as frozen; 0: never.
    """

    def __init__(self, client: Any, limit_s: float) -> None:
        self._client, self._limit_s = client, limit_s
        self._answered = time.monotonic()
        self._task = asyncio.create_task(self._run())
        EngineSilence(client.vllm_config.model_config.served_model_name, lambda: self.silent_s)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last answer."""
        return time.monotonic() - self._answered

    @property
    def problem(self) -> str | None:
        """Error message if the engine counts as frozen, else None."""
        silent_s = self.silent_s
        if not self._limit_s or silent_s <= self._limit_s:
            return None
        return f"the engine has not answered for {silent_s:.0f} s, the limit is {self._limit_s:g} s"

    async def _run(self) -> None:
        """Ask until the engine is dead; vLLM notices a dead engine itself."""
        while True:
            # the engine's main loop answers this question, and needs no step for it; several
            # engines may disagree for a moment, and have answered all the same
            with suppress(RuntimeError):
                await self._client.is_paused()
            self._answered = time.monotonic()
            await asyncio.sleep(PERIOD_S)
