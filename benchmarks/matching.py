"""Cost of the virtual-block index: insertion rate, host memory and match time against the number of
known blocks.

Sources of up to 1,024 random blocks are inserted one by one. A reuse prompt is 90 % pieces of eight
sources, cut at random token offsets, with fresh text between them; a fresh prompt reuses nothing.

OMP_NUM_THREADS=1 python benchmarks/matching.py --max-blocks 1000000
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import scope_digest
from kvgraft.core.matches import MatchQuery
from tables import line_of_settings

BLOCKS = [10_000, 100_000, 1_000_000, 10_000_000]
SOURCE_BLOCKS = 1024
VOCABULARY = 150_000
PIECES = 8
REUSE = 0.9
SCOPE = scope_digest("benchmark", "matching")


@dataclass(frozen=True)
class Result:
    blocks: int
    inserted_per_s: float
    index_bytes_per_block: float
    rss_bytes_per_block: float | None
    reuse_match_ms: float
    reuse_match_ms_p90: float
    reuse_matched: float  # share of the prompt's tokens
    fresh_match_ms: float
    fresh_match_ms_p90: float


def source_tokens(source: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng((1, source)).integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def reuse_prompt(rng: np.random.Generator, sizes: list[int], num_tokens: int) -> np.ndarray:
    """Pieces of random sources (of sizes[source] tokens) with fresh text between them, int32
    [num_tokens]."""
    parts = []
    for piece in np.array_split(np.arange(num_tokens), PIECES):
        source = int(rng.integers(len(sizes)))
        length = min(round(REUSE * len(piece)), sizes[source])
        first = int(rng.integers(sizes[source] - length + 1))
        parts.append(source_tokens(source, sizes[source])[first : first + length])
        parts.append(rng.integers(0, VOCABULARY, len(piece) - length, dtype=np.int32))
    return np.concatenate(parts)


def match_times(index: VirtualBlockIndex, prompts: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Milliseconds per prompt, and the share of all their tokens that was matched."""
    index.match(MatchQuery(prompts[0], (SCOPE,)))
    elapsed, matched = [], 0
    for prompt in prompts:
        begin = time.perf_counter()
        matches = index.match(MatchQuery(prompt, (SCOPE,)))
        elapsed.append(1e3 * (time.perf_counter() - begin))
        matched += sum(match.length for match in matches)
    return np.array(elapsed), matched / sum(map(len, prompts))


def rss_bytes() -> int | None:
    """Resident memory of this process; known on Linux only."""
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None
    )


def measure(
    blocks: int, block_size: int, tokens: int, num_prompts: int, advance: Callable[[int], None]
) -> Result:
    versions = np.ones(blocks, np.int64)
    sizes = [
        min(SOURCE_BLOCKS, blocks - first) * block_size for first in range(0, blocks, SOURCE_BLOCKS)
    ]
    index = VirtualBlockIndex(block_size, lambda pages, known: versions[pages] == known)
    rss, seconds = rss_bytes(), 0.0
    for source, size in enumerate(sizes):
        content = source_tokens(source, size)
        pages = source * SOURCE_BLOCKS + np.arange(size // block_size)
        begin = time.perf_counter()
        index.insert(content, pages, versions[pages], source=source, source_start=0, scope=SCOPE)
        seconds += time.perf_counter() - begin
        advance(len(pages))
    grown = None if rss is None else (rss_bytes() or 0) - rss
    rng = np.random.default_rng(2)
    reuse, matched = match_times(
        index, [reuse_prompt(rng, sizes, tokens) for _ in range(num_prompts)]
    )
    fresh, _ = match_times(
        index, [rng.integers(0, VOCABULARY, tokens, dtype=np.int32) for _ in range(num_prompts)]
    )
    return Result(
        blocks=blocks,
        inserted_per_s=blocks / seconds,
        index_bytes_per_block=index.nbytes() / blocks,
        rss_bytes_per_block=None if grown is None else grown / blocks,
        reuse_match_ms=float(np.median(reuse)),
        reuse_match_ms_p90=float(np.percentile(reuse, 90)),
        reuse_matched=matched,
        fresh_match_ms=float(np.median(fresh)),
        fresh_match_ms_p90=float(np.percentile(fresh, 90)),
    )


def results_table(results: list[Result]) -> Table:
    table = Table(
        "blocks", "inserted/s", "B/block", "RSS/block", "90 % ms (p90)", "matched", "0 % ms (p90)"
    )
    for result in results:
        rss = result.rss_bytes_per_block
        table.add_row(
            f"{result.blocks:,}",
            f"{result.inserted_per_s:,.0f}",
            f"{result.index_bytes_per_block:.0f}",
            "n/a" if rss is None else f"{rss:.0f}",
            f"{result.reuse_match_ms:.2f} ({result.reuse_match_ms_p90:.2f})",
            f"{result.reuse_matched:.1%}",
            f"{result.fresh_match_ms:.2f} ({result.fresh_match_ms_p90:.2f})",
        )
    return table


def main(
    blocks: Annotated[
        list[int], typer.Option(min=1, help="Known blocks; may be given several times.")
    ] = BLOCKS,
    max_blocks: Annotated[int, typer.Option(min=1, help="Leave out larger sizes.")] = max(BLOCKS),
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    tokens: Annotated[int, typer.Option(min=PIECES, help="Prompt length.")] = 4096,
    prompts: Annotated[int, typer.Option(min=20, help="Prompts timed per measurement.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure insertion, memory and matching of the virtual-block index."""
    configuration = {
        "block_size": block_size,
        "tokens": tokens,
        "prompts": prompts,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    sizes = [size for size in blocks if size <= max_blocks]
    if not sizes:
        raise typer.BadParameter(f"no size among {blocks} is within --max-blocks {max_blocks}")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("inserting blocks", total=sum(sizes))
        results = [
            measure(size, block_size, tokens, prompts, lambda n: progress.advance(task, n))
            for size in sizes
        ]
    if as_json:
        print(
            json.dumps(
                {"configuration": configuration, "results": [asdict(result) for result in results]},
                indent=2,
            )
        )
    else:
        console = Console()
        console.print(line_of_settings(configuration))
        console.print(results_table(results))


if __name__ == "__main__":
    typer.run(main)
