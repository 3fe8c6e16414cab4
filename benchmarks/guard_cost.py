"""What the guard of quality costs: plain vLLM and ours with several shares of answers scored, under
one load in turn.

python benchmarks/guard_cost.py  # as fast as they are served: throughput
python benchmarks/guard_cost.py --rate 2                     # Poisson arrivals: time to first token
# all scored: what scoring one takes
python benchmarks/guard_cost.py --share 0 --share 1 --requests 60
python benchmarks/guard_cost.py --share 0 --share 0.05 --requests 400 --json
"""

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import Server
from load import Client, Outcome, Summary, drive, local_tokenizer
from scenarios import SETTLE_S, make_random_model
from servers import THREADS, ServerOptions, start
from tables import configuration, line_of_settings, markdown_table
from workload import Shape, arrivals, make_workload, single_token_words

PLAIN = "plain vLLM"
SCORE_S = 300.0  # until everything that waits has been scored
UNLIMITED = 10**9  # tokens a minute
POLL_S = 0.2
errors = Console(stderr=True)


@dataclass(frozen=True)
class Turn:
    """One server under one round of the load.

    Attributes:
        scoring_s: from the last answer until all that waited had been scored.
        approximate, scored: answers on approximate KV; those that were scored.
        tokens: computed for that.
    """

    summary: Summary
    scoring_s: float
    approximate: float
    scored: float
    tokens: float

    @property
    def seconds(self) -> float:
        """From the first request until everything had been scored."""
        return self.summary.seconds + self.scoring_s


def main(
    share: Annotated[
        list[float] | None, typer.Option(help="Of the answers, scored; repeatable: 0, .01, .05.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 1024,
    reuse: Annotated[float, typer.Option(help="Share of a prompt that was read before.")] = 0.9,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 32,
    requests: Annotated[int, typer.Option(help="Of a round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Each with every server.")] = 3,
    rate: Annotated[
        float, typer.Option(help="Arrivals per second; 0: as fast as they are served.")
    ] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests under way at most.")] = 4,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 4,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Drive all servers, and print what each made of it."""
    shape = Shape(tokens, reuse, max_tokens)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        make_random_model(Path(folder), layers, tokens + max_tokens + 128)
        settings = ServerOptions(Path(folder), max_model_len=tokens + max_tokens + 128)
        servers = {PLAIN: stack.enter_context(start(settings, "--no-kvgraft"))}
        for one in share or [0.0, 0.01, 0.05]:
            servers[f"{one:.0%} scored"] = stack.enter_context(start(settings, *_guard(one)))
        words = single_token_words(*local_tokenizer(settings.model))
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        with progress_bar(errors, "requests") as on_progress:
            for number in range(-1, rounds):  # the first one warms up
                asks = make_workload(
                    "rag", shape, requests if number >= 0 else 8, words, seed + number
                )
                times = arrivals(sum(ask.timed for ask in asks), rate, seed + number)
                for name in _in_turn(list(servers), number):
                    turn = asyncio.run(_turn(servers[name], asks, times, concurrency))
                    turns[name] += [turn] if number >= 0 else []
                on_progress(number + 2, rounds + 1)
        used = configuration(settings, f"random, {layers} layers") | {
            "prompt": tokens, "known": reuse, "answer": max_tokens, "requests": rounds * requests,
            "rate": rate or f"{concurrency} at a time", "threads": THREADS,
        }  # fmt: skip
    if as_json:
        print(
            json.dumps(
                {
                    "configuration": used,
                    "turns": {n: [asdict(t) for t in them] for n, them in turns.items()},
                }
            )
        )
    else:
        Console().print(line_of_settings(used), table_of(turns), sep="\n")


def _guard(share: float) -> list[str]:
    return (
        ["--kvgraft-guard", str(share), "--kvgraft-guard-tokens", str(UNLIMITED)] if share else []
    )


def _in_turn(names: list[str], number: int) -> list[str]:
    """Another one begins each round."""
    first = number % len(names)
    return names[first:] + names[:first]


async def _turn(
    server: Server, asks: Sequence[Any], times: Sequence[float], concurrency: int
) -> Turn:
    """A round of one server; RuntimeError if a request failed."""
    before = guard_figures(server)
    async with Client(server.api, extra={"ignore_eos": True}) as client:
        outcomes: list[Outcome] = await drive(client, asks, times, concurrency)
    begin = time.monotonic()
    while (after := guard_figures(server))["waiting"] and time.monotonic() < begin + SCORE_S:
        await asyncio.sleep(POLL_S)
    scoring_s = time.monotonic() - begin
    await asyncio.sleep(SETTLE_S)
    summary = Summary.of(outcomes)
    if summary.errors:
        raise RuntimeError(f"requests failed: {summary.errors}")
    made = {name: after[name] - before[name] for name in after}
    return Turn(summary, scoring_s, made["approximate"], made["scored"], made["tokens"])


def guard_figures(server: Server) -> dict[str, float]:
    """Sums over all labels of what the guard counts; 0 on a server without one."""
    found = dict.fromkeys(("approximate", "scored", "tokens", "waiting"), 0.0)
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if not sample.name.startswith("kvgraft:guard_") or sample.name.endswith("_created"):
                continue
            name = sample.labels.get("outcome") or sample.name.removeprefix(
                "kvgraft:guard_"
            ).removesuffix("_total")
            if name in found:
                found[name] += sample.value
    return found


def table_of(turns: Mapping[str, Sequence[Turn]]) -> Table:
    """A row for each server: medians over rounds, and medians of the ratios to the server without
    scoring (the first one of ours), of equal requests."""
    table = markdown_table(
        ["server", "requests/s", "TTFT median ms", "P99 ms", "worst gap ms", "ratios: requests/s",
        "P99", "scored",
         "tokens for that, of the prompts'", "time until all is scored, of plain's"],
        ("server",),
    )  # fmt: skip
    [plain, unscored, *_] = turns.values()
    for name, them in turns.items():
        middle = [
            statistics.median(of(turn.summary) for turn in them)
            for of in (_rate, lambda s: 1e3 * s.ttft_s.median, _p99, lambda s: 1e3 * s.worst_gap_s)
        ]
        ratios = [
            statistics.median(
                of(a.summary) / of(b.summary) for a, b in zip(them, unscored, strict=True)
            )
            for of in (_rate, _p99)
        ]
        approximate, scored, tokens = (
            sum(getattr(turn, what) for turn in them)
            for what in ("approximate", "scored", "tokens")
        )
        prompts = sum(turn.summary.prompt_tokens for turn in them)
        time_taken = statistics.median(
            a.seconds / b.seconds for a, b in zip(them, plain, strict=True)
        )
        table.add_row(
            name, f"{middle[0]:.2f}", *(f"{value:.0f}" for value in middle[1:]),
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{scored:.0f} of {approximate:.0f}" if approximate else "-",
            f"{tokens / prompts:.2%}" if tokens else "-",
            f"{time_taken:.3f}",
        )  # fmt: skip
    return table


def _rate(summary: Summary) -> float:
    return summary.requests_per_s


def _p99(summary: Summary) -> float:
    return 1e3 * summary.ttft_s.p99


if __name__ == "__main__":
    typer.run(main)
