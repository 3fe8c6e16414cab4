"""What KVGraft costs a request that has nothing to reuse: one vLLM engine, with our connector and without it in turn.

Two servers cannot tell: two processes of one program differ by more than that.

    python benchmarks/overhead.py [--json]
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from kvgraft.evaluate.progress import progress_bar
from kvgraft.evaluate.servers import ENVIRONMENT
from kvgraft.evaluate.statistics import bootstrap
from scenarios import make_random_model
from servers import MEMORY, THREADS

IN_PROCESS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(
    tokens: Annotated[int, typer.Option(help="Of a prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Measured, after three that warm up.")] = 40,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time prompts of random tokens."""
    wanted = ENVIRONMENT | MEMORY | IN_PROCESS | {"OMP_NUM_THREADS": str(THREADS)}
    if not wanted.items() <= os.environ.items():  # malloc reads its settings when a program starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # noqa: S606
    with TemporaryDirectory() as folder:
        make_random_model(Path(folder), layers, tokens + 128)
        plain, ours = measure(engine(folder), tokens, rounds)
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    low, high = bootstrap(ratios, of=np.median)
    result = {
        "configuration": {"tokens": tokens, "layers": layers, "rounds": rounds, "threads": THREADS, "dtype": "float32"},
        "ratio": statistics.median(ratios), "low": low, "high": high,
        "plain_ms": statistics.median(plain), "ours_ms": statistics.median(ours),
        "cost_ms": statistics.median(b - a for a, b in zip(plain, ours, strict=True)),
    }  # fmt: skip
    print(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))


def engine(folder: str) -> Any:
    """vLLM with our connector, in this process."""
    from vllm import LLM

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    return LLM(
        folder, dtype="float32", block_size=32, enforce_eager=True, disable_log_stats=False, worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(),
    )  # fmt: skip


def measure(llm: Any, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of every round, without our connector and with it; every prompt is new."""
    from vllm import SamplingParams

    rng, sampling = np.random.default_rng(0), SamplingParams(max_tokens=1, temperature=0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with progress_bar(Console(stderr=True), "prompts") as on_progress:
        for number in range(-3, rounds):
            for attached in (False, True) if number % 2 else (True, False):
                prompt = {"prompt_token_ids": rng.integers(1, 4096, tokens).tolist()}
                with connector(llm, attached):
                    start = time.perf_counter()
                    llm.generate([prompt], sampling, use_tqdm=False)
                    if number >= 0:
                        seconds[attached].append(1e3 * (time.perf_counter() - start))
            on_progress(max(number, 0), rounds)
    return seconds[False], seconds[True]


@contextmanager
def connector(llm: Any, attached: bool) -> Iterator[None]:
    """Without it, scheduler and worker are those of plain vLLM."""
    from vllm.distributed.kv_transfer import kv_transfer_state as worker

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.connector, worker._KV_CONNECTOR_AGENT
    if not attached:
        scheduler.connector, worker._KV_CONNECTOR_AGENT = None, None
    try:
        yield
    finally:
        scheduler.connector, worker._KV_CONNECTOR_AGENT = before


if __name__ == "__main__":
    typer.run(main)
