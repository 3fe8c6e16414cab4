"""CPU time of admission in the native engine: what is found of a prompt, which runs are grafted,
and the plan.

A tiny random model reads documents of about 256 tokens, then prompts with them in another order
between new text are admitted, and let go again. What is printed is the least of several runs, in
CPU milliseconds of one thread.

    OMP_NUM_THREADS=1 python benchmarks/admission.py [--tokens 8192] [--known 0.9] [--json]
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core import block_index
from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.plan import Plan
from kvgraft.core.provenance import BlockProvenance
from kvgraft.engine.lookup import CacheLookup
from kvgraft.engine.memory import Memory
from launches import SHAPE, VOCAB
from tables import markdown_table
from ttft import make_model

DOCUMENT_TOKENS = 256
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "hash": ((BlockProvenance, "chains"), (block_index, "window_hashes")),
    "look up": ((CacheLookup, "_exact_hits"), (VirtualBlockIndex, "_candidates")),
    "select": (
        (VirtualBlockIndex, "_claim"),
        (VirtualBlockIndex, "_extend"),
        (VirtualBlockIndex, "_as_matches"),
    ),
    "plan": ((Plan, "for_prompt"), (Memory, "_start")),
    "rest": ((Memory, "admit"),),
}


def make_prompts(tokens: int, known: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """(what is read before, a prompt of so many tokens with this share of known ones)."""
    random = np.random.default_rng(seed)
    num_known = round(tokens * known)
    documents = np.array_split(
        random.integers(1, VOCAB, num_known), max(tokens // DOCUMENT_TOKENS, 1)
    )
    before, behind = np.array_split(random.integers(1, VOCAB, tokens - num_known), 2)
    prompt = [before, *(documents[number] for number in random.permutation(len(documents))), behind]
    return np.concatenate([random.integers(1, VOCAB, 7), *documents]).tolist(), np.concatenate(
        prompt
    ).tolist()


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """CPU seconds of each part, without those of parts inside of it."""
    seconds = dict.fromkeys(PARTS, 0.0)
    running: list[str] = []

    def watched(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            running.append(part)
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                elapsed = time.thread_time() - start
                seconds[running.pop()] += elapsed
                if running:
                    seconds[running[-1]] -= elapsed

        return call

    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, watched(part, getattr(owner, name))))
        yield seconds


def measure(model: Path, tokens: int, known: float, runs: int) -> dict[str, float]:
    """Milliseconds of each part and of all, the least of `runs`."""
    read, prompt = make_prompts(tokens, known)
    engine = Engine(model, num_pages=5 * tokens // 2 // 16, max_prefill_tokens=tokens)
    engine.generate([Request(read, "full", ONE_TOKEN)])
    found: dict[str, list[float]] = {part: [] for part in ("all", *PARTS)}
    for run in range(2 * runs):
        sequence = engine._sequence(0, Request(prompt, "naive", ONE_TOKEN, remember=False))
        with ExitStack() as stack:
            # watching takes time: "all" is timed without
            seconds = stack.enter_context(timed()) if run % 2 else {}
            start = time.thread_time()
            engine.memory.admit(sequence, idle=True)
            elapsed = time.thread_time() - start
        engine.memory.release(sequence)
        for part, spent in (seconds or {"all": elapsed}).items():
            found[part].append(1e3 * spent)
    return {part: min(times) for part, times in found.items()}


def main(
    lengths: Annotated[list[int], typer.Option("--tokens", min=16)] = [2048, 8192, 32768],  # noqa: B006
    known: Annotated[list[float], typer.Option(min=0, max=1, help="Share of a prompt.")] = [  # noqa: B006
        0.0,
        0.5,
        0.9,
    ],
    runs: Annotated[int, typer.Option(min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure, and print a row for each length and share."""
    torch.set_num_threads(1)
    cases = [(tokens, share) for tokens in lengths for share in known]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 1, 2 * max(lengths), SHAPE)
        progress = track(cases, "measuring", console=Console(stderr=True), transient=True)
        rows = [
            (tokens, share, measure(Path(folder), tokens, share, runs))
            for tokens, share in progress
        ]
    if as_json:
        print(
            json.dumps(
                [{"tokens": tokens, "known": share, "ms": parts} for tokens, share, parts in rows]
            )
        )
        return
    table = markdown_table(["tokens", "known", *(f"{part}, ms" for part in ("all", *PARTS))])
    for tokens, share, parts in rows:
        table.add_row(str(tokens), f"{share:.0%}", *(f"{spent:.2f}" for spent in parts.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
