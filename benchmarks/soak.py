"""A server under mixed load for a long time, with a pool so small that content is evicted and
requests are preempted.

Afterwards its invariants must hold: plain requests are answered as by the fresh server, every
answer adds up, nothing runs, no block is lost, and memory does not grow. Exit code 1 if one does
not.

    python benchmarks/soak.py --minutes 20 [--json]
"""

import asyncio
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import Server
from kvgraft.server.tenancy import Tenant
from kvgraft_lab.testbed import MODEL_DIR
from load import local_tokenizer
from servers import ServerOptions, start
from soak_traffic import TIMEOUT_S, Traffic, bearer
from workload import single_token_words

MODEL = "bundled"
MAX_MODEL_LEN = 2048
TENANTS = 3
SAMPLE_S = 10.0
IDLE_TIMEOUT_S = 120.0
GUARD = ("--kvgraft-guard", "0.05", "--kvgraft-guard-tokens", "1000000")
FIXED = 12  # plain requests whose answers are watched
MIN_SAMPLES = 6  # to speak of growth
MIB = 1 << 20
API_SERVER, ENGINE, WORKER = "API server", "engine core", "worker"
# what the titles of vLLM's processes contain
ROLES = {"VLLM::EngineCore": ENGINE, "VLLM::Worker": WORKER}
# plain vLLM grows, too: oneDNN keeps what it compiled for each of the last 1024 matrix shapes, here
# of the last 16
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
VLLM_METRICS = (
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_success_total",
)
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
errors = Console(stderr=True)


@dataclass
class Result:
    """What happened.

    Attributes:
        rss_mib: for each process of the server, (minutes since the load began, MiB).
        growth: for each process, MiB per minute in the second half and its standard error. Empty if
            there are too few samples.
        broken: invariants that did not hold, with how often; empty is good.
    """

    minutes: float
    done: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rss_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    growth: dict[str, tuple[float, float]] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)


