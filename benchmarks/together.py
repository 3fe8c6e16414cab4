"""All five systems on one server of a real model, against plain vLLM: near-duplicates, recovery,
sparse decode and per-head KV eviction, with a store and the guard.

Each server has one feature more than the one before. It and plain vLLM answer the same prompts in
turn: documentation of which 2 % of the words were edited after it was read. Quality is measured
against a server with KVGraft whose requests say `"reuse": "exact"`: its answers are plain vLLM's,
and only such a server scores given answers.

    kvgraft models get smollm2
    kvgraft profile-heads smollm2 --dtype bfloat16 --samples 8 --share 0.5 --out heads.json
    python benchmarks/together.py --model smollm2 --head-map heads.json --out together [--json]
"""

import asyncio
import json
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft.models.find import find_model
from kvgraft.server.process import Server
from kvgraft_lab.evaluate.hosts import HttpHost
from kvgraft_lab.evaluate.prompts import as_text
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings, run
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.summaries import summarise
from kvgraft_lab.evaluate.tasks import Ask, Item, Shape
from kvgraft_lab.evaluate.tasks.docs import make_docs
from kvgraft_lab.evaluate.tasks.own import edit_known
from load import Client
from scenarios import SETTLE_S, checked
from servers import ServerOptions, start
from tables import configuration, line_of_settings, markdown_table

EDITED_SHARE = 0.02
ANSWER = 64  # tokens of the answers whose times are measured
POLICY = "spread"
USAGE = "vllm:kv_cache_usage_perc"
errors = Console(stderr=True)


@dataclass(frozen=True)
class ServedFigures:
    """One server, against plain vLLM.

    Attributes:
        score, full_score, noise_score: right answers of this server, of a server asked with
            `"reuse": "exact"`, whose answers are plain vLLM's, and of that one with the passages in
            another order.
        less: that score minus this one, with its 95 % interval.
        kl, noise: KL along its answers, nats, of this server and of other orders.
        worst: greatest ratio of the two in a pattern of reuse, and its name.
        sooner: plain vLLM's time to first token divided by this one's, median over prompts, with
            its 95 % interval.
        faster: the same of the time between tokens.
        kv_mib, full_kv_mib: KV memory of one prompt and its answer, median over prompts.
        fallbacks: prompts whose grafts were not used.
    """

    server: str
    prompts: int
    score: float
    full_score: float
    noise_score: float
    less: tuple[float, float, float]
    kl: float
    noise: float
    worst: tuple[float, str]
    sooner: tuple[float, float, float]
    faster: tuple[float, float, float]
    kv_mib: float
    full_kv_mib: float
    fallbacks: int


class RememberingHost(HttpHost):
    """A server whose answers to equal prompts are asked for once, for several comparisons."""

    def __init__(self, url: str, model_dir: Path) -> None:
        super().__init__(url, model_dir)
        self._said: dict[Any, Any] = {}

    def _ask(self, item: Item, policy: str, ask: Ask, answer: Sequence[int] = ()) -> Any:
        key = policy, ask, tuple(answer)
        if key not in self._said:
            self._said[key] = super()._ask(item, policy, ask, answer)
        return self._said[key]


@dataclass(frozen=True)
class Timed:
    """Times of one answer, s, and the share of the KV pool that it takes."""

    first_s: float
    gap_s: float
    usage: float


def servers(head_map: Path, flow: str, store: Path) -> dict[str, tuple[str, ...]]:
    """Return the flags of each server by name; every one adds to those before it."""
    added = {
        POLICY: (),
        "near-duplicates": ("--kvgraft-match", "similar"),
        "flow": ("--flow", flow),
        "head paging, store, guard": (
            "--kvgraft-head-paging",
            "--kvgraft-head-map",
            str(head_map),
            "--kvgraft-store-dir",
            str(store),
            "--kvgraft-guard",
            "0.1",
        ),
    }
    flags: dict[str, tuple[str, ...]] = {}
    before: tuple[str, ...] = ()
    for name, more in added.items():
        before = flags[name if name == POLICY else f"+ {name}"] = before + more
    return flags


