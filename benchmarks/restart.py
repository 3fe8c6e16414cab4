"""What a second process gains from the store that a first one has left: time to first token with it
and without.

    # the native engine, scenarios of the testbed
    python benchmarks/restart.py engine [--items 2] [--json]
    # `kvgraft serve`, through HTTP
    python benchmarks/restart.py server [--tokens 4096 --reuse 0.9] [--json]

The payload files are dropped from the page cache before the second process starts, where the file
system heeds that."""

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import numpy as np
import typer

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft.server.process import Server
from kvgraft.store import StoreOptions
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.scenarios import make_scenarios
from load import Client, local_tokenizer
from scenarios import SETTLE_S, OnProgress, Pair, checked, make_random_model
from servers import THREADS, ServerOptions, start
from store import (
    DirOption,
    JsonOption,
    configuration,
    drop_page_cache,
    drops,
    error_console,
    report,
    require_equal,
)
from ttft import ONE_TOKEN
from workload import Ask, Shape, make_workload, single_token_words

app = typer.Typer(add_completion=False, help=__doc__)
SAME, MOVED = "the same prompt", "moved documents"


class Answer(msgspec.Struct):
    """What one process has answered; `reused` are tokens, `output` is None where it does not
    matter."""

    kind: str
    tokens: int
    reused: int
    ttft_s: float
    output: list[int] | str | None


@dataclass(frozen=True)
class Restart:
    """Prompts of a second process, with what the first one has stored and without. Medians over
    prompts.

    Attributes:
        prompts: what they are, and `count` how many.
        reused: share of their tokens.
        gain: how many times sooner the first token comes, and what bounds it (bootstrap, 95 %).
        same: answers that are equal, where that means something: those of random weights to grafts
            do not.
    """

    prompts: str
    count: int
    tokens: float
    reused: float
    full_ms: float
    ttft_ms: float
    gain: float
    low: float
    high: float
    same: int | None


def restart_of(kind: str, plain: Sequence[Answer], stored: Sequence[Answer]) -> Restart:
    """Pairs of answers to the same prompts; those to a prompt that was read before as it is must be
    equal."""
    pairs = [(one, two) for one, two in zip(plain, stored, strict=True) if two.kind == kind]
    same = (
        None if pairs[0][0].output is None else sum(one.output == two.output for one, two in pairs)
    )
    if kind == SAME:
        require_equal(same, len(pairs), kind)
    gains = [one.ttft_s / two.ttft_s for one, two in pairs]
    return Restart(
        kind, len(pairs), statistics.median(two.tokens for _, two in pairs),
        statistics.median(min(1.0, two.reused / two.tokens) for _, two in pairs),
        1e3 * statistics.median(one.ttft_s for one, _ in pairs),
        1e3 * statistics.median(two.ttft_s for _, two in pairs), statistics.median(gains),
        *bootstrap(gains, of=np.median), same,
    )  # fmt: skip


