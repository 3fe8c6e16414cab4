"""A load generator for any OpenAI endpoint: RAG, chat and agent prompts of which a given share was
read before.

It measures time to first token, the gaps between tokens, throughput and reuse: of one endpoint, or
of plain vLLM and ours in turn.

    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --workload mixed --tokens 1024
        --reuse 0.9 --rate 2
    python benchmarks/serve.py --compare  # starts both servers; --model DIR for a model of your own
    python benchmarks/serve.py --scenario 4k90  # of the default policy; see --help; repeatable
    # on one GPU
    python benchmarks/serve.py --device cuda --shape 8b --dtype bfloat16 --scenario 8k-90
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import Server
from load import Client, Summary, drive, local_tokenizer, words_of
from scenarios import (
    FAMILIES,
    GPU_SETTLE_S,
    SCENARIOS,
    SETTLE_S,
    Figure,
    Pair,
    compare_workloads,
    make_random_model,
    run_scenario,
)
from servers import THREADS, ServerOptions, start
from tables import comparison_of, configuration, line_of, table_of
from ttft import SHAPES
from workload import KINDS, Shape, arrivals, make_workload, single_token_words

URL = "http://127.0.0.1:8000/v1"
DEVICES = ("cpu", "cuda")
ROUNDS = 5
ROOM = 128  # tokens of a context beyond prompt and answer: special tokens
errors = Console(stderr=True)


@dataclass(frozen=True)
class Load:
    """A workload and how it arrives; `rate` is in requests per second, 0 sends as fast as
    `concurrency` allows."""

    kind: str
    shape: Shape
    requests: int
    rate: float
    concurrency: int
    seed: int


@dataclass(frozen=True)
class Pairing:
    """What two servers are started for: a comparison under `load`, scenarios, or both; `rounds` 0
    is each one's own."""

    load: Load
    compare: bool
    scenarios: tuple[str, ...]
    rounds: int
    kvgraft: Mapping[str, Any] | None

    @property
    def max_model_len(self) -> int:
        """Tokens that the longest sequence needs."""
        shape = self.load.shape
        lengths = [SCENARIOS[name].max_model_len for name in self.scenarios]
        return max([*lengths, *([shape.tokens + shape.max_tokens + ROOM] if self.compare else [])])


