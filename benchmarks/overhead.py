"""What KVGraft costs where it has nothing to graft: one vLLM engine, with our connector and without
it in turn.

Two servers cannot tell: two processes of one program differ by more than that.

    python benchmarks/overhead.py [--turns 10] [--json]
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import ENVIRONMENT
from kvgraft_lab.evaluate.statistics import bootstrap
from scenarios import make_random_model
from servers import MEMORY, THREADS, restart_with

IN_PROCESS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
WARM_UP = 3  # sessions


def main(
    tokens: Annotated[int, typer.Option(help="Of a prompt; later turns add as many.")] = 1024,
    turns: Annotated[
        int, typer.Option(min=1, help="Prompts of a session, each begins with the one before.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=2, help="Sessions measured, after three that warm up.")
    ] = 40,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time prompts of random tokens."""
    restart_with(ENVIRONMENT | MEMORY | IN_PROCESS | {"OMP_NUM_THREADS": str(THREADS)})
    with TemporaryDirectory() as folder:
        make_random_model(Path(folder), layers, turns * tokens + 128)
        plain, ours = measure(engine(folder), tokens, turns, rounds)
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    low, high = bootstrap(ratios, of=np.median)
    result = {
        "configuration": {
            "tokens": tokens, "turns": turns, "layers": layers, "rounds": rounds,
            "threads": THREADS,
            "dtype": "float32",
        },
        "ratio": statistics.median(ratios), "low": low, "high": high,
        "plain_ms": statistics.median(plain), "ours_ms": statistics.median(ours),
        "cost_ms": statistics.median(b - a for a, b in zip(plain, ours, strict=True)),
    }  # fmt: skip
    print(
        json.dumps(result)
        if as_json
        else "\n".join(f"{name}: {value}" for name, value in result.items())
    )


def engine(folder: str) -> Any:
    """vLLM with our connector, in this process."""
    from vllm import LLM

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    return LLM(
        folder, dtype="float32", block_size=32, enforce_eager=True, disable_log_stats=False,
        worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(),
    )  # fmt: skip


def measure(llm: Any, tokens: int, turns: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first tokens of every session, without our connector and with it; every
    text is new."""
    rng = np.random.default_rng(0)
    times = np.zeros((2, rounds + WARM_UP))  # [without and with it, session]
    with progress_bar(Console(stderr=True), "sessions") as on_progress:
        for number in range(rounds + WARM_UP):
            texts = rng.integers(1, 4096, (2, turns * tokens))
            for turn in range(turns):
                for attached in (False, True) if (number + turn) % 2 else (True, False):
                    with connector(llm, attached):
                        prompt = texts[int(attached), : (turn + 1) * tokens].tolist()
                        times[int(attached), number] += 1e3 * time_to_first_token(
                            llm.llm_engine, prompt
                        )
            on_progress(number + 1, rounds + WARM_UP)
    return times[0, WARM_UP:].tolist(), times[1, WARM_UP:].tolist()


def time_to_first_token(engine: Any, prompt: list[int]) -> float:
    """Seconds; the answer has two tokens, so that what is done at its end counts only if it comes
    before the first."""
    from vllm import SamplingParams

    start = time.perf_counter()
    engine.add_request(
        "0",
        {"prompt_token_ids": prompt},
        SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
    )
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    first = time.perf_counter() - start
    while engine.has_unfinished_requests():
        engine.step()
    return first


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
