"""Scoring of answers with exact KV, in chunks, when no request waits for its first token."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvgraft.core.report import Outcome
from kvgraft.guard.distances import along_logprobs
from kvgraft.guard.guard import Ticket
from kvgraft.server.call import Call
from kvgraft.server.logprob_recorder import NUM_LOGPROBS, LogprobRecorder, Logprobs, places
from kvgraft.server.metrics import GuardMetrics
from kvgraft.vllm.options import KEY, SCORE, TRIAL_OF, Control

logger = logging.getLogger("kvgraft")
# tokens that are computed at a time; a new request waits for one chunk at most
CHUNK = 512
# seconds between checks for waiting requests
POLL_S = 0.02
# if requests wait all the time, one chunk is computed after this time
FLOOR_S = 10.0
# maximum number of answers in the queue
MOST_WAITING = 64
# Answers that are scored concurrently. Chunks are computed one by one; decode steps run in a batch.
AT_ONCE = 4


class EngineGate(Protocol):
    """Interface to the engine that scoring needs; see `TenantEngineClient`."""

    num_waiting: int

    async def run(
        self,
        call: Call,
        params: dict[str, Any],
        token_ids: list[int],
        request_id: str,
        **sampling: Any,
    ) -> Any | None:
        """Run an internal request and return vLLM's last output, or None if it was aborted."""


@dataclass(frozen=True)
class AnswerSample:
    """An answer to be scored, and the log-probabilities that the served KV gave it.

    Attributes:
        ticket: the guard's ticket of the request.
        tenant: name of the tenant.
        call: internal call with the cache key and the adapter for scoring.
        prompt: token ids.
        answer: token ids.
        logprobs: of each position of the answer, by token.
        depth: depth of the approximation in the report.
        found: dictionary that receives the distances.
        trial_of: in shadow mode, id of the request whose plan is tried. Its answer is exact, so the
            approximate KV is computed for scoring. Else None.
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
        """Return a sample of a recorded answer.

        Args:
            would: the answer is exact (shadow mode), and the request's plan is to be tried.
        """
        call, of = (
            Call.internal_request(one.cache_salt or "", one.lora_request, one.engine),
            one.request_id if would else None,
        )
        return cls(
            one.ticket, one.tenant, call, one.prompt, one.answer, one.logprobs, depth, one.found, of
        )


class Scorer:
    """Queue that scores answers in order of arrival.

    Args:
        tokens_per_minute: tokens that scoring may compute per minute.
        report: called with the distances of each scored answer.
        clock: returns seconds.
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
        """Queue an answer; return False if too many wait."""
        if self._queue.full():
            return False
        self._queue.put_nowait(sample)
        self._metrics.waiting.inc()
        return True

    async def reset(self) -> None:
        """Drop the waiting answers and cancel those that are being scored."""
        while not self._queue.empty():
            self._queue.get_nowait()
            self._metrics.answers.labels("dropped").inc()
            self._metrics.waiting.dec()
        for scoring in self._scoring:
            scoring.cancel()
        if self._scoring:
            await asyncio.wait(self._scoring)

    async def _run(self) -> None:
        """Warm up, then score with AT_ONCE workers."""
        await self._warm_up()
        await asyncio.gather(*(self._work() for _ in range(AT_ONCE)))

    async def _work(self) -> None:
        """Score answers from the queue, one at a time."""
        while True:
            sample = await self._queue.get()
            scoring = asyncio.create_task(self._score(sample))
            self._scoring.add(scoring)
            await asyncio.wait({scoring})
            self._scoring.discard(scoring)
            self._metrics.answers.labels(_outcome(scoring)).inc()
            self._metrics.waiting.dec()

    async def _warm_up(self) -> None:
        """Request log-probabilities for 1, 2 and 3 answer tokens at the same time.

        vLLM compiles the code for log-probabilities at first use, for one request and for several.
        A warm-up keeps clients from waiting for that.
        """
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
            # the guard is optional: the server continues without a warm-up
            if isinstance(error, Exception):
                logger.warning("the guard could not be warmed up: %s", error)

    async def _score(self, sample: AnswerSample) -> None:
        """Compute an answer's distances from exact KV, and report them."""
        if sample.trial_of is not None:
            exact, ours = sample.logprobs, await self._try(sample)
        else:
            exact, ours = await self._compute(sample), sample.logprobs
        self._report(sample, along_logprobs(ours, exact, sample.answer))

    async def _compute(self, sample: AnswerSample) -> list[Logprobs]:
        """Return the log-probabilities of an answer on exact KV."""
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
        """Return the log-probabilities of an answer on the KV that a shadow-mode prompt would have
        had.

        Raises:
            ValueError: the blocks of the plan are no longer in the cache.
        """
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
        """Wait until the token budget allows a chunk and no request waits for its first token.

        After FLOOR_S it stops waiting for requests, so that scoring continues under constant load.
        """
        while True:
            now = self._clock()
            self._allowed = min(self._allowed + self._most / 60 * (now - self._counted), self._most)
            self._counted = now
            if self._allowed > 0 and (not self._engine_client.num_waiting or now >= self._floor):
                return
            await asyncio.sleep(POLL_S)

    def _charge(self, num_tokens: int) -> None:
        """Subtract computed tokens from the budget."""
        self._allowed -= num_tokens
        self._floor = self._clock() + FLOOR_S * min(1.0, num_tokens / CHUNK)
        self._metrics.tokens.inc(num_tokens)

    async def _answer(
        self, call: Call, params: dict[str, Any], prompt: list[int], answer: list[int]
    ) -> Any:
        """Run a request with a given answer, and return vLLM's output with log-probabilities."""
        given = {**params, KEY: {**params[KEY], "forced_output": answer}}
        return await self._send(
            call, given, prompt, max_tokens=len(answer), logprobs=NUM_LOGPROBS, ignore_eos=True
        )

    async def _send(
        self, call: Call, params: dict[str, Any], tokens: list[int], **sampling: Any
    ) -> Any:
        """Run a low-priority request and return vLLM's last output.

        Raises:
            ValueError: the request was aborted.
        """
        request_id = f"kvgraft-{SCORE}-{secrets.token_hex(8)}"
        output = await self._engine_client.run(call, params, tokens, request_id, **sampling)
        if output is None:
            raise ValueError("it was aborted")
        return output


def _outcome(scoring: asyncio.Task[None]) -> str:
    """Return the outcome of a finished scoring task, and log its error if it failed."""
    if scoring.cancelled():
        return "dropped"
    # any error ends this task only; the server continues
    if (error := scoring.exception()) is not None:
        logger.warning("an answer could not be scored: %s", error)
        return "failed"
    return "scored"
