"""Plain vLLM and ours answer the same requests in turn: the ratios that KVGraft promises, and those
of any workload."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvgraft.server.process import Server
from kvgraft_lab.evaluate.statistics import bootstrap
from load import Client, Outcome, Summary, drive
from workload import Ask, Shape, arrivals, make_workload

OnProgress = Callable[[int, int], object]
# vLLM's workers spin for a second after their last step, on the cores that the other server needs
SETTLE_S = 1.5
GPU_SETTLE_S = 0.3  # where there are cores for both
STALL_WARM_UP_TOKENS = 5  # of every stream, before the first prompt is sent


@dataclass(frozen=True)
class Scenario:
    """Prompts of one shape under one policy, and what the ratio must reach.

    Attributes:
        kvgraft: options of the requests to our server; None leaves the server's default policy.
        rounds: measured, after one that warms up.
        target: the ratio named by `ratio` is at most (or at least) this.
    """

    name: str
    shape: Shape
    kvgraft: Mapping[str, Any] | None
    rounds: int
    ratio: str
    target: float
    at_most: bool
    streams: int = 0
    prompts: int = 1

    @property
    def max_model_len(self) -> int:
        """Room for a prompt and its answer, or for a stream that lasts as long as the prompts
        need."""
        return self.shape.tokens + 1024


SPARSEX_10 = {"policy": "sparsex", "boundary_layers": 1, "recompute_share": 0.10}
SPARSEX_05 = {"policy": "sparsex", "boundary_layers": 1, "recompute_share": 0.05}
SOONER, PAUSE = "TTFT plain / ours", "worst gap ours / plain"
PROMISED = {
    scenario.name: scenario
    for scenario in (
        Scenario("nothing", Shape(1024, 0.0, 1), None, 24, "TTFT ours / plain", 1.02, at_most=True),
        Scenario("4k90", Shape(4096, 0.90, 1), None, 7, SOONER, 2.7, at_most=False),
        Scenario("8k98", Shape(8192, 0.98, 1), None, 5, SOONER, 5.0, at_most=False),
        Scenario(
            "interleaved",
            Shape(4096, 0.50, 1, interleaved=True),
            None,
            7,
            SOONER,
            1.0,
            at_most=False,
        ),
        Scenario("stall", Shape(4096, 0.90, 1), None, 5, PAUSE, 1.3, True, streams=4, prompts=3),
        Scenario("sparsex-4k90", Shape(4096, 0.90, 1), SPARSEX_10, 7, SOONER, 2.7, at_most=False),
        Scenario("sparsex-8k98", Shape(8192, 0.98, 1), SPARSEX_05, 5, SOONER, 6.0, at_most=False),
    )
}


GRID = {  # without a promise: a length in thousands of tokens, and the share known, %
    name: Scenario(
        name, Shape(thousands * 1024, share / 100, 1), None, 5, SOONER, 1.0, at_most=False
    )
    for thousands in (8, 32)
    for share in (0, 50, 75, 90, 98)
    for name in [f"{thousands}k-{share}"]
}
STREAMS = {  # what running requests notice while others' prompts are read
    name: Scenario(
        name,
        Shape(thousands * 1024, share / 100, 1),
        None,
        5,
        PAUSE,
        1.3,
        True,
        streams=8,
        prompts=2,
    )
    for thousands in (8, 32)
    for share in (50, 90)
    for name in [f"streams-{thousands}k-{share}"]
}
SCENARIOS = PROMISED | GRID | STREAMS


FAMILIES: dict[str, dict[str, Any]] = {  # what random models have beside the shape of ttft.py
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {"sliding_window": 512},
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """The result of one scenario.

    Attributes:
        value: median over rounds of the paired ratio; `low` and `high` bound it (bootstrap, 95 %).
        plain_s, ours_s: seconds of every round.
        plain_cached, ours_grafted, ours_recomputed: shares of the prompt tokens.
        reasons: why prompts had nothing grafted, with their number.
        plain_pauses_s, ours_pauses_s: percentiles 50, 95 and 99 of the pauses of streams while
            prompts are read, of all rounds; empty without streams.
    """

    name: str
    ratio: str
    value: float
    low: float
    high: float
    target: float
    at_most: bool
    plain_s: list[float]
    ours_s: list[float]
    plain_cached: float
    ours_grafted: float
    ours_recomputed: float
    reasons: dict[str, int] = field(default_factory=dict)
    plain_pauses_s: tuple[float, ...] = ()
    ours_pauses_s: tuple[float, ...] = ()

    @property
    def met(self) -> bool:
        """Whether the median reaches the target."""
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True)
class Round:
    """What one server did in one round: the seconds that the scenario is about, the outcomes of the
    prompts, the pauses of streams meanwhile."""

    seconds: float
    outcomes: list[Outcome]
    pauses: Sequence[float] = ()


@dataclass(frozen=True)
class Pair:
    """Clients of both servers."""

    plain: Client
    ours: Client

    def in_turn(self, number: int) -> tuple[Client, Client]:
        """Both, ours first in every other round."""
        return (self.plain, self.ours) if number % 2 == 0 else (self.ours, self.plain)

    @classmethod
    @asynccontextmanager
    async def of(
        cls, plain: Server, ours: Server, kvgraft: Mapping[str, Any] | None
    ) -> AsyncIterator["Pair"]:
        """Clients whose answers all have their full length; `kvgraft` are the options of the
        requests to ours."""
        exact = {"ignore_eos": True}
        options = {"kv_transfer_params": {"kvgraft": dict(kvgraft)}} if kvgraft else {}
        async with (
            Client(plain.api, extra=exact) as one,
            Client(ours.api, extra=exact | options) as two,
        ):
            yield cls(one, two)


async def run_scenario(
    scenario: Scenario,
    pair: Pair,
    words: Sequence[str],
    seed: int,
    on_progress: OnProgress,
    settle_s: float = SETTLE_S,
) -> Figure:
    """All rounds of a scenario; the documents are read once by both servers, every prompt is new to
    both.

    Args:
        settle_s: seconds without a request before each server's turn.

    Raises:
        RuntimeError: a request failed.
    """
    count = (scenario.rounds + 1) * scenario.prompts
    asks = make_workload("rag", scenario.shape, count, words, f"{scenario.name} {seed}")
    for ask in (ask for ask in asks if not ask.timed):
        for client in (pair.plain, pair.ours):
            checked(await client.ask(ask))
    prompts = [ask for ask in asks if ask.timed]
    rounds: dict[Client, list[Round]] = {pair.plain: [], pair.ours: []}
    for number in range(scenario.rounds + 1):
        batch = prompts[number * scenario.prompts : (number + 1) * scenario.prompts]
        for client in pair.in_turn(number):
            await asyncio.sleep(settle_s)
            done = await _one_round(client, scenario, batch, words, seed + number)
            if number:
                rounds[client].append(done)
        on_progress(number + 1, scenario.rounds + 1)
    return _figure(scenario, rounds[pair.plain], rounds[pair.ours])


async def _one_round(
    client: Client, scenario: Scenario, batch: Sequence[Ask], words: Sequence[str], seed: int
) -> Round:
    if scenario.streams:
        streams = make_workload(
            "rag", Shape(32, 0.0, scenario.max_model_len - 64), scenario.streams, words, seed
        )
        pauses, outcomes = await pauses_of_streams(client, streams, batch)
        return Round(max(pauses, default=0.0), outcomes, pauses)
    outcome = checked(await client.ask(batch[0]))
    return Round(outcome.ttft_s, [outcome])


async def pauses_of_streams(
    client: Client, streams: Sequence[Ask], prompts: Sequence[Ask]
) -> tuple[list[float], list[Outcome]]:
    """(all pauses in s between tokens of the streams while the prompts are read, the outcomes of
    the prompts).

    All prompts arrive at once when every stream is decoding. A stream that is over before they are
    read starts again; all are cancelled then.

    Raises:
        RuntimeError: a request failed.
    """
    # of each stream, each time it runs, each token
    times: list[list[list[float]]] = [[] for _ in streams]
    decoding = [asyncio.Event() for _ in streams]

    async def decode(number: int, ask: Ask) -> None:
        def on_token(at: float) -> None:
            times[number][-1].append(at)
            if sum(map(len, times[number])) >= STALL_WARM_UP_TOKENS:
                decoding[number].set()

        try:
            while True:
                times[number].append([])
                checked(await client.ask(ask, on_token=on_token))
        finally:
            decoding[number].set()  # nobody waits for a stream that failed

    tasks = [asyncio.create_task(decode(number, ask)) for number, ask in enumerate(streams)]
    try:
        await asyncio.gather(*(event.wait() for event in decoding))
        outcomes = [checked(outcome) for outcome in await asyncio.gather(*map(client.ask, prompts))]
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in (e for e in ends if isinstance(e, Exception)):
        raise failure
    begin, end = min(o.start_s for o in outcomes), max(o.start_s + o.ttft_s for o in outcomes)
    for runs in times:
        runs[-1].append(max([*runs[-1], end]))  # a pause that lasts to the end counts
    return [
        pause for runs in times for run in runs for pause in pauses_within(run, begin, end)
    ], outcomes


def pauses_within(times: Sequence[float], begin: float, end: float) -> list[float]:
    """The times between neighbours of `times` that overlap [begin, end]."""
    return [b - a for a, b in pairwise(times) if b > begin and a < end]


async def compare_workloads(
    pair: Pair,
    kind: str,
    shape: Shape,
    words: Sequence[str],
    *,
    count: int,
    rate: float,
    concurrency: int,
    rounds: int,
    seed: int,
    on_progress: OnProgress,
) -> list[tuple[Summary, Summary]]:
    """(plain, ours) of every round; each round has requests of its own, the same for both."""
    results = []
    for number in range(rounds):
        asks = make_workload(kind, shape, count, words, seed + number)
        times = arrivals(count, rate, seed + number)
        summaries = {
            c: Summary.of(await drive(c, asks, times, concurrency)) for c in pair.in_turn(number)
        }
        results.append((summaries[pair.plain], summaries[pair.ours]))
        on_progress(number + 1, rounds)
    return results


def checked(outcome: Outcome) -> Outcome:
    """The outcome of a request that was answered.

    Raises:
        RuntimeError: it was not.
    """
    if outcome.error or outcome.first_s is None:
        raise RuntimeError(f"a request failed: {outcome.error or 'no token'}")
    return outcome


def make_random_model(
    folder: Path,
    layers: int,
    max_position: int,
    shape: Mapping[str, Any] | None = None,
    family: str = "qwen3",
    *,
    weights: bool = True,
) -> None:
    """Write the random model of ttft.py, with a tokenizer that splits at spaces: w17 is one token.

    Args:
        weights: whether to write any; vLLM makes them up with `--load-format dummy`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from ttft import SHAPE, make_model, model_config

    if weights:
        make_model(folder, layers, max_position, shape or SHAPE, family)
    else:
        model_config(layers, max_position, shape or SHAPE, family).save_pretrained(folder)
    # vLLM refuses text by the length of the longest
    words = {"<unknown>": 0} | {f"w{i}": i for i in range(1, 4096)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _figure(scenario: Scenario, plain: Sequence[Round], ours: Sequence[Round]) -> Figure:
    times, own_times = ([one.seconds for one in rounds] for rounds in (plain, ours))
    ratios = [b / a if scenario.at_most else a / b for a, b in zip(times, own_times, strict=True)]
    theirs, own = (
        Summary.of([outcome for one in rounds for outcome in one.outcomes])
        for rounds in (plain, ours)
    )
    return Figure(
        scenario.name, scenario.ratio, statistics.median(ratios), *bootstrap(ratios, of=np.median),
        scenario.target, scenario.at_most,
        times, own_times, theirs.cached, own.grafted or 0.0, own.recomputed or 0.0, own.reasons,
        _percentiles(plain), _percentiles(ours),
    )  # fmt: skip


def _percentiles(rounds: Sequence[Round]) -> tuple[float, ...]:
    pauses = [pause for one in rounds for pause in one.pauses]
    return tuple(np.percentile(pauses, [50, 95, 99]).tolist()) if pauses else ()
