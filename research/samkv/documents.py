"""Questions over many documents: memory of keys and values, time to first token, time of a decode
step, by policy.

All policies find the documents read; they answer in turn, and the median of the paired ratios
against full is printed.

    python -m research.samkv.documents [--documents 4,8] [--tokens 512]
        [--policies "samkv;condense"] [--json]
"""

import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.prompt import Part
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.tasks import Item, Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR

POLICIES = (
    "naive;epic;cacheblend;sparsex;transitive;redknot;samkv:block_tokens=8,kept_share=0.15;"
    "samkv:block_tokens=8,kept_share=0.15,top_p=off;condense"
)
STEPS = 64
ROOM = 150  # tokens of a prompt beside its documents


@dataclass(frozen=True)
class PolicyResult:
    """One policy over so many documents. Medians; `ttft_gain`, `decode_gain`: how many times faster
    than full; `kv_gain`: how many times less memory its keys and values take at most."""

    policy: str
    documents: int
    kept: float
    kv_mib: float
    kv_gain: float
    ttft_ms: float
    ttft_gain: float
    decode_ms: float
    decode_gain: float


def measure(engine: Engine, item: Item, policy: str) -> tuple[float, float, float, float]:
    """Share of the prompt that is kept, bytes of KV, seconds to the first token and of a decode
    step."""
    reused = {segment for segments in item.phase_1 for segment in segments}
    parts: list[Part] = as_parts(item.phase_2[0].segments, reused)
    sampling = SamplingParams(max_tokens=1 + STEPS, ignore_eos=True)
    request = Request(parts, policy, sampling, remember=False)
    engine.read_documents(request)
    start = time.perf_counter()
    [result] = engine.generate([request])
    seconds = time.perf_counter() - start
    if result.error or result.report.fallback:
        raise RuntimeError(f"{policy}: {result.error or result.report.fallback}")
    report = result.report
    kept = (
        report.counts.get("kept_tokens", report.grafted_tokens)
        + report.fresh_tokens
        + report.prefix_tokens
    )
    return (
        kept / report.prompt_tokens,
        report.kv_bytes,
        report.ttft_s,
        (seconds - report.ttft_s) / STEPS,
    )


def run(
    engine: Engine, count: int, tokens: int, policies: list[str], rounds: int, advance: Any
) -> list[PolicyResult]:
    """All policies over as many texts as there are rounds, after one that does not count."""
    [suite] = find_suites("multidoc")
    items = islice(
        suite.items(1, rounds + 1, Shape(count * tokens + ROOM, count, ("alone",))), rounds + 1
    )
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for number, item in enumerate(items):
        engine.clear_cache()
        for segments in item.phase_1:
            engine.generate(
                [Request(as_parts(segments), "full", SamplingParams(max_tokens=1, ignore_eos=True))]
            )
        for policy in policies:
            measured = measure(engine, item, policy)
            if number:
                found[policy].append(measured)
        advance()
    rows = []
    for policy in policies:
        kept, kv, ttft, decode = (
            statistics.median(column) for column in zip(*found[policy], strict=True)
        )
        pairs = list(zip(found["full"], found[policy], strict=True))
        gains = [
            statistics.median(full[place] / own[place] for full, own in pairs)
            for place in (1, 2, 3)
        ]
        rows.append(
            PolicyResult(
                policy,
                count,
                kept,
                kv / 2**20,
                gains[0],
                1e3 * ttft,
                gains[1],
                1e3 * decode,
                gains[2],
            )
        )
    return rows


def main(
    documents: Annotated[str, typer.Option(help="How many, by commas.")] = "4,6,8",
    tokens: Annotated[int, typer.Option(help="Of a document, about.")] = 512,
    policies: Annotated[str, typer.Option(help="Beside full, by semicolons.")] = POLICIES,
    model: Annotated[Path, typer.Option(help="Hugging Face model directory.")] = MODEL_DIR,
    rounds: int = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all policies at all numbers of documents."""
    counts, names = [int(part) for part in documents.split(",")], ["full", *policies.split(";")]
    engine = Engine(model, dtype="float32", kv_gib=1.0)
    most = engine.config.max_position - STEPS - 1
    if rounds < 1 or not 256 <= min(counts) * tokens <= max(counts) * tokens + ROOM <= most:
        raise typer.BadParameter(
            f"documents must have 256 to {most - ROOM} tokens together, and rounds be at least 1"
        )
    console, rows = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("documents", total=len(counts) * (rounds + 1))
        for count in counts:
            rows += run(engine, count, tokens, names, rounds, lambda: progress.advance(task))
    configuration: dict[str, Any] = {
        "model": model.name, "tokens of a document": tokens, "dtype": "float32", "rounds": rounds,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    table = Table("documents", "policy", box=box.MARKDOWN)
    for name in ("kept", "KV MiB", "less", "TTFT ms", "faster", "decode ms", "faster"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.documents), row.policy, f"{row.kept:.1%}", f"{row.kv_mib:.1f}",
            f"{row.kv_gain:.1f}x",
            f"{row.ttft_ms:.0f}", f"{row.ttft_gain:.1f}x", f"{row.decode_ms:.1f}",
            f"{row.decode_gain:.1f}x",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
