"""Share of a grafted request's time that aligning takes in vLLM, and what the request gains; one
engine, in process.

python benchmarks/align_served.py [--tokens 4096 --tokens 8192] [--rounds 7] [--json]
"""

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from kvgraft.server.process import ENVIRONMENT
from overhead import IN_PROCESS, engine
from scenarios import SPARSEX_05, make_random_model
from servers import MEMORY, THREADS, restart_with

DOCUMENT_TOKENS = 512
BLOCK = 32
WARM_UP = 2  # rounds


def main(
    tokens: Annotated[list[int], typer.Option(help="Of a prompt (repeatable).")] = [4096, 8192],  # noqa: B006
    reuse: Annotated[float, typer.Option(help="Share of a prompt that was read before.")] = 0.98,
    rounds: Annotated[
        int, typer.Option(min=1, help="Prompts of each length, after two that warm up.")
    ] = 7,
    layers: Annotated[int, typer.Option(help="Of the random model.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer prompts with grafts and without in turn."""
    restart_with(ENVIRONMENT | MEMORY | IN_PROCESS | {"OMP_NUM_THREADS": str(THREADS)})
    with TemporaryDirectory() as folder:
        make_random_model(Path(folder), layers, max(tokens) + 128)
        llm = engine(folder)
        rows = [measure(llm.llm_engine, length, reuse, rounds) for length in tokens]
    if as_json:
        print(
            json.dumps(
                {
                    "reuse": reuse,
                    "layers": layers,
                    "rounds": rounds,
                    "policy": SPARSEX_05,
                    "rows": rows,
                }
            )
        )
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console().print(
        f"{reuse:.0%} known, {layers} layers, float32, {THREADS} threads, {SPARSEX_05}", table
    )


def measure(llm: Any, tokens: int, reuse: float, rounds: int) -> dict[str, float]:
    """Medians over rounds."""
    rng = np.random.default_rng(tokens)
    known = int(reuse * tokens) // BLOCK * BLOCK
    sizes = [DOCUMENT_TOKENS] * (known // DOCUMENT_TOKENS) + [known % DOCUMENT_TOKENS] * (
        known % DOCUMENT_TOKENS > 0
    )
    documents = [_text(rng, size) for size in sizes]
    for document in documents:
        answer(llm, document, {})
    found = []
    with progress_bar(Console(stderr=True), f"{tokens} tokens") as on_progress:
        for number in range(WARM_UP + rounds):
            before, after = (_text(rng, (tokens - known) // 2) for _ in range(2))
            prompt = (
                before
                + [token for at in rng.permutation(len(documents)) for token in documents[at]]
                + after
            )
            sides: dict[bool, tuple[float, dict[str, Any]]] = {}
            for grafts in (True, False) if number % 2 else (False, True):
                sides[grafts] = answer(
                    llm, prompt, dict(SPARSEX_05) if grafts else {"reuse": "off"}
                )
            (ours, report), (plain, _) = sides[True], sides[False]
            align = report["stages"]["align"]
            found.append((plain / ours, 1e3 * ours, 1e3 * align, align / ours))
            on_progress(number + 1, WARM_UP + rounds)
    names = ("plain / ours", "ours ms", "align ms", "share of align")
    return {"tokens": tokens} | dict(
        zip(names, map(statistics.median, zip(*found[WARM_UP:], strict=True)), strict=True)
    )


def answer(llm: Any, prompt: list[int], options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the only token of an answer, in a namespace of its own if nothing is reused; and
    the report."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"kvgraft": options}}
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, extra_args=extra)
    given: dict[str, Any] = {"prompt_token_ids": prompt}
    if options.get("reuse") == "off":
        given["cache_salt"] = str(time.perf_counter())
    start = time.perf_counter()
    llm.add_request("0", given, params)
    while llm.has_unfinished_requests():
        for output in llm.step():
            seconds, report = time.perf_counter() - start, output.kv_transfer_params["kvgraft"]
    return seconds, report


def _text(rng: np.random.Generator, tokens: int) -> list[int]:
    found: list[int] = rng.integers(1, 4096, tokens).tolist()
    return found


if __name__ == "__main__":
    typer.run(main)