def main(
    minutes: Annotated[float, typer.Option(help="How long the load lasts.")] = 20.0,
    workers: Annotated[int, typer.Option(help="Requests under way at once.")] = 12,
    blocks: Annotated[int, typer.Option(help="Of the pool, 32 tokens each.")] = 160,
    max_requests: Annotated[int, typer.Option(help="Sent at most.")] = 100_000,
    max_growth: Annotated[
        float,
        typer.Option(
            help="Greatest growth of the API server and of the engine core, MiB per minute, by two "
            "standard errors."
        ),
    ] = 0.5,
    max_worker_growth: Annotated[
        float,
        typer.Option(
            help="The same for the worker. Its allocator keeps freed memory, so it grows until the "
            "largest batches have come."
        ),
    ] = 2.5,
    seed: Annotated[int, typer.Option(help="Of all requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Load a server of its own with everything at once, then check what must hold."""
    keys, admin_key = [secrets.token_hex(16) for _ in range(TENANTS)], secrets.token_hex(16)
    flags = (
        "--served-model-name",
        MODEL,
        "--num-gpu-blocks-override",
        str(blocks),
        "--max-num-seqs",
        "16",
        *GUARD,
    )
    options = ServerOptions(
        MODEL_DIR, max_model_len=MAX_MODEL_LEN, flags=(*flags, "--api-key", *keys)
    )
    words = single_token_words(*local_tokenizer(MODEL_DIR))

    async def run(server: Server) -> Result:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=TIMEOUT_S, limits=httpx.Limits()
        ) as http:
            traffic = Traffic(http, MODEL, keys, admin_key, words, MAX_MODEL_LEN, seed)
            bounds = {API_SERVER: max_growth, ENGINE: max_growth, WORKER: max_worker_growth}
            return await soak(server, traffic, minutes, workers, max_requests, bounds)

    with start(options, environment=ENVIRONMENT | {"KVGRAFT_ADMIN_KEY": admin_key}) as server:
        result = asyncio.run(run(server))
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        Console().print(table_of(result))
    raise typer.Exit(bool(result.broken))


async def soak(
    server: Server,
    traffic: Traffic,
    minutes: float,
    workers: int,
    max_requests: int,
    max_growth: Mapping[str, float],
) -> Result:
    """Load, settle, check. `max_growth` is for each process, MiB per minute."""
    findings, stop, result = traffic.findings, asyncio.Event(), Result(minutes)
    await traffic.choose_fixed(FIXED)
    fresh = await pool_of(traffic)
    total = fresh["used"] + fresh["free"]
    load = asyncio.create_task(traffic.run(workers, stop, max_requests))
    result.rss_mib = await watch(server, load, minutes)
    stop.set()
    await load
    if server.process.poll() is not None:
        findings.broken[f"the server ended with {server.process.returncode}"] += 1
    else:
        result.pool = await settle(traffic, total)
        await traffic.check_all_fixed(Random(0))
        result.metrics = await metrics_of(traffic)
    result.growth = growth(result.rss_mib)
    for name, (slope, error) in result.growth.items():
        findings.expect(
            slope - 2 * error <= max_growth[name],
            f"memory of the {name} grows by {slope:.2f} +- {error:.2f} MiB per minute",
        )
    exercised = {
        "grafts": findings.done["grafted tokens"],
        "aborts before the first token": findings.done["left before the first token"],
        "preemption": result.metrics.get("vllm:num_preemptions_total", 0),
        "scored answers": result.metrics.get("kvgraft:guard_answers_total[scored]", 0),
    }
    for what, amount in exercised.items():
        findings.expect(amount > 0, f"the load led to no {what}, so it proves nothing")
    result.done, result.broken = dict(sorted(findings.done.items())), dict(findings.broken)
    return result


async def watch(
    server: Server, load: asyncio.Task[None], minutes: float
) -> dict[str, list[tuple[float, float]]]:
    """Sample memory until the time is over, the load is used up or the server is gone."""
    samples: dict[str, list[tuple[float, float]]] = {}
    begin = time.monotonic()
    with progress_bar(errors, "soaking") as on_progress:
        while (
            passed := (time.monotonic() - begin) / 60
        ) < minutes and server.process.poll() is None:
            for name, mib in rss_mib(server.process.pid).items():
                samples.setdefault(name, []).append((passed, mib))
            on_progress(int(60 * passed), int(60 * minutes))
            done, _ = await asyncio.wait([load], timeout=min(SAMPLE_S, 60 * (minutes - passed)))
            if done:
                break
    return samples


async def settle(traffic: Traffic, total: int) -> dict[str, int]:
    """Wait until nothing runs and pin a document; then only pinned blocks may be in use, and none
    when all segments are deleted.

    Returns:
        The pool before the deletion, in blocks.
    """
    findings = traffic.findings
    idle = await until(lambda: _is_idle(traffic))
    findings.expect(idle, f"requests still run {IDLE_TIMEOUT_S:.0f} s after the load")
    await traffic.pin(Random(1))
    await until(lambda: _uses_only_pins(traffic))
    before = await pool_of(traffic)
    findings.expect(
        before["used"] == before["pinned"] > 0, f"idle, with a pinned document, but {before}"
    )
    findings.expect(
        before["used"] + before["free"] == total, f"the pool had {total} blocks, and now {before}"
    )
    for key in traffic.keys:
        for segment in await segments_of(traffic, key):
            findings.expect(
                await traffic.delete_segment(key, segment["name"]) == 200,
                "a segment cannot be deleted",
            )
    await until(lambda: _uses_only_pins(traffic))
    after = await pool_of(traffic)
    findings.expect(
        after == {"used": 0, "free": total, "pinned": 0}, f"without segments, but {after}"
    )
    return before


async def until(holds: Callable[[], Awaitable[bool]]) -> bool:
    """Poll until it holds, for at most IDLE_TIMEOUT_S; returns whether it does."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while not (held := await holds()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return held


async def pool_of(traffic: Traffic) -> dict[str, int]:
    """Blocks by state: used, free, pinned."""
    for key in traffic.keys:
        await segments_of(traffic, key)  # a step of the engine, which brings the figures up to date
    answer = await traffic.http.get("/v1/kvgraft/status", headers=bearer(traffic.admin_key))
    pool = answer.raise_for_status().json()["pool"]
    return {state: int(pool[state]) for state in ("used", "free", "pinned")}


async def segments_of(traffic: Traffic, key: str) -> list[dict[str, Any]]:
    """The pinned documents of a tenant."""
    headers, params = bearer(traffic.admin_key), {"tenant": Tenant.of(key).label}
    answer = await traffic.http.get("/v1/kvgraft/pins", params=params, headers=headers)
    return answer.raise_for_status().json()["pins"]


async def metrics_of(traffic: Traffic) -> dict[str, float]:
    """Counters and gauges of KVGraft, and those of vLLM that matter here, by name and own label."""
    text = (await traffic.http.get("/metrics")).raise_for_status().text
    found: dict[str, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(text):
        if name in VLLM_METRICS or (
            name.startswith("kvgraft:") and not name.endswith(("_bucket", "_created"))
        ):
            own = re.findall(r'(?:state|kind|outcome|reason|stage)="([^"]*)"', labels)
            found["".join([name, *(f"[{said}]" for said in own)])] += float(value)
    return dict(found)


def rss_mib(pid: int) -> dict[str, float]:
    """Return the resident memory of a server's processes: API server, engine core, worker."""
    found: dict[str, float] = defaultdict(float)
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        for each in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(each.cmdline())
                name = next((role for mark, role in ROLES.items() if mark in title), API_SERVER)
                found[name] += each.memory_info().rss / MIB
    return found


def growth(
    samples: Mapping[str, Sequence[tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Return the slope of a line through the second half of (minutes, MiB) and its standard error,
    for each process with enough samples."""
    found = {}
    for name, points in samples.items():
        later = [point for point in points if point[0] >= points[-1][0] / 2]
        if len(later) >= MIN_SAMPLES:
            minutes, mib = np.asarray(later).T
            line, covariance = np.polyfit(minutes, mib, 1, cov=True)
            found[name] = float(line[0]), float(covariance[0, 0] ** 0.5)
    return found


def table_of(result: Result) -> Table:
    """What was done, what the server counted, what broke."""
    table = Table("", "", title=f"soak of {result.minutes:g} minutes", box=box.MARKDOWN)
    for name, count in {**result.done, **result.metrics}.items():
        table.add_row(escape(name), f"{count:.10g}")
    for name, points in result.rss_mib.items():
        table.add_row(f"{name}, MiB at first", f"{points[0][1]:.0f}")
        table.add_row(f"{name}, MiB at last", f"{points[-1][1]:.0f}")
    for name, (slope, error) in result.growth.items():
        table.add_row(f"{name}, MiB per minute", f"{slope:.2f} +- {error:.2f}")
    table.add_row("pool when idle", str(result.pool))
    for what, count in result.broken.items() or {"nothing": 0}.items():
        table.add_row("broken", f"{count} x {what}" if count else what)
    return table


async def _is_idle(traffic: Traffic) -> bool:
    metrics = await metrics_of(traffic)
    waiting = metrics["vllm:num_requests_waiting"] + metrics["kvgraft:guard_waiting"]
    return metrics["vllm:num_requests_running"] == waiting == 0


async def _uses_only_pins(traffic: Traffic) -> bool:
    pool = await pool_of(traffic)
    return pool["used"] == pool["pinned"]


if __name__ == "__main__":
    typer.run(main)