@app.command()
def engine(
    items: Annotated[int, typer.Option(help="Of each scenario of the testbed.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of the scenarios.")] = 0,
    model: Annotated[Path, typer.Option(help="Hugging Face model directory.")] = MODEL_DIR,
    dtype: str = "float32",
    rounds: Annotated[int, typer.Option(help="Processes of each kind.", min=1)] = 3,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """One process reads documents and ends; others answer prompts with them, with its store and
    without."""
    given = ["process", "--items", items, "--seed", seed, "--model", model, "--dtype", dtype]
    found: dict[bool, list[list[Answer]]] = {False: [], True: []}
    with (
        TemporaryDirectory(dir=directory) as name,
        progress_bar(error_console, "processes") as on_progress,
    ):
        store = Path(name) / "store"
        run([*given, "--store", store, "--read"])
        for number in range(2 * rounds):
            stored = number % 4 in (1, 2)
            drop_page_cache(store)
            found[stored].append(run([*given, *(("--store", store) if stored else ())]))
            on_progress(number + 1, 2 * rounds)
        dropped = drops(Path(name) / "probe")
    settings = configuration(0, dtype, rounds) | {
        "model": model.name,
        "items of each scenario": items,
        "seed": seed,
    }
    settings["page cache is dropped"] = dropped
    sides = [
        [median_of(answers) for answers in zip(*found[stored], strict=True)]
        for stored in (False, True)
    ]
    report(settings, [restart_of(kind, *sides) for kind in (SAME, MOVED)], as_json)


def median_of(answers: Sequence[Answer]) -> Answer:
    """One prompt's answer, with its median time over the processes."""
    return msgspec.structs.replace(
        answers[0], ttft_s=statistics.median(answer.ttft_s for answer in answers)
    )


@app.command(hidden=True)
def process(
    items: int = 2, seed: int = 0, model: Path = MODEL_DIR, dtype: str = "float32",
    store: Path | None = None,
    read: bool = False,
) -> None:  # fmt: skip
    """Read the prompts of phase 1, or answer them and those of phase 2, each from an empty pool."""
    options = None if store is None else StoreOptions(store, ram_gib=0)
    everything = [item for scenario in make_scenarios(seed, items) for item in scenario.items]
    same = [(SAME, segments, "full") for item in everything for segments in item.phase_1]
    moved = [(MOVED, p.segments, DEFAULT_POLICY) for item in everything for p in item.phase_2]
    with Engine(model, dtype=dtype, store=options) as engine:
        if not read:
            engine.generate(
                [Request(as_parts(same[0][1]), "full", ONE_TOKEN, "warm-up", remember=False)]
            )
        for kind, segments, policy in same if read else same + moved:
            engine.clear_cache()
            request = Request(
                as_parts(segments), policy, SamplingParams(max_tokens=4), remember=read
            )
            [result] = engine.generate([request])
            told, restored = result.report, 16 * result.report.counts["restored_blocks"]
            line = Answer(kind, told.prompt_tokens, restored, told.ttft_s, result.token_ids)
            print(msgspec.json.encode(line).decode())


def run(arguments: Sequence[object]) -> list[Answer]:
    """The answers of another process."""
    command = [sys.executable, __file__, *map(str, arguments)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return [msgspec.json.decode(line, type=Answer) for line in lines]


@app.command()
def server(
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 4096,
    reuse: Annotated[
        float, typer.Option(help="Share of a prompt that the first server has read.")
    ] = 0.9,
    layers: Annotated[int, typer.Option(help="Of the random model.", min=1)] = 12,
    dtype: str = "float32",
    rounds: Annotated[
        int, typer.Option(help="Prompts of each kind, after one that warms up.", min=1)
    ] = 6,
    threads: Annotated[
        int, typer.Option(help="CPU cores that each server's model runs on.")
    ] = THREADS,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """One server reads documents and ends; one that has its store and one that has none answer
    prompts in turn."""
    shape = Shape(tokens, reuse, 1)
    with TemporaryDirectory(dir=directory) as name:
        folder = Path(name)
        options = ServerOptions(folder / "model", dtype, tokens + 128, threads=threads)
        make_random_model(options.model, layers, options.max_model_len)
        words = single_token_words(*local_tokenizer(options.model))
        # every prompt over documents of its own, since they are in the pool once it is answered
        asks = [
            (kind, make_workload("rag", shape, 1, words, f"{kind} {number}"))
            for number in range(rounds + 1)
            for kind in (SAME, MOVED)
        ]
        store = folder / "store"
        flags = "--kvgraft-store-dir", str(store)
        with start(options, *flags) as first:
            asyncio.run(read(first, [workload for _, workload in asks]))
        drop_page_cache(store)
        with (
            start(options) as plain,
            start(options, *flags) as ours,
            progress_bar(error_console, "prompts") as told,
        ):
            sides = asyncio.run(ask_both(plain, ours, asks, told))
        settings = configuration(layers, dtype, rounds) | {
            "block size": 32,
            "threads": threads,
            "reuse": reuse,
        }
        settings["page cache is dropped"] = drops(folder / "probe")
    report(settings, [restart_of(kind, *sides) for kind in (SAME, MOVED)], as_json)


async def read(server: Server, workloads: Sequence[Sequence[Ask]]) -> None:
    """Send the untimed requests; the last one again, since a server takes up what a prompt left in
    its next step."""
    asks = [ask for workload in workloads for ask in workload if not ask.timed]
    async with Client(server.api) as client:
        with progress_bar(error_console, "reading") as on_progress:
            for number, ask in enumerate([*asks, asks[-1]]):
                checked(await client.ask(ask))
                on_progress(number + 1, len(asks) + 1)


async def ask_both(
    plain: Server, ours: Server, asks: Sequence[tuple[str, Sequence[Ask]]], on_progress: OnProgress
) -> list[list[Answer]]:
    """Answers of both servers, without those of the first prompt of each kind."""
    async with Pair.of(plain, ours, None) as pair:
        sides: dict[Client, list[Answer]] = {pair.plain: [], pair.ours: []}
        for number, (kind, workload) in enumerate(asks):
            ask = workload[0 if kind == SAME else -1]
            for client in pair.in_turn(number // 2):
                await asyncio.sleep(SETTLE_S)
                got = checked(await client.ask(ask))
                text = got.text if kind == SAME else None
                sides[client].append(
                    Answer(kind, got.prompt_tokens, got.cached_tokens, got.ttft_s, text)
                )
            on_progress(number + 1, len(asks))
        return [answers[2:] for answers in sides.values()]


if __name__ == "__main__":
    app()
