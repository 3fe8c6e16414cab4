"""Scores answers once more with exact KV: piece by piece, when nothing waits for its first token."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvgraft.guard.distances import along_told
from kvgraft.guard.guard import Ticket
from kvgraft.prefill.report import Outcome
from kvgraft.vllm.options import KEY, SCORE, TRIAL_OF, Control
from kvgraft.vllm.server.call import Call
from kvgraft.vllm.server.guard_metrics import GuardMetrics
from kvgraft.vllm.server.tenancy import LOCAL, Principal
from kvgraft.vllm.server.watching import TOLD, Told, Watched, told_of

logger = logging.getLogger("kvgraft")
PIECE = 512  # tokens that are computed at a time: who arrives waits for so many at most
POLL_S = 0.02  # between looks at whether anything waits
FLOOR_S = 10.0  # without a piece, after which one is computed whatever waits
MOST_WAITING = 64  # answers to be scored


class EngineGate(Protocol):
    """The way into the engine; see `GuardedEngineClient`."""

    num_waiting: int

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""

    async def run(
        self, call: Call, params: dict[str, Any], token_ids: list[int], request_id: str, **sampling: Any
    ) -> Any | None:
        """vLLM's last output of a request of ours."""


@dataclass(frozen=True)
class Sample:
    """An answer to be scored, and what its approximate KV has made of it.

    Attributes:
        tokens: of prompt and answer. `told`: of each token of the answer.
        salt: cache key of its namespace.
        depth: as the report says. `found`: where its distances are put.
        trial_of: of an exact answer, the request whose plan is to be tried: the other way round.
    """

    ticket: Ticket
    tenant: str
    salt: str
    tokens: list[int]
    told: list[Told]
    depth: int
    found: dict[str, float]
    trial_of: str | None = None

    @classmethod
    def of(cls, one: Watched, depth: int, *, would: bool = False) -> "Sample":
        """`would`: its answer is exact, and what it would have been is to be tried."""
        tokens, of = [*one.prompt, *one.answer], one.request_id if would else None
        return cls(one.ticket, one.tenant, one.salt or "", tokens, one.told, depth, one.found, of)

    @property
    def num_prompt(self) -> int:
        return len(self.tokens) - len(self.told)

    def pieces(self) -> Iterator[list[int]]:
        """Beginnings of the prompt that are computed before the answer is scored."""
        for stop in range(PIECE, self.num_prompt, PIECE):
            yield self.tokens[:stop]


class Scorer:
    """Scores one answer after another.

    Args:
        tokens_per_minute: that may be computed for that.
        report: told the distances of each answer that was scored.
    """

    def __init__(
        self,
        engine_client: EngineGate,
        tokens_per_minute: float,
        report: Callable[[Sample, Mapping[str, float]], None],
        metrics: GuardMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_client, self._report, self._metrics, self._clock = engine_client, report, metrics, clock
        self._rate, self._allowed = tokens_per_minute / 60, tokens_per_minute / 60
        self._counted = self._last = clock()
        self._queue: deque[Sample] = deque()
        self._queued = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, sample: Sample) -> None:
        """Score it when there is time."""
        if len(self._queue) >= MOST_WAITING:
            self._metrics.answers.labels("dropped").inc()
            return
        self._queue.append(sample)
        self._metrics.waiting.inc()
        self._queued.set()

    async def _run(self) -> None:
        await self._warm_up()
        while True:
            await self._queued.wait()
            sample = self._queue.popleft()
            if not self._queue:
                self._queued.clear()
            try:
                self._report(sample, await self._score(sample))
                self._metrics.answers.labels("scored").inc()
            except Exception as error:  # whatever it is, the server goes on
                logger.warning("an answer could not be scored: %s", error)
                self._metrics.answers.labels("failed").inc()
            self._metrics.waiting.dec()

    async def _warm_up(self) -> None:
        """vLLM compiles what tells log-probabilities when it is first asked for those of one place, two, and more:
        nobody is to wait for that later."""
        try:
            for count in (2, 3, 4):
                await self._send(secrets.token_hex(), Control(SCORE).as_params(), [0] * count, prompt_logprobs=TOLD)
        except Exception as error:  # likewise
            logger.warning("the guard could not be warmed up: %s", error)

    async def _score(self, sample: Sample) -> dict[str, float]:
        """Its distances from exact KV."""
        answer = sample.tokens[sample.num_prompt :]
        if sample.trial_of is not None:
            return along_told(await self._try(sample, answer), sample.told, answer)
        for piece in sample.pieces():
            await self._turn(PIECE)
            await self._operate(sample, piece, None)
        await self._turn(PIECE)
        exact = await self._operate(sample, sample.tokens, TOLD)
        return along_told(sample.told, exact, answer)

    async def _try(self, sample: Sample, answer: list[int]) -> list[Told]:
        """What is told of an answer on the KV that its prompt would have had."""
        prompt = sample.tokens[: sample.num_prompt]
        await self._turn(len(prompt))
        options = {"policy": sample.ticket.policy, "answer": answer}
        output = await self._send(
            sample.salt, {KEY: options, TRIAL_OF: sample.trial_of}, prompt,
            max_tokens=len(answer), logprobs=TOLD, ignore_eos=True,
        )  # fmt: skip
        if output.kv_transfer_params[KEY]["outcome"] != Outcome.GRAFTED:
            raise ValueError("what it would have grafted is gone")
        return [told_of(place) for place in output.outputs[0].logprobs]

    async def _turn(self, num_tokens: int) -> None:
        """Wait until nothing else waits, or the floor is reached; and until so many tokens may be computed."""
        while True:
            now = self._clock()
            self._allowed = min(self._allowed + self._rate * (now - self._counted), 60 * self._rate)
            self._counted = now
            is_due = not self._engine_client.num_waiting or now - self._last >= FLOOR_S
            if is_due and self._allowed >= min(num_tokens, 60 * self._rate):
                self._allowed -= num_tokens
                return
            await asyncio.sleep(POLL_S)

    async def _operate(self, sample: Sample, tokens: list[int], told: int | None) -> list[Told]:
        """Compute these tokens exactly in the sample's namespace; what is told of its answer, if anything is to be."""
        for from_cache in (True, False):
            output = await self._send(
                sample.salt,
                Control(SCORE).as_params(),
                tokens,
                prompt_logprobs=told,
                skip_reading_prefix_cache=not from_cache,
            )
            num_cached = output.num_cached_tokens or 0
            self._metrics.tokens.inc(len(tokens) - num_cached)
            if told is None:
                break
            if num_cached < sample.num_prompt:  # else the beginning of the answer was not computed
                return [told_of(place) for place in output.prompt_logprobs[-len(sample.told) :]]
        return []

    async def _send(self, salt: str, params: dict[str, Any], tokens: list[int], **sampling: Any) -> Any:
        """vLLM's last output of a request under this cache key, which gives way to all others."""
        call = Call(Principal(LOCAL, is_admin=True), "", salt, yields=True)
        output = await self._engine_client.run(
            call, params, tokens, f"kvgraft-{SCORE}-{secrets.token_hex(8)}", **sampling
        )
        self._last = self._clock()
        if output is None:
            raise ValueError("it was aborted")
        return output
