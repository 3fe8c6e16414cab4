"""How far flows are from dense attention along dense's own answers, on a real model and real text;
and which channels of its heads tell which blocks matter (Vortex, sections 6.1 and 6.3).

The text is read densely. The question is decoded token by token under the flow, and so is the
answer that dense attention gives.

python -m research.vortex.real_text [--model smollm2] [--lengths 4096,7800] [--items 4] [--flows
"quest;block_topk"]"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.engine.request import Result
from kvgraft.flows import DENSE
from kvgraft.guard.distances import along
from kvgraft.models import find_model
from kvgraft_lab.evaluate.jsonl import check_config, read_lines
from kvgraft_lab.evaluate.prompts import as_text, find_chat
from kvgraft_lab.evaluate.scoring import ANSWER_TOKENS
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.tasks import Shape, find_suites

ROWS, CONFIG = "rows.jsonl", "config.json"
CHANNELS = "research/vortex/channels.py"
NAMED = ("block_topk", "quest", "double_sparse", "nsa_block_topk", "streaming", "h2o")
GROUPS = 8  # of the channels of a head; with RoPE by halves, group g turns with g + 4
MASKS = ("0+4", "1+5", "2+6", "3+7", "0+1+4+5", "2+3+6+7")


class FlowDistance(msgspec.Struct, frozen=True):
    """One prompt under one flow; distances as `along`."""

    length: int
    item: int
    flow: str
    distances: dict[str, float]


def default_flows(k: int) -> list[str]:
    """The named ones, and two of them with groups of channels masked."""
    masked = [
        f"{CHANNELS}:{name}:groups={GROUPS},masked={mask},topk_blocks={k}"
        for name in ("channel_topk", "channel_quest")
        for mask in MASKS
    ]
    return [DENSE, *(f"{name}:topk_blocks={k}" for name in NAMED), *masked]


def measure(
    engine: Engine, flows: Sequence[str], length: int, items: int, seed: int
) -> Iterator[FlowDistance]:
    """All flows on questions about documentation, prompt by prompt."""
    [suite] = find_suites("docs")
    chat = find_chat(engine.tokenizer)
    shape = Shape(length, max(4, length // 512), ("alone",))
    for number, item in enumerate(suite.items(seed, -(-items // len(suite.tasks)), shape)[:items]):
        engine.clear_cache()
        ask = item.phase_2[0]
        whole = engine.token_ids(Request(as_text(ask.segments, chat, ask.begun)))
        tail = engine.encode(as_text([ask.segments[-1]]))
        text, question = whole[: -len(tail)], whole[-len(tail) :]
        truth = _ask(engine, whole, ANSWER_TOKENS, DENSE)
        answer = truth.token_ids
        for flow in flows:
            ours = _ask(engine, text, len(question) + len(answer), flow, [*question, *answer])
            if ours.logits is None or truth.logits is None:
                raise ValueError("the answer needs its logits")
            yield FlowDistance(
                length, number, flow, along(ours.logits[len(question) :], truth.logits, answer)
            )


def _ask(
    engine: Engine, tokens: Sequence[int], most: int, flow: str, answer: Sequence[int] = ()
) -> Result:
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    request = Request(tokens, "full", sampling, return_logits=True, flow=flow, forced_output=answer)
    [result] = engine.generate([request])
    if result.error:
        raise ValueError(result.error)
    return result


def main(
    model: Annotated[Path, typer.Option(help="Directory or name of a model.")] = Path("smollm2"),
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, by commas.")] = "4096,7800",
    items: Annotated[int, typer.Option(help="Prompts of each length.")] = 6,
    k: Annotated[int, typer.Option(help="Blocks that flows choose.")] = 29,
    flows: Annotated[
        str | None, typer.Option(help="By semicolons.", show_default="named ones and masked ones")
    ] = None,
    seed: int = 1000,
    out: Path = Path("results/flows_real_text"),
) -> None:
    """Measure what the directory does not hold yet, and print means with 95 % intervals."""
    chosen = flows.split(";") if flows else default_flows(k)
    engine = Engine(find_model(model, fetch=True), dtype="float32", continuation=False)
    wanted = [int(length) for length in lengths.split(",")]
    settings = {"model": engine.config.identity, "items": items, "seed": seed, "flows": chosen}
    for length in wanted:
        where = out / str(length)
        check_config(where / CONFIG, settings)
        rows = read_lines(where / ROWS, FlowDistance)
        if len(rows) < items * len(chosen):
            with (
                (where / ROWS).open("wb") as file,
                progress_bar(Console(stderr=True), f"{length}") as on_progress,
            ):
                for done, row in enumerate(measure(engine, chosen, length, items, seed), 1):
                    file.write(msgspec.json.encode(row) + b"\n")
                    on_progress(done, items * len(chosen))
    found = [row for length in wanted for row in read_lines(out / str(length) / ROWS, FlowDistance)]
    Console().print(render(found))


def render(rows: Sequence[FlowDistance]) -> Table:
    """A line for each flow and length."""
    table = Table(
        title=f"along {ANSWER_TOKENS} tokens of dense attention's answers", title_justify="left"
    )
    for name in ("tokens", "flow", "KL, nats", "95 %", "other tokens"):
        table.add_column(name, justify="left" if name == "flow" else "right", overflow="fold")
    groups: dict[tuple[int, str], list[FlowDistance]] = {}
    for row in rows:
        groups.setdefault((row.length, row.flow), []).append(row)
    for (length, flow), mine in groups.items():
        kl, flips = ([row.distances[name] for row in mine] for name in ("answer_kl", "flips"))
        low, high = bootstrap(kl)
        name = flow.removeprefix(f"{CHANNELS}:")
        table.add_row(
            f"{length:,}", name, f"{mean(kl):.4f}", f"{low:.4f}-{high:.4f}", f"{mean(flips):.1%}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)
