"""Scores answers once more with exact KV: chunk by chunk, when nothing waits for its first
token."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvgraft.guard.distances import along_logprobs
from kvgraft.guard.guard import Ticket
from kvgraft.prefill.report import Outcome
from kvgraft.vllm.options import KEY, SCORE, TRIAL_OF, Control
from kvgraft.vllm.server.call import Call
from kvgraft.vllm.server.logprob_recorder import NUM_LOGPROBS, LogprobRecorder, Logprobs, places
from kvgraft.vllm.server.metrics import GuardMetrics

logger = logging.getLogger("kvgraft")
CHUNK = 512  # tokens that are computed at a time: who arrives waits for so many at most
POLL_S = 0.02  # between looks at whether anything waits
FLOOR_S = 10.0  # for each chunk, if something always waits
MOST_WAITING = 64  # answers to be scored
AT_ONCE = 4  # that are being scored: chunks come one by one, and answers are generated together


class EngineGate(Protocol):
    """The way into the engine; see `TenantEngineClient`."""

    num_waiting: int

    async def run(
        self,
        call: Call,
        params: dict[str, Any],
        token_ids: list[int],
        request_id: str,
        **sampling: Any,
    ) -> Any | None:
        """vLLM's last output of a request of ours."""


@dataclass(frozen=True)
class AnswerSample:
    """An answer to be scored, and what its approximate KV has made of it.

    Attributes:
        logprobs: of each place of the answer.
        call: under whose cache key and adapter it is scored.
        depth: as the report says. `found`: where its distances are put.
        trial_of: of an exact answer, the request whose plan is to be tried: the other way round.
    """

    ticket: Ticket
    tenant: str
    call: Call
    prompt: list[int]
    answer: list[int]
    logprobs: list[Logprobs]
    depth: int
    found: dict[str, float]
    trial_of: str | None = None

    @classmethod
    def of(cls, one: LogprobRecorder, depth: int, *, would: bool = False) -> "AnswerSample":
        """`would`: its answer is exact, and what it would have been is to be tried."""
        call, of = (
            Call.internal_request(one.cache_salt or "", one.lora_request),
            one.request_id if would else None,
        )
        return cls(
            one.ticket, one.tenant, call, one.prompt, one.answer, one.logprobs, depth, one.found, of
        )


