"""The native engine with a dense cache, and with pages by head class: time to first token, and of a
decode step.

The testbed's model by head under full recomputation; the sides alternate, medians and the median of
the paired ratios are printed.

    python -m research.redknot.head_paging [--contexts 1024,4096] [--sessions 8] [--json]
"""

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvgraft import Engine, Request, SamplingParams
from research.redknot import MODEL_DIR

STEPS = 32
FIRST = 100  # words before it are no ordinary ones


@dataclass(frozen=True)
class PagingResult:
    """One measure at one context length; milliseconds, and how many times faster pages by head
    are."""

    what: str
    context: int
    dense_ms: float
    by_head_ms: float
    gain: float


def prompts(engine: Engine, context: int, count: int, seed: int) -> list[list[int]]:
    """Random words; nothing is shared."""
    random = np.random.default_rng(seed)
    return random.integers(FIRST, engine.config.vocab_size, (count, context)).tolist()


def first_token(engine: Engine, context: int, seed: int) -> float:
    """Seconds to the first token of one prompt that nobody has read."""
    request = Request(
        prompts(engine, context, 1, seed)[0], None, SamplingParams(max_tokens=1), remember=False
    )
    return engine.generate([request])[0].report.ttft_s


def decode_step(engine: Engine, context: int, sessions: int) -> float:
    """Seconds of one decode step of all sessions, whose prompts are cached from the second call
    on."""
    seconds = []
    for answer in (1, 1 + STEPS):
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        requests = [
            Request(prompt, None, sampling) for prompt in prompts(engine, context, sessions, 0)
        ]
        start = time.perf_counter()
        engine.generate(requests)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / STEPS


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of a prompt, by commas.")] = "1024,4096",
    sessions: Annotated[int, typer.Option(help="That decode together.")] = 8,
    rounds: int = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure both sides at all lengths."""
    lengths = [int(part) for part in contexts.split(",")]
    made = {"policy": "full", "dtype": "float32", "kv_gib": 1.0}
    engines = [Engine(MODEL_DIR, head_paging=by_head, **made) for by_head in (False, True)]  # type: ignore[arg-type]
    most = engines[0].config.max_position - STEPS - 1
    if not 128 <= min(lengths) <= max(lengths) <= most or sessions < 1:
        raise typer.BadParameter(f"contexts must be 128 to {most} tokens, and sessions at least 1")
    console, rows = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("head paging", total=len(lengths) * (rounds + 1))
        for context in lengths:
            times: list[list[tuple[float, float]]] = [[], []]
            for number in range(rounds + 1):  # the first does not count
                for engine, column in zip(engines, times, strict=True):
                    column.append(
                        (
                            first_token(engine, context, 1 + number),
                            decode_step(engine, context, sessions),
                        )
                    )
                progress.advance(task)
            for place, what in enumerate(("first token", f"decode step of {sessions}")):
                dense, by_head = ([1e3 * pair[place] for pair in column[1:]] for column in times)
                gain = statistics.median(a / b for a, b in zip(dense, by_head, strict=True))
                rows.append(
                    PagingResult(
                        what, context, statistics.median(dense), statistics.median(by_head), gain
                    )
                )
    configuration: dict[str, Any] = {
        "model": "by head", "heads kept": "7 of 32", "dtype": "float32", "rounds": rounds,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    table = Table("context", "", box=box.MARKDOWN)
    for name in ("dense ms", "by head ms", "faster"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.context), row.what, f"{row.dense_ms:.1f}", f"{row.by_head_ms:.1f}",
            f"{row.gain:.2f}x"
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