async def measure_times(
    plain: Server, ours: Server, items: Sequence[Item], host: HttpHost
) -> list[tuple[Timed, Timed]]:
    """Return for each prompt the times of both servers, in turn, after one that warms up."""
    found = []
    async with Client(plain.api) as first, Client(ours.api) as second:
        with progress_bar(errors, "times") as on_progress:
            for number, item in enumerate([items[0], *items]):
                times: dict[Client, Timed] = {}
                for client in (first, second) if number % 2 else (second, first):
                    times[client] = await _time(client, item, host)
                found.append((times[first], times[second]))
                on_progress(number + 1, len(items) + 1)
    return found[1:]


async def _time(client: Client, item: Item, host: HttpHost) -> Timed:
    """Return the times of an item's first prompt, after its texts were read. No other item shares
    its prefix."""
    namespace, chat, usage = uuid.uuid4().hex, host.chat if item.chat else None, list[float]()

    async def ask(text: str, count: int, given: Mapping[str, Any]) -> Any:
        extra = {"ignore_eos": True, "cache_salt": namespace}
        if given:
            extra["kv_transfer_params"] = {"kvgraft": given}
        seen = 0

        def look(_: float) -> None:
            nonlocal seen
            seen += 1
            if seen == ANSWER // 2:
                usage.append(_usage(client))

        return checked(await client.send("", {"prompt": text}, count, extra, look))

    for known in item.phase_1:
        await ask(as_text(known, chat), 1, {"reuse": "exact"})
    await asyncio.sleep(SETTLE_S)
    asked = item.phase_2[0]
    outcome = await ask(as_text(asked.segments, chat, asked.begun), ANSWER, {})
    return Timed(outcome.ttft_s, statistics.median(outcome.gaps_s), usage[-1])


def _usage(client: Client) -> float:
    """Return the share of a server's KV pool that running requests hold."""
    text = httpx.get(f"{client.url.removesuffix('/v1')}/metrics").raise_for_status().text
    [line] = [line for line in text.splitlines() if line.startswith(f"{USAGE}{{")]
    return float(line.split()[-1])


def figures_of(
    name: str, rows: Sequence[EvalRow], times: Sequence[tuple[Timed, Timed]], kv_gib: int
) -> ServedFigures:
    """Join the rows of one evaluation, those of order noise, and the times of one server."""
    summaries = summarise(rows, "all")
    full, ours, noise = (
        next(one for one in summaries if one.policy == policy)
        for policy in ("full", POLICY, ORDER_NOISE)
    )
    patterns = {(one.group, one.policy): one.answer_kl.value for one in summarise(rows, "pattern")}
    worst = max(
        (value / patterns[group, ORDER_NOISE], group)
        for (group, policy), value in patterns.items()
        if policy == POLICY
    )
    mib = 1024 * kv_gib

    def ratio(measure: str) -> tuple[float, float, float]:
        ratios = [getattr(plain, measure) / getattr(own, measure) for plain, own in times]
        return statistics.median(ratios), *bootstrap(ratios, of=statistics.median)

    return ServedFigures(
        name, ours.prompts, ours.score, full.score, noise.score,
        (-ours.beyond_full, -ours.beyond_high, -ours.beyond_low),
        ours.answer_kl.value, noise.answer_kl.value, worst, ratio("first_s"), ratio("gap_s"),
        mib * statistics.median(own.usage for _, own in times),
        mib * statistics.median(plain.usage for plain, _ in times),
        ours.fallbacks,
    )  # fmt: skip