def main(
    url: Annotated[
        str | None, typer.Option(help="Base URL of the endpoint.", show_default=URL)
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Of the endpoint.")
    ] = "none",
    model: Annotated[
        str | None, typer.Option(help="Its name; with --compare or --scenario a directory.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model directory.", show_default="/tokenize")
    ] = None,
    workload: Annotated[str, typer.Option(help=", ".join(KINDS))] = "mixed",
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    reuse: Annotated[float, typer.Option(help="Share of a prompt that was read before.")] = 0.9,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 32,
    requests: Annotated[int, typer.Option(help="Number of timed requests.")] = 48,
    rate: Annotated[
        float, typer.Option(help="Poisson arrivals per second; 0: as fast as they are served.")
    ] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests under way at most.")] = 4,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0,
    kvgraft: Annotated[
        str | None, typer.Option(help='Options of requests, as JSON: {"policy": "naive"}.')
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /chat/completions.")] = False,
    only_openai: Annotated[
        bool, typer.Option("--only-openai", help="Send no ignore_eos, which vLLM has.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Start plain vLLM and ours; run them in turn.")
    ] = False,
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SCENARIOS)} (repeatable).")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Of --compare and --scenario.", show_default="their own")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Of the servers started.")] = "float32",
    layers: Annotated[int, typer.Option(help="Of the random model used without --model.")] = 12,
    shape: Annotated[
        str, typer.Option(help=f"Of that model: {', '.join(SHAPES)}; vLLM makes up weights of 8b.")
    ] = "small",
    family: Annotated[str, typer.Option(help=f"Of that model: {', '.join(FAMILIES)}.")] = "qwen3",
    device: Annotated[
        str, typer.Option(help=f"That both servers run on: {', '.join(DEVICES)}.")
    ] = "cpu",
    compiled: Annotated[bool, typer.Option("--compiled", help="Without --enforce-eager.")] = False,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Of one step.", show_default="vLLM's")
    ] = 0,
    threads: Annotated[
        int, typer.Option(help="CPU cores that each server's model runs on.")
    ] = THREADS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Drive an endpoint, or compare plain vLLM with ours."""
    load = Load(workload, Shape(tokens, reuse, max_tokens), requests, rate, concurrency, seed)
    options = json.loads(kvgraft) if kvgraft else None
    console = Console(quiet=as_json)
    if compare or scenario:
        _refuse(
            "with --compare or --scenario",
            url=url,
            tokenizer=tokenizer,
            chat=chat,
            only_openai=only_openai,
        )
        pairing = Pairing(load, compare, tuple(scenario or ()), rounds, options)
        for name, value, known in (
            ("family", family, FAMILIES),
            ("shape", shape, SHAPES),
            ("device", device, DEVICES),
        ):
            if value not in known:
                raise typer.BadParameter(f"--{name} {value!r} is not one of {', '.join(known)}")
        settings = ServerOptions(
            Path(model or ""), dtype, pairing.max_model_len, max_num_batched_tokens, threads,
            device=device, compiled=compiled, dummy_weights=model is None and shape != "small",
        )  # fmt: skip
        with _model(settings, layers, SHAPES[shape], family) as settings:
            result = in_turn(
                pairing, settings, model or f"random, {shape}, {family}, {layers} layers", console
            )
    else:
        _refuse(
            "without --compare or --scenario", rounds=rounds,
            max_num_batched_tokens=max_num_batched_tokens,
            compiled=compiled,
        )  # fmt: skip
        url, extra = url or URL, {"kv_transfer_params": {"kvgraft": options}} if options else {}
        client = Client(
            url,
            api_key=api_key,
            model=model,
            chat=chat,
            extra=extra if only_openai else extra | {"ignore_eos": True},
        )
        result = alone(client, load, words_of(tokenizer, url, model, api_key), console)
    if as_json:
        print(json.dumps(result))


def alone(client: Client, load: Load, words: tuple[str, ...], console: Console) -> dict[str, Any]:
    """One endpoint under a load; prints its table and returns what `--json` shows."""
    asks = make_workload(load.kind, load.shape, load.requests, words, load.seed)
    times = arrivals(load.requests, load.rate, load.seed)

    async def run() -> Summary:
        async with client:
            with progress_bar(errors, load.kind) as on_progress:
                return Summary.of(await drive(client, asks, times, load.concurrency, on_progress))

    summary = asyncio.run(run())
    console.print(f"{client.url}, {load}, {client.extra}", table_of({load.kind: summary}), sep="\n")
    return {
        "url": client.url,
        "load": asdict(load),
        "extra": client.extra,
        "summary": asdict(summary),
    }


def in_turn(
    pairing: Pairing, settings: ServerOptions, name: str, console: Console
) -> dict[str, Any]:
    """Plain vLLM and ours; prints tables and lines as they come, and returns what `--json`
    shows."""
    words = single_token_words(*local_tokenizer(settings.model))
    result: dict[str, Any] = {"configuration": configuration(settings, name)}
    console.print(", ".join(f"{key} {value}" for key, value in result["configuration"].items()))
    with start(settings, "--no-kvgraft") as plain, start(settings) as ours:
        if pairing.compare:
            rounds = asyncio.run(_compare(plain, ours, pairing, words))
            console.print(str(pairing.load), comparison_of(rounds), sep="\n")
            result |= {
                "load": asdict(pairing.load),
                "rounds": [[asdict(one), asdict(two)] for one, two in rounds],
            }
        settle_s = SETTLE_S if settings.device == "cpu" else GPU_SETTLE_S
        for scenario in pairing.scenarios:
            figure = asyncio.run(_scenario(plain, ours, scenario, pairing, words, settle_s))
            console.print(line_of(figure), soft_wrap=True)
            result.setdefault("figures", []).append(asdict(figure) | {"met": figure.met})
    return result


async def _compare(
    plain: Server, ours: Server, pairing: Pairing, words: tuple[str, ...]
) -> list[tuple[Summary, Summary]]:
    load = pairing.load
    async with Pair.of(plain, ours, pairing.kvgraft) as pair:
        with progress_bar(errors, load.kind) as on_progress:
            return await compare_workloads(
                pair, load.kind, load.shape, words, count=load.requests, rate=load.rate,
                concurrency=load.concurrency,
                rounds=pairing.rounds or ROUNDS, seed=load.seed, on_progress=on_progress,
            )  # fmt: skip


async def _scenario(
    plain: Server,
    ours: Server,
    name: str,
    pairing: Pairing,
    words: tuple[str, ...],
    settle_s: float,
) -> Figure:
    scenario = replace(SCENARIOS[name], rounds=pairing.rounds or SCENARIOS[name].rounds)
    async with Pair.of(plain, ours, scenario.kvgraft) as pair:
        with progress_bar(errors, name) as on_progress:
            seed = pairing.load.seed
            return await run_scenario(scenario, pair, words, seed, on_progress, settle_s)


@contextmanager
def _model(
    settings: ServerOptions, layers: int, shape: Mapping[str, Any], family: str
) -> Iterator[ServerOptions]:
    """The settings with a model: the one given, or a random one that is gone afterwards."""
    if settings.model.name:
        yield settings
        return
    with TemporaryDirectory() as folder:
        sizes, weights = {**shape, **FAMILIES[family]}, not settings.dummy_weights
        make_random_model(
            Path(folder), layers, settings.max_model_len, sizes, family, weights=weights
        )
        yield replace(settings, model=Path(folder))


def _refuse(where: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(f"--{name.replace('_', '-')} has no meaning {where}")


if __name__ == "__main__":
    typer.run(main)
