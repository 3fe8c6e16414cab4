"""Stock vLLM and vLLM with per-head KV eviction (`--kvgraft-head-paging`): time to first token and
time between tokens of prompts that nobody has read.

Two servers answer the same prompts in turn. A random model, of which a given share of the KV heads
sees everything and the others 64 sinks and a window of 256 tokens.

    python benchmarks/head_paging.py [--contexts 8192,32768] [--share 0.25] [--json]
"""

import asyncio
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft.engine.config import load_config
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.server.process import Server
from kvgraft_lab.evaluate.statistics import bootstrap
from load import Client, local_tokenizer
from scenarios import SETTLE_S, Pair, checked, make_random_model
from servers import ServerOptions, start
from tables import configuration, line_of_settings, markdown_table
from workload import Shape, make_workload, single_token_words

SINKS, WINDOW = 64, 256
errors = Console(stderr=True)


@dataclass(frozen=True)
class PagingFigure:
    """One measure at one context length.

    Attributes:
        plain_ms, ours_ms: medians over rounds.
        gain: median over rounds of plain / ours; `low` and `high` bound it (bootstrap, 95 %).
    """

    what: str
    context: int
    plain_ms: float
    ours_ms: float
    gain: float
    low: float
    high: float


def make_map(model: Path, share: float) -> HeadMap:
    """Return a map in which `share` of each layer's KV heads, at least one, sees everything; other
    ones in each layer."""
    config = load_config(model)
    heads = config.num_kv_heads
    whole = max(1, round(share * heads))
    classes = tuple(
        tuple(
            HeadClass.GLOBAL if (head - layer) % heads < whole else HeadClass.LOCAL
            for head in range(heads)
        )
        for layer in range(config.num_layers)
    )
    return HeadMap(config.identity, SINKS, WINDOW, classes)


async def measure(
    plain: Server, ours: Server, context: int, answer: int, rounds: int, words: tuple[str, ...]
) -> list[PagingFigure]:
    """Return both figures of one context length, from `rounds` rounds after one that warms up."""
    seconds: dict[str, list[tuple[float, float]]] = {"first token": [], "between tokens": []}
    asks = make_workload("rag", Shape(context, 0.0, answer), rounds + 1, words, f"{context}")
    asks = tuple(ask for ask in asks if ask.timed)
    async with Pair.of(plain, ours, None) as pair:
        with progress_bar(errors, f"{context} tokens") as on_progress:
            for number, ask in enumerate(asks):
                found: dict[Client, Mapping[str, float]] = {}
                for client in pair.in_turn(number):
                    await asyncio.sleep(SETTLE_S)
                    outcome = checked(await client.ask(ask))
                    found[client] = {
                        "first token": outcome.ttft_s,
                        "between tokens": statistics.median(outcome.gaps_s),
                    }
                for what, pairs in seconds.items() if number else ():
                    pairs.append((found[pair.plain][what], found[pair.ours][what]))
                on_progress(number + 1, len(asks))
    return [_figure(what, context, pairs) for what, pairs in seconds.items()]


def _figure(what: str, context: int, pairs: list[tuple[float, float]]) -> PagingFigure:
    plain, ours = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [one / other for one, other in pairs]
    low, high = bootstrap(ratios, of=np.median)
    return PagingFigure(what, context, plain, ours, statistics.median(ratios), low, high)


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of a prompt, by commas.")] = "8192,32768",
    share: Annotated[float, typer.Option(help="Of the KV heads, that sees everything.")] = 0.25,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 48,
    rounds: int = 5,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 12,
    dtype: str = "float32",
    compiled: Annotated[bool, typer.Option("--compiled", help="Without --enforce-eager.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Start both servers and measure all lengths."""
    lengths = [int(part) for part in contexts.split(",")]
    settings = ServerOptions(
        Path(), dtype, max(lengths) + answer + 128, kv_gib=4, compiled=compiled
    )
    console = Console(quiet=as_json)
    with TemporaryDirectory() as folder:
        model, heads = Path(folder, "model"), Path(folder, "heads.json")
        model.mkdir()
        make_random_model(model, layers, settings.max_model_len)
        make_map(model, share).save(heads)
        settings = replace(settings, model=model)
        words = single_token_words(*local_tokenizer(model))
        by_head = ("--no-kvgraft", "--kvgraft-head-paging", "--kvgraft-head-map", str(heads))
        facts = configuration(settings, f"random, {layers} layers") | {"heads that see all": share}
        console.print(line_of_settings(facts))
        figures = []
        with start(settings, "--no-kvgraft") as plain, start(settings, *by_head) as ours:
            for context in lengths:
                figures += asyncio.run(measure(plain, ours, context, answer, rounds, words))
    table = markdown_table(
        ["", "context", "plain ms", "by head ms", "plain / by head", "95 %"], [""]
    )
    for row in figures:
        table.add_row(
            row.what, str(row.context), f"{row.plain_ms:.1f}", f"{row.ours_ms:.1f}",
            f"{row.gain:.2f}", f"{row.low:.2f} to {row.high:.2f}",
        )  # fmt: skip
    console.print(table)
    if as_json:
        print(json.dumps({"configuration": facts, "figures": [asdict(row) for row in figures]}))


if __name__ == "__main__":
    typer.run(main)