def main(
    head_map: Annotated[Path, typer.Option(help="Of the model, by kvgraft profile-heads.")],
    model: Annotated[str, typer.Option(help="Directory or name: kvgraft models list.")] = "smollm2",
    out: Annotated[Path, typer.Option(help="Directory of answers and the store.")] = Path(
        "together"
    ),
    flow: Annotated[str, typer.Option(help="Of the answers.")] = "quest:topk_blocks=13",
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1536,
    segments: Annotated[int, typer.Option(help="Passages of a prompt.")] = 6,
    items: Annotated[int, typer.Option(help="Texts a task, see kvgraft eval.")] = 3,
    seed: Annotated[int, typer.Option(help="Of texts and questions.")] = 15000,
    dtype: str = "bfloat16",
    only: Annotated[str, typer.Option(help="Servers by a part of their name, by commas.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Start the servers one after the other, beside plain vLLM, and measure each."""
    folder, console = find_model(model), Console(quiet=as_json)
    suite = make_docs("test")
    edited = edit_known(suite, EDITED_SHARE)
    settings = EvalSettings(
        (edited,), ("full", POLICY), (length,), segments, items=items, seed=seed
    )
    # Segments that were edited are not known, so they have no other order.
    unedited = replace(settings, suites=(suite,), policies=("full",), order_noise=True)
    options = ServerOptions(folder, dtype, length + 1024, kv_gib=2)
    shape = Shape(length, segments)
    timed = [replace(item, chat=True) for item in edited.items(seed, items, shape)]
    facts = (
        configuration(options, folder.name)
        | {"flow": flow, "edited": EDITED_SHARE}
        | {"tokens": length, "passages": segments, "items": items, "seed": seed}
    )
    console.print(line_of_settings(facts))

    figures: list[ServedFigures] = []
    with start(options) as exact, start(options, "--no-kvgraft") as plain:
        truth = RememberingHost(exact.url, folder)
        with progress_bar(errors, ORDER_NOISE) as on_progress:
            noise = run(unedited, truth, out / "order_noise", on_progress)
        noise = [row for row in noise if row.policy == ORDER_NOISE]
        for name, flags in servers(head_map, flow, out / "store").items():
            if only and not any(part in name for part in only.split(",")):
                continue
            with start(options, *flags) as ours:
                host = HttpHost(ours.url, folder, full=truth)
                with progress_bar(errors, name) as on_progress:
                    rows = run(settings, host, out / name.replace(" ", "_"), on_progress)
                times = asyncio.run(measure_times(plain, ours, timed, host))
            figures.append(figures_of(name, [*rows, *noise], times, options.kv_gib))
            console.print(_table(figures[-1:]))
    console.print(_table(figures))
    if as_json:
        print(json.dumps({"configuration": facts, "figures": [asdict(one) for one in figures]}))


def _table(figures: Sequence[ServedFigures]) -> Any:
    table = markdown_table(
        [
            "server", "right answers", "fewer than plain vLLM, 95 %",
            "KL, of order noise", "worst pattern", "first token, times faster", "95 %",
            "time between tokens, plain vLLM / ours", "95 %", "KV, MiB", "fallbacks",
        ],
        ["server", "worst pattern"],
    )  # fmt: skip
    for one in figures:
        table.add_row(
            one.server, f"{one.score:.3f}", _interval(one.less), f"{one.kl / one.noise:.2f}",
            f"{one.worst[1]}: {one.worst[0]:.2f}", f"{one.sooner[0]:.2f}", _interval(one.sooner),
            f"{one.faster[0]:.2f}", _interval(one.faster), f"{one.kv_mib:.1f}", str(one.fallbacks),
        )  # fmt: skip
    for one in figures[:1]:
        table.add_row(
            "plain vLLM", f"{one.full_score:.3f}", *["", "", "", "1", "", "1", ""],
            f"{one.full_kv_mib:.1f}", "",
        )  # fmt: skip
        other = "plain vLLM, passages in another order"
        table.add_row(other, f"{one.noise_score:.3f}", "", "1", *[""] * 7)
    return table


def _interval(estimate: tuple[float, float, float]) -> str:
    return f"{estimate[1]:.2f} to {estimate[2]:.2f}"


if __name__ == "__main__":
    typer.run(main)
