"""What a fleet reuses, by how it sends requests to its servers: RAG traffic over HTTP.

Every kind of routing has the same traffic on the same two servers, started anew; and so has one
server with twice the pool, which is what two could reach at most, with a fleet's endpoint in front
of it and without. `engines` is one server with two engines (data parallelism) that chooses the
engine of each prompt, and `engines in turn` the same without that choice.

    python benchmarks/fleet.py [--requests 500 --rate 4] [--out results/fleet.json]
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import running
from kvgraft_lab.testbed import MODEL_DIR
from load import Client, Outcome, Spread, local_tokenizer
from servers import MEMORY, ServerOptions
from tables import configuration
from workload import arrivals, single_token_words

errors = Console(stderr=True)
BLOCK = 32  # tokens
TOPICS, ZIPF = 16, 0.8
# documents; tokens of one, and of what is new before and behind them
PER_PROMPT, DOCUMENT, AROUND = 4, 256, 16
ROUTINGS = ("segments", "prefixes", "load", "random", "segments+store", "load+store")
ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # of each server
ENVIRONMENT = {**MEMORY, **ONE_CORE, "VLLM_CPU_KVCACHE_SPACE": "1"}
STORE = "+store"  # servers that share a directory for what leaves their pools
ONE = "one server, twice the pool"
ALONE = f"{ONE}, no fleet"
ENGINES, IN_TURN = "engines", "engines in turn"


@dataclass(frozen=True)
class Traffic:
    """Prompts in the order in which they come; the first ones are not counted."""

    prompts: tuple[str, ...]
    times: tuple[float, ...]
    warm_up: int


@dataclass(frozen=True)
class Row:
    """What one way of routing has given.

    Attributes:
        reused: share of prompt tokens.
        imbalance: prompt tokens that the busier server has computed, over the mean.
        routing_ms: of fingerprints and ranking, mean and P99 (interpolated in its bucket).
    """

    routing: str
    requests: int
    failed: int
    reused: float
    prefix: float
    grafted: float
    ttft_ms: Spread
    imbalance: float
    routing_ms: dict[str, tuple[float, float]]


def main(
    requests: Annotated[int, typer.Option(help="Counted ones.")] = 500,
    warm_up: Annotated[int, typer.Option(help="Requests before these.")] = 150,
    rate: Annotated[
        float, typer.Option(help="Requests a second (Poisson); 0: one after the other.")
    ] = 4.0,
    documents: Annotated[int, typer.Option(help="Of the corpus, of 256 tokens each.")] = 320,
    pool: Annotated[int, typer.Option(help="Tokens of each server's pool.")] = 24_576,
    on_topic: Annotated[
        float, typer.Option(help="Share of a prompt's documents that are of one topic.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 100,
    routings: Annotated[str, typer.Option(help="By commas.")] = ",".join(ROUTINGS),
    model: Annotated[Path, typer.Option(help="Model directory.")] = MODEL_DIR,
    out: Annotated[Path | None, typer.Option(help="Write the figures there, as JSON.")] = None,
) -> None:
    """Compare ways of routing."""
    traffic = make_traffic(model, requests, warm_up, rate, documents, on_topic, seed)
    rows = [measure(traffic, model, routing, 1, 2 * pool) for routing in (ONE, ALONE)]
    rows += [measure(traffic, model, routing, 2, pool) for routing in routings.split(",")]
    columns = (
        "reused",
        "of one server's",
        "prefix",
        "grafted",
        "TTFT P50",
        "P95",
        "P99 ms",
        "imbalance",
        "failed",
    )
    table = Table("routing", *columns)
    for row in rows:
        ttft = [f"{value:.0f}" for value in (row.ttft_ms.median, row.ttft_ms.p95, row.ttft_ms.p99)]
        shares = [
            f"{share:.3f}"
            for share in (row.reused, row.reused / rows[0].reused, row.prefix, row.grafted)
        ]
        table.add_row(row.routing, *shares, *ttft, f"{row.imbalance:.2f}", str(row.failed))
    Console().print(table)
    for row in rows[2:]:
        said = ", ".join(
            f"{part} {mean:.2f} ms, P99 {p99:.2f}" for part, (mean, p99) in row.routing_ms.items()
        )
        Console().print(f"{row.routing}: {said or 'nothing is ranked'}")
    if out is not None:
        names = ("requests", "warm_up", "rate", "documents", "pool", "on_topic", "seed")
        setup = dict(
            zip(names, (requests, warm_up, rate, documents, pool, on_topic, seed), strict=True)
        )
        figures = {
            **setup,
            "machine": configuration(ServerOptions(model, threads=1), model.name),
            "rows": [asdict(row) for row in rows],
        }
        out.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def make_traffic(
    model: Path,
    requests: int,
    warm_up: int,
    rate: float,
    documents: int,
    on_topic: float,
    seed: int,
    per_prompt: int = PER_PROMPT,
) -> Traffic:
    """Prompts of documents that are asked for as Zipf has it, most of them of one topic, in any
    order."""
    rng = Random(f"fleet {seed}")
    words = single_token_words(*local_tokenizer(model))
    corpus = [" ".join(rng.choices(words, k=DOCUMENT)) for _ in range(documents)]
    weights = [(number + 1) ** -ZIPF for number in range(documents)]
    prompts = []
    for _ in range(warm_up + requests):
        topic = rng.choices(range(documents), weights)[0] % TOPICS
        chosen: list[int] = []
        while len(chosen) < per_prompt:
            [drawn] = rng.choices(range(documents), weights)
            if rng.random() < on_topic:
                drawn = min(drawn - drawn % TOPICS + topic, documents - 1)
            chosen += [drawn] * (drawn not in chosen)
        around = [" ".join(rng.choices(words, k=AROUND)) for _ in range(2)]
        prompts.append(" ".join([around[0], *(corpus[number] for number in chosen), around[1]]))
    times = arrivals(len(prompts), rate, seed) if rate else [0.0] * len(prompts)
    return Traffic(tuple(prompts), tuple(times), warm_up)


def measure(traffic: Traffic, model: Path, routing: str, replicas: int, pool: int) -> Row:
    """Start a fleet, send it the traffic, and end it."""
    arguments = [str(model), "--num-gpu-blocks-override", str(pool // BLOCK + 1)]
    arguments += ["--dtype", "float32", "--max-model-len", "4096"]
    is_fleet = routing not in (ALONE, ENGINES, IN_TURN)
    if routing in (ENGINES, IN_TURN):
        arguments += ["--data-parallel-size", str(replicas)]
    elif is_fleet:
        kind = "load" if routing == ONE else routing.removesuffix(STORE)
        arguments += ["--replicas", str(replicas), "--routing", kind]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        arguments += ["--kvgraft-store-dir", f"{folder}/store"] if routing.endswith(STORE) else []
        with (
            errors.status(f"starting: {routing}") as status,
            running(
                arguments,
                ENVIRONMENT,
                log,
                command="fleet" if is_fleet else "serve",
                start_timeout_s=600,
            ) as server,
        ):
            status.stop()
            with progress_bar(errors, routing) as on_progress:
                engines = range(replicas) if routing == IN_TURN else ()
                outcomes = asyncio.run(send(server.api, traffic, on_progress, engines))
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    return row_of(routing, outcomes[traffic.warm_up :], metrics)


async def send(
    url: str, traffic: Traffic, on_progress: Any, engines: Sequence[int] = ()
) -> list[Outcome]:
    """Each prompt when its time has come, to these engines in turn; without any the server
    chooses."""
    loop, done = asyncio.get_running_loop(), 0
    turns = asyncio.Semaphore(len(traffic.prompts) if any(traffic.times) else 1)
    headers = [{"X-data-parallel-rank": str(engine)} for engine in engines] or [{}]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(url, headers=own)) for own in headers]
        begin = loop.time()

        async def at(time: float, prompt: str, client: Client) -> Outcome:
            nonlocal done
            await asyncio.sleep(begin + time - loop.time())
            async with turns:
                outcome = await client.send("rag", {"prompt": prompt}, 4)
            done += 1
            on_progress(done, len(traffic.prompts))
            return outcome

        sent = map(at, traffic.times, traffic.prompts, cycle(clients))
        return list(await asyncio.gather(*sent))


def row_of(routing: str, outcomes: Sequence[Outcome], metrics: str) -> Row:
    """What has become of the counted requests; what metrics say is of all."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    total = sum(outcome.prompt_tokens for outcome in good)
    tokens = {
        kind: sum((outcome.report or {}).get(f"{kind}_tokens", 0) for outcome in good)
        for kind in ("prefix", "continued", "grafted")
    }
    found = [
        sample for family in text_string_to_metric_families(metrics) for sample in family.samples
    ]
    computed: dict[str, float] = {}
    for sample in found:
        if sample.name == "kvgraft:tokens_total" and sample.labels["kind"] in (
            "fresh",
            "recomputed",
        ):
            server = sample.labels.get("replica", "") + sample.labels["engine"]
            computed[server] = computed.get(server, 0.0) + sample.value
    routing_ms = {
        part: times for part in ("fingerprints", "ranking") if (times := routing_times(found, part))
    }
    return Row(
        routing,
        len(good),
        len(outcomes) - len(good),
        sum(tokens.values()) / total,
        tokens["prefix"] / total,
        tokens["grafted"] / total,
        Spread.of([1000 * outcome.ttft_s for outcome in good]),
        max(computed.values()) * len(computed) / sum(computed.values()),
        routing_ms,
    )


def routing_times(
    found: Sequence[Any], part: str, share: float = 0.99
) -> tuple[float, float] | None:
    """Mean and P99 (or this share) of a histogram in milliseconds; None if there was nothing."""
    name = "kvgraft:fleet_routing_seconds"
    mine = [
        sample
        for sample in found
        if sample.name.startswith(name) and sample.labels.get("part") == part
    ]
    [count, total] = [
        sum(s.value for s in mine if s.name == f"{name}_{kind}") for kind in ("count", "sum")
    ]
    if not count:
        return None
    low, below = 0.0, 0.0
    for sample in mine:
        if sample.name == f"{name}_bucket":
            high = float(sample.labels["le"])
            if sample.value >= share * count:
                within = (share * count - below) / (sample.value - below)
                return 1000 * total / count, 1000 * (low + (high - low) * within)
            low, below = high, sample.value
    return None


if __name__ == "__main__":
    typer.run(main)
