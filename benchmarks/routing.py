"""What a fleet adds to a request: RAG traffic over HTTP, to servers that only take time
(`standin.py`).

Everything but the servers is what `kvgraft fleet` runs. Half a mean gap after each prompt comes to
the fleet it is sent straight to a server beside it, too: the difference, without what the servers
have waited, is what the fleet adds. It says something about a fleet only where the servers, Ray and
this client have cores of their own: some ten and one for each server.

    python benchmarks/routing.py [--replicas 2,8 --tokens 1100,8000 --rate 40 --requests 500]
        [--json]
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import ray
import typer
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from rich.console import Console

from fleet import AROUND, DOCUMENT, Traffic, make_traffic, routing_times
from kvgraft.cli.progress import progress_bar
from kvgraft.fleet.application import NAME, assemble, start_ray
from kvgraft.fleet.environment_check import EnvironmentCheck
from kvgraft.fleet.ingress import SHOWN_S
from kvgraft.fleet.options import FleetOptions
from kvgraft.server.keys import Keys
from kvgraft.server.process import HOST, reserved_port, running
from kvgraft_lab.testbed import MODEL_DIR
from load import Spread
from servers import ServerOptions
from tables import configuration, markdown_table

errors = Console(stderr=True)
STANDIN = (str(Path(__file__).with_name("standin.py")),)
POOL = 24_576  # tokens of each server
SETTLE_S = 3.0  # in which servers say for the first time what they are, and hold
OUTPUT = 4  # tokens
GOAL_MS = 2.0  # of routing, at P99


@dataclass(frozen=True)
class Part:
    """Milliseconds of a part of routing, interpolated in the buckets of its histogram."""

    mean: float
    p50: float
    p99: float
    p995: float


@dataclass(frozen=True)
class Row:
    """What a fleet has added to the counted requests.

    Attributes:
        routed: requests by what they were routed by.
        known: share of prompt tokens that the servers had read before.
        both_p99_ms: of fingerprints and ranking together at most: each takes its P99.5 or less in
            all but .5 %.
        fleet_ms, straight_ms: to the first byte, without what the server has waited.
        added_ms: the one minus the other, of each request; its mean too.
    """

    replicas: int
    tokens: int
    requests: int
    failed: int
    routed: dict[str, float]
    known: float
    routing_ms: dict[str, Part]
    both_mean_ms: float
    both_p99_ms: float
    fleet_ms: Spread
    straight_ms: Spread
    added_ms: Spread
    added_mean_ms: float


@dataclass(frozen=True)
class Sent:
    """Seconds to the first byte without what the server has waited, and how much of the prompt it
    knew."""

    first_s: float
    prompt_tokens: int
    known_tokens: int


def main(
    replicas: Annotated[str, typer.Option(help="Servers of each fleet, by commas.")] = "2,8",
    tokens: Annotated[
        str, typer.Option(help="Of a prompt, by commas: whole documents of 256.")
    ] = "1100,8000",
    rate: Annotated[float, typer.Option(help="Requests a second (Poisson).")] = 40.0,
    requests: Annotated[int, typer.Option(help="Counted ones.")] = 500,
    warm_up: Annotated[int, typer.Option(help="Requests before these.")] = 100,
    documents: Annotated[int, typer.Option(help="Of the corpus.")] = 320,
    speed: Annotated[float, typer.Option(help="Tokens a second that a server reads.")] = 200_000.0,
    ingresses: Annotated[int, typer.Option(help="Processes that take requests.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures there, too, as JSON.")] = None,
) -> None:
    """Measure fleets of stand-ins."""
    traffics = {
        length: make_traffic(
            MODEL_DIR,
            requests,
            warm_up,
            rate,
            documents,
            0.8,
            seed,
            max(1, round((length - 2 * AROUND) / DOCUMENT)),
        )
        for length in map(int, tokens.split(","))
    }
    settings = {
        "rate": rate,
        "warm_up": warm_up,
        "documents": documents,
        "speed": speed,
        "ingresses": ingresses,
    }
    machine = configuration(ServerOptions(MODEL_DIR), MODEL_DIR.name)
    figures: dict[str, Any] = {**settings, "seed": seed, "pool": POOL}
    figures["machine"] = {name: machine[name] for name in ("cores", "cpu")}
    arguments = ["--pool", str(POOL), "--speed"]
    rows: list[Row] = []
    with running([*arguments, "1e12"], {}, program=STANDIN) as beside:
        for number in map(int, replicas.split(",")):
            options = FleetOptions(
                arguments=[*arguments, str(speed)], replicas=number, ingresses=ingresses
            )
            with fleet(options) as url:
                time.sleep(SETTLE_S)
                for length, traffic in traffics.items():
                    with progress_bar(errors, f"{number} servers, {length} tokens") as on_progress:
                        rows.append(
                            asyncio.run(measure(url, beside.url, traffic, number, on_progress))
                        )
                    figures["rows"] = [asdict(row) for row in rows]
                    if out is not None:
                        out.write_text(json.dumps(figures, indent=2) + "\n")
    if as_json:
        print(json.dumps(figures))
    else:
        show(rows)


@contextmanager
def fleet(options: FleetOptions) -> Iterator[str]:
    """The URL of a fleet of stand-ins, and of nothing when it is left."""
    with reserved_port() as port:
        try:
            with errors.status(f"starting {options.replicas} servers"):
                start_ray(options, HOST, port)
                application = assemble(
                    options, Keys(), ["stand-in"], EnvironmentCheck.here([]), STANDIN
                )
                serve.run(application, name=NAME, route_prefix="/")
            yield f"http://{HOST}:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


async def measure(
    fleet: str,
    beside: str,
    traffic: Traffic,
    replicas: int,
    on_progress: Callable[[int, int], None],
) -> Row:
    """Send the traffic to the fleet and straight to the server beside it, and count what is no
    warm-up."""
    half_gap = traffic.times[-1] / len(traffic.times) / 2
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:

        async def both(chosen: slice, done: int) -> list[list[Sent | None]]:
            begin = asyncio.get_running_loop().time() - traffic.times[done]
            sent = []
            for url, later in ((fleet, 0.0), (beside, half_gap)):
                pairs = zip(traffic.prompts[chosen], traffic.times[chosen], strict=True)
                sent.append([ask(session, url, prompt, begin + at + later) for prompt, at in pairs])
            answers = [asyncio.gather(*each) for each in sent]
            found = [await each for each in answers]
            on_progress(done + len(found[0]), len(traffic.prompts))
            return found

        await both(slice(traffic.warm_up), 0)
        before = await samples(session, fleet)
        through, straight = await both(slice(traffic.warm_up, None), traffic.warm_up)
        after = await samples(session, fleet)
    return row_of(replicas, through, straight, counted_since(before, after))


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, at: float) -> Sent | None:
    """Send a prompt when its time has come; None if it failed."""
    body = json.dumps(
        {"model": "stand-in", "prompt": prompt, "max_tokens": OUTPUT, "stream": True}
    ).encode()
    await asyncio.sleep(at - asyncio.get_running_loop().time())
    begun = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", data=body) as answer:
            answer.raise_for_status()
            first = await answer.content.readline()
            seconds = time.perf_counter() - begun
            await answer.content.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"failed: {error!r}", file=sys.stderr)
        return None
    told = json.loads(first.removeprefix(b"data: "))
    return Sent(
        seconds - told["waited_s"], told["usage"]["prompt_tokens"], told["usage"]["known_tokens"]
    )


async def samples(session: aiohttp.ClientSession, url: str) -> list[Any]:
    """The metrics of a fleet as they are now: it shows the same for a while."""
    await asyncio.sleep(SHOWN_S)
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def counted_since(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Counters of a fleet, without what they were before."""
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in before}
    return [
        sample._replace(
            value=sample.value - values.get((sample.name, frozenset(sample.labels.items())), 0.0)
        )
        for sample in after
        if sample.name.startswith("kvgraft:fleet_")
    ]


