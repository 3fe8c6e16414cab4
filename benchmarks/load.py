"""A client of any OpenAI endpoint that streams requests and takes the time of every token."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI, OpenAIError
from tokenizers import Tokenizer

from kvgraft_lab.testbed.vocabulary import VOCABULARY
from workload import Ask, Encode, needed_by, single_token_words, text_of

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes:
        start_s, first_s, end_s: `time.perf_counter` when it was sent, at its first token (None: no
            token), at its end.
        gaps_s: seconds between consecutive tokens (stream chunks with text).
        cached_tokens: as the endpoint counts them in its usage.
        report: what KVGraft says of the prompt, if the endpoint is one.
        error: the exception as text, or None.
    """

    kind: str
    start_s: float
    first_s: float | None
    end_s: float
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    report: Mapping[str, Any] | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token; infinite without one."""
        return float("inf") if self.first_s is None else self.first_s - self.start_s


class Client:
    """Sends requests to one endpoint.

    Args:
        url: base URL with /v1.
        model: name; None takes the first that the endpoint lists.
        chat: send conversations to /chat/completions instead of their text to /completions.
        extra: fields that the OpenAI API does not have, put into every request.
        headers: of every request.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "none",
        model: str | None = None,
        chat: bool = False,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.model, self.chat, self.extra = (
            url.rstrip("/"),
            model,
            chat,
            dict(extra or {}),
        )
        self._api = AsyncOpenAI(
            base_url=self.url,
            api_key=api_key,
            max_retries=0,
            timeout=REQUEST_TIMEOUT_S,
            default_headers=headers,
        )

    async def __aenter__(self) -> "Client":
        if self.model is None:
            self.model = (await self._api.models.list()).data[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def ask(
        self,
        ask: Ask,
        answers: Callable[[Ask], str] = lambda _: "",
        extra: Mapping[str, Any] | None = None,
        on_token: Callable[[float], object] = lambda _: None,
    ) -> Outcome:
        """Stream one request; see `send`."""
        if self.chat:
            messages = [
                {"role": m.role, "content": text_of(m.pieces, answers)} for m in ask.messages
            ]
            return await self.send(
                ask.kind, {"messages": messages}, ask.max_tokens, extra, on_token
            )
        prompt = text_of([piece for message in ask.messages for piece in message.pieces], answers)
        return await self.send(ask.kind, {"prompt": prompt}, ask.max_tokens, extra, on_token)

    async def send(
        self,
        kind: str,
        asked: Mapping[str, Any],
        max_tokens: int,
        extra: Mapping[str, Any] | None = None,
        on_token: Callable[[float], object] = lambda _: None,
    ) -> Outcome:
        """Stream one request, of `messages` to /chat/completions or of a `prompt` to /completions;
        an API error becomes an Outcome that names it. `on_token` gets the time of each token."""
        start = time.perf_counter()
        times: list[float] = []
        texts: list[str] = []
        last: Any = None
        error = None
        try:
            stream = await self._open(asked, max_tokens, {**self.extra, **(extra or {})})
            async with stream:
                async for chunk in stream:
                    if chunk.choices and not _announces(chunk.choices[0]):
                        times.append(time.perf_counter())
                        on_token(times[-1])
                        texts.append(_text(chunk.choices[0]))
                    last = chunk if chunk.usage else last
        except (OpenAIError, httpx.HTTPError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        end = time.perf_counter()
        gaps = tuple(b - a for a, b in pairwise(times))
        first = times[0] if times else None
        return Outcome(
            kind, start, first, end, gaps, *_usage(last), text="".join(texts), error=error
        )

    async def _open(self, asked: Mapping[str, Any], max_tokens: int, extra: dict[str, Any]) -> Any:
        common: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": extra,
        }
        completions: Any = (
            self._api.chat.completions if "messages" in asked else self._api.completions
        )
        return await completions.create(**asked, **common)


async def drive(
    client: Client,
    asks: Sequence[Ask],
    times: Sequence[float],
    concurrency: int,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Outcome]:
    """Send the untimed requests one by one, then the timed ones: each when its time has come, the
    answers that it holds are there, and fewer than `concurrency` are under way. Returns the
    outcomes of the timed ones, in order.

    Raises:
        RuntimeError: an untimed request failed.
    """
    finished: dict[Ask, asyncio.Future[Outcome]] = {}
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(concurrency)
    done = 0

    def answer(ask: Ask) -> str:
        return finished[ask].result().text

    async def send(ask: Ask) -> None:
        nonlocal done
        outcome = await client.ask(ask, answer)
        finished[ask].set_result(outcome)
        done += 1
        on_progress(done, len(asks))

    async def send_later(ask: Ask, at: float) -> None:
        await asyncio.sleep(at - loop.time())
        for other in needed_by(ask):
            await finished[other]
        async with slots:
            await send(ask)

    finished.update({ask: loop.create_future() for ask in asks})
    for ask in (ask for ask in asks if not ask.timed):
        await send(ask)
        if error := finished[ask].result().error:
            raise RuntimeError(f"reading the sources failed: {error}")
    timed = [ask for ask in asks if ask.timed]
    begin = loop.time()
    async with asyncio.TaskGroup() as group:
        for ask, at in zip(timed, times, strict=True):
            group.create_task(send_later(ask, begin + at))
    return [finished[ask].result() for ask in timed]


@dataclass(frozen=True)
class Spread:
    """Median, 95th and 99th percentile, linearly interpolated; NaN of nothing."""

    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of these values."""
        return (
            cls(*(float(q) for q in np.percentile(values, [50, 95, 99])))
            if len(values)
            else cls(*[float("nan")] * 3)
        )


@dataclass(frozen=True)
class Summary:
    """One run. Times in seconds, rates per second of the run, shares of all prompt tokens.

    Attributes:
        worst_gap_s: the longest pause in any answer: how long decoding stalled.
        grafted, recomputed: as KVGraft reports them; None from another endpoint.
        reasons: why prompts had nothing grafted, with their number.
    """

    requests: int
    errors: dict[str, int]
    seconds: float
    ttft_s: Spread
    gap_s: Spread
    worst_gap_s: float
    prompt_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    cached: float
    grafted: float | None
    recomputed: float | None
    reasons: dict[str, int]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Summary":
        """Of all requests; those with an error count as such and in nothing else."""
        good = [o for o in outcomes if o.error is None and o.first_s is not None]
        seconds = max((o.end_s for o in good), default=0.0) - min(
            (o.start_s for o in good), default=0.0
        )
        rate = 1 / seconds if seconds else float("nan")
        prompt = sum(o.prompt_tokens for o in good)
        reports = [o.report for o in good if o.report is not None]
        gaps = [gap for o in good for gap in o.gaps_s]
        share = 1 / prompt if prompt else float("nan")
        return cls(
            requests=len(outcomes),
            errors=dict(Counter(o.error or "no token" for o in outcomes if o not in good)),
            seconds=seconds,
            ttft_s=Spread.of([o.ttft_s for o in good]),
            gap_s=Spread.of(gaps),
            worst_gap_s=max(gaps, default=float("nan")),
            prompt_tokens=prompt,
            output_tokens_per_s=rate * sum(o.output_tokens for o in good),
            requests_per_s=rate * len(good),
            cached=share * sum(o.cached_tokens for o in good),
            grafted=share * sum(r["grafted_tokens"] for r in reports) if reports else None,
            recomputed=share * sum(r["recomputed_tokens"] for r in reports) if reports else None,
            reasons=dict(Counter(r["reason"] for r in reports if r.get("reason"))),
        )


def words_of(tokenizer: Path | None, url: str, model: str | None, api_key: str) -> tuple[str, ...]:
    """Words of one token each: of a model directory's tokenizer, or else by the endpoint's
    /tokenize (as vLLM has it).

    Raises:
        ValueError: too few such words.
        httpx.HTTPError: the endpoint has no /tokenize.
    """
    if tokenizer is not None:
        return single_token_words(*local_tokenizer(tokenizer))
    with httpx.Client(
        base_url=url.removesuffix("/v1"), headers={"Authorization": f"Bearer {api_key}"}
    ) as http:

        def encode(text: str) -> list[int]:
            body = {"prompt": text, "add_special_tokens": False} | (
                {"model": model} if model else {}
            )
            return http.post("/tokenize", json=body).raise_for_status().json()["tokens"]

        return single_token_words(encode, VOCABULARY)


def local_tokenizer(folder: Path) -> tuple[Encode, list[str]]:
    """(text -> token ids without special tokens, the words of the vocabulary) of a model
    directory."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # marks of a leading space
    words = [token.lstrip("\u0120\u2581") for token in tokenizer.get_vocab()]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode, words


def _announces(choice: Any) -> bool:
    """Whether it is the chunk of a chat answer that only names the role."""
    delta = getattr(choice, "delta", None)
    return (
        delta is not None
        and delta.role is not None
        and not delta.content
        and choice.finish_reason is None
    )


def _text(choice: Any) -> str:
    return (choice.text if hasattr(choice, "text") else choice.delta.content) or ""


def _usage(chunk: Any) -> tuple[int, int, int, Mapping[str, Any] | None]:
    """(prompt tokens, output tokens, cached tokens, report) of the chunk that carries the usage."""
    if chunk is None:
        return 0, 0, 0, None
    usage, extra = chunk.usage, (chunk.model_extra or {}).get("kv_transfer_params") or {}
    details = usage.prompt_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        (details and details.cached_tokens) or 0,
        extra.get("kvgraft"),
    )
