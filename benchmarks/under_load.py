"""Decoding under load (Vortex, section 6.4.2): time per output token while requests with long
prompts arrive at random.

A server decodes densely, another one under each flow, one after the other: the same prompts, which
share nothing, at the same times. Prompts are read by the same server, so gaps hold what other
prompts take; Vortex had another machine for them.

    python benchmarks/under_load.py [--rates 0.25,0.5,1] [--tokens 16384]
        [--flows "quest:topk_blocks=64"] [--json]
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import Server
from load import Client, Outcome, Summary, drive, local_tokenizer
from scenarios import make_random_model
from servers import THREADS, ServerOptions, start
from tables import configuration, markdown_table
from workload import Ask, Shape, arrivals, make_workload, single_token_words

DENSE = "dense"
NO_REUSE = ("--no-kvgraft", "--no-enable-prefix-caching")
MODEL_SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
ROOM = 128  # tokens of a context beyond prompt and answer
errors = Console(stderr=True)


@dataclass(frozen=True)
class LoadResult:
    """One side at one rate: milliseconds per output token of a request (its answer's mean), gaps
    between tokens, and throughput."""

    flow: str
    rate: float
    requests: int
    failed: int
    tpot_ms: tuple[float, float, float]
    gap_ms: tuple[float, float, float]
    output_tokens_per_s: float

    @classmethod
    def of(cls, flow: str, rate: float, outcomes: Sequence[Outcome]) -> "LoadResult":
        """Percentiles 50, 95 and 99."""
        summary = Summary.of(outcomes)
        own = [
            1e3 * float(np.mean(one.gaps_s)) for one in outcomes if one.error is None and one.gaps_s
        ]
        gaps = summary.gap_s
        tpot = (
            tuple(float(x) for x in np.percentile(own, [50, 95, 99]))
            if own
            else (float("nan"),) * 3
        )
        return cls(
            flow, rate, summary.requests, sum(summary.errors.values()), (tpot[0], tpot[1], tpot[2]),
            (1e3 * gaps.median, 1e3 * gaps.p95, 1e3 * gaps.p99), summary.output_tokens_per_s,
        )  # fmt: skip


async def _drive(
    server: Server, asks: Sequence[Ask], rate: float, seed: int, name: str
) -> list[Outcome]:
    times = arrivals(len(asks), rate, seed)
    async with Client(f"{server.url}/v1", extra={"ignore_eos": True}) as client:
        with progress_bar(errors, name) as on_progress:
            return await drive(client, asks, times, len(asks), on_progress)


def main(
    rates: Annotated[
        str, typer.Option(help="Poisson arrivals per second, by commas.")
    ] = "0.25,0.5,1",
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 16384,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    requests: Annotated[int, typer.Option(help="At each rate.")] = 32,
    flows: Annotated[
        str, typer.Option(help="By semicolons.")
    ] = "block_topk:topk_blocks=61;quest:topk_blocks=61",
    model: Annotated[
        Path | None, typer.Option(help="A directory.", show_default="random, Qwen3-0.6B's shape")
    ] = None,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of the servers.")] = "float32",
    kv_gib: Annotated[int, typer.Option(help="Memory of keys and values.")] = 4,
    threads: Annotated[int, typer.Option(help="CPU cores of the model.")] = THREADS,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Every side at every rate."""
    rows: list[LoadResult] = []
    longest = tokens + max_tokens + ROOM
    with TemporaryDirectory() as folder:
        if model is None:
            make_random_model(Path(folder), layers, longest, MODEL_SHAPE)
        settings = ServerOptions(
            model or Path(folder), dtype, longest, 0, threads, kv_gib, NO_REUSE
        )
        words = single_token_words(*local_tokenizer(settings.model))
        for flow in [DENSE, *flows.split(";")]:
            with start(settings, *([] if flow == DENSE else ["--flow", flow])) as server:
                for rate in map(float, rates.split(",")):
                    asks = make_workload(
                        "rag", Shape(tokens, 0.0, max_tokens), requests, words, f"{seed} {rate}"
                    )
                    outcomes = asyncio.run(_drive(server, asks, rate, seed, f"{flow} {rate}"))
                    rows.append(LoadResult.of(flow, rate, outcomes))
                    spread = ", ".join(f"{x:.1f}" for x in rows[-1].tpot_ms)
                    errors.print(f"{flow} at {rate:g}/s: P50, P95, P99 {spread} ms a token")
        told = configuration(settings, str(model or f"random, {layers} layers"))
    told |= {"prompt": tokens, "answer": max_tokens, "requests": requests, "seed": seed}
    if as_json:
        print(json.dumps({"configuration": told, "rows": [asdict(row) for row in rows]}))
        return
    console = Console()
    console.print(told)
    console.print(table_of(rows))


def table_of(rows: Sequence[LoadResult]) -> Any:
    """One line a side and rate, with how many times less P95 is than dense attention's."""
    table = markdown_table(
        (
            "",
            "rate",
            "TPOT P50, P95, P99 ms",
            "gap P50, P95, P99 ms",
            "tokens/s",
            "P95 less",
            "failed",
        )
    )
    dense = {row.rate: row.tpot_ms[1] for row in rows if row.flow == DENSE}
    for row in rows:
        spreads = [", ".join(f"{x:.1f}" for x in spread) for spread in (row.tpot_ms, row.gap_ms)]
        table.add_row(
            row.flow, f"{row.rate:g}", *spreads, f"{row.output_tokens_per_s:.1f}",
            f"{dense[row.rate] / row.tpot_ms[1]:.2f}x", str(row.failed),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