def row_of(
    replicas: int,
    through: Sequence[Sent | None],
    straight: Sequence[Sent | None],
    found: Sequence[Any],
) -> Row:
    """Of requests to a fleet, and of the same ones sent straight."""
    pairs = [
        (a, b) for a, b in zip(through, straight, strict=True) if a is not None and b is not None
    ]
    added = [1000 * (a.first_s - b.first_s) for a, b in pairs]
    parts = {}
    for part in ("fingerprints", "ranking"):
        at = [routing_times(found, part, share) for share in (0.5, 0.99, 0.995)]
        [(mean, p50), (_, p99), (_, p995)] = [times or (float("nan"), float("nan")) for times in at]
        parts[part] = Part(mean, p50, p99, p995)
    routed: Counter[str] = Counter()
    for sample in found:
        if sample.name == "kvgraft:fleet_routed_total":
            routed[sample.labels["by"]] += sample.value
    return Row(
        replicas,
        round(sum(a.prompt_tokens for a, _ in pairs) / len(pairs)),
        len(pairs),
        len(through) - len(pairs),
        dict(routed),
        sum(a.known_tokens for a, _ in pairs) / sum(a.prompt_tokens for a, _ in pairs),
        parts,
        sum(part.mean for part in parts.values()),
        sum(part.p995 for part in parts.values()),
        Spread.of([1000 * a.first_s for a, _ in pairs]),
        Spread.of([1000 * b.first_s for _, b in pairs]),
        Spread.of(added),
        sum(added) / len(added),
    )


def show(rows: Sequence[Row]) -> None:
    """As tables."""
    heads = ("servers", "tokens", "requests", "failed", "by text", "known", "")
    routing = markdown_table([*heads, "mean", "P50", "P99 ms"], title="routing")
    added = markdown_table(
        [*heads[:3], "", "P50", "P95", "P99 ms"], title="to the first byte, servers' waits apart"
    )
    for row in rows:
        size = (str(row.replicas), str(row.tokens), str(row.requests))
        by_text = row.routed.get("text", 0.0) / max(sum(row.routed.values()), 1.0)
        first = (*size, str(row.failed), f"{by_text:.3f}", f"{row.known:.3f}")
        for name, part in row.routing_ms.items():
            routing.add_row(
                *first, name, *(f"{value:.2f}" for value in (part.mean, part.p50, part.p99))
            )
        verdict = "met" if row.both_p99_ms <= GOAL_MS else "not shown"
        routing.add_row(
            *first,
            "both",
            f"{row.both_mean_ms:.2f}",
            "",
            f"at most {row.both_p99_ms:.2f}: {verdict}",
        )
        named = {"fleet": row.fleet_ms, "straight": row.straight_ms, "added": row.added_ms}
        for name, spread in named.items():
            times = (spread.median, spread.p95, spread.p99)
            added.add_row(*size, name, *(f"{value:.2f}" for value in times))
    for table in (routing, added):
        Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    typer.run(main)