class Scorer:
    """Scores answers in the order in which they come.

    Args:
        tokens_per_minute: that may be computed for that.
        report: called with the distances of each answer that was scored.
    """

    def __init__(
        self,
        engine_client: EngineGate,
        tokens_per_minute: float,
        report: Callable[[AnswerSample, Mapping[str, float]], None],
        metrics: GuardMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_client, self._report, self._metrics, self._clock = (
            engine_client,
            report,
            metrics,
            clock,
        )
        self._most, self._allowed = tokens_per_minute, tokens_per_minute / 60
        self._counted, self._floor = clock(), clock() + FLOOR_S
        self._queue = asyncio.Queue[AnswerSample](MOST_WAITING)
        self._scoring: set[asyncio.Task[None]] = set()
        self._computes = asyncio.Lock()
        self._task = asyncio.create_task(self._run())

    def add(self, sample: AnswerSample) -> bool:
        """Score it when there is time; False: too many wait."""
        if self._queue.full():
            return False
        self._queue.put_nowait(sample)
        self._metrics.waiting.inc()
        return True

    async def reset(self) -> None:
        """Drop all that waits, and end what is being scored."""
        while not self._queue.empty():
            self._queue.get_nowait()
            self._metrics.answers.labels("dropped").inc()
            self._metrics.waiting.dec()
        for scoring in self._scoring:
            scoring.cancel()
        if self._scoring:
            await asyncio.wait(self._scoring)

    async def _run(self) -> None:
        await self._warm_up()
        await asyncio.gather(*(self._work() for _ in range(AT_ONCE)))

    async def _work(self) -> None:
        while True:
            sample = await self._queue.get()
            scoring = asyncio.create_task(self._score(sample))
            self._scoring.add(scoring)
            await asyncio.wait({scoring})
            self._scoring.discard(scoring)
            self._metrics.answers.labels(_outcome(scoring)).inc()
            self._metrics.waiting.dec()

    async def _warm_up(self) -> None:
        """vLLM compiles what tells log-probabilities when it is first asked for them, of one
        request and of several: nobody is to wait for that later."""
        asked = (
            self._answer(
                Call.internal_request(secrets.token_hex()),
                Control(SCORE).as_params(),
                [0],
                [0] * count,
            )
            for count in (1, 2, 3)
        )
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(error, Exception):  # likewise
                logger.warning("the guard could not be warmed up: %s", error)

    async def _score(self, sample: AnswerSample) -> None:
        """Report its distances from exact KV."""
        if sample.trial_of is not None:
            exact, ours = sample.logprobs, await self._try(sample)
        else:
            exact, ours = await self._compute(sample), sample.logprobs
        self._report(sample, along_logprobs(ours, exact, sample.answer))

    async def _compute(self, sample: AnswerSample) -> list[Logprobs]:
        """What exact KV says of an answer."""
        params, prompt = Control(SCORE).as_params(), sample.prompt
        for stop in [*range(CHUNK, len(prompt), CHUNK), len(prompt)]:
            async with self._computes:
                await self._turn()
                output = await self._send(sample.call, params, prompt[:stop])
                self._charge(stop - (output.num_cached_tokens or 0))
        output = await self._answer(sample.call, params, prompt, sample.answer)
        self._charge(len(prompt) - (output.num_cached_tokens or 0) + len(sample.answer))
        return places(output.outputs[0].logprobs)

    async def _try(self, sample: AnswerSample) -> list[Logprobs]:
        """What is said of an answer on the KV that its prompt would have had."""
        async with self._computes:
            await self._turn()
        params = {KEY: {"policy": str(sample.ticket.policy)}, TRIAL_OF: sample.trial_of}
        output = await self._answer(sample.call, params, sample.prompt, sample.answer)
        report = output.kv_transfer_params[KEY]
        self._charge(report["recomputed_tokens"] + report["fresh_tokens"] + len(sample.answer))
        if report["outcome"] != Outcome.GRAFTED:
            raise ValueError("what it would have grafted is gone")
        return places(output.outputs[0].logprobs)

    async def _turn(self) -> None:
        """Wait until tokens may be computed, and nothing waits for its first token or has waited
        for too long."""
        while True:
            now = self._clock()
            self._allowed = min(self._allowed + self._most / 60 * (now - self._counted), self._most)
            self._counted = now
            if self._allowed > 0 and (not self._engine_client.num_waiting or now >= self._floor):
                return
            await asyncio.sleep(POLL_S)

    def _charge(self, num_tokens: int) -> None:
        """So many tokens have been computed."""
        self._allowed -= num_tokens
        self._floor = self._clock() + FLOOR_S * min(1.0, num_tokens / CHUNK)
        self._metrics.tokens.inc(num_tokens)

    async def _answer(
        self, call: Call, params: dict[str, Any], prompt: list[int], answer: list[int]
    ) -> Any:
        """vLLM's output of a request that gives its answer, with log-probabilities."""
        given = {**params, KEY: {**params[KEY], "forced_output": answer}}
        return await self._send(
            call, given, prompt, max_tokens=len(answer), logprobs=NUM_LOGPROBS, ignore_eos=True
        )

    async def _send(
        self, call: Call, params: dict[str, Any], tokens: list[int], **sampling: Any
    ) -> Any:
        """vLLM's last output of a request that gives way to all others."""
        request_id = f"kvgraft-{SCORE}-{secrets.token_hex(8)}"
        output = await self._engine_client.run(call, params, tokens, request_id, **sampling)
        if output is None:
            raise ValueError("it was aborted")
        return output


def _outcome(scoring: asyncio.Task[None]) -> str:
    """What became of an answer."""
    if scoring.cancelled():
        return "dropped"
    if (error := scoring.exception()) is not None:  # whatever it is, the server goes on
        logger.warning("an answer could not be scored: %s", error)
        return "failed"
    return "scored"
