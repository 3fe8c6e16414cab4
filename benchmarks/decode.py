"""Decode steps, dense and under flows, on a random model in which attention dominates: time, throughput, shares.

The layers are Qwen3-0.6B's, 16 query and 8 KV heads of 128: at 32K keys and values are four times what the weights are;
or, with latent attention, DeepSeek-V2-Lite's without experts.
The context is random keys and values, not a prompt: what flows choose has no meaning here, what it costs has. All sides
decode the same context in turn; medians and medians of paired ratios are printed.

    python benchmarks/decode.py [--host vllm | --attention mla] [--batches 1,4] [--device cuda] [--json]
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvgraft import Engine
from kvgraft.decode import indexer as indexing
from kvgraft.decode import operators
from kvgraft.decode.flows import DENSE, parse_flow
from kvgraft.engine import decode as decoding
from kvgraft.engine.decoder import DTYPES
from kvgraft.evaluate.decoding import Step, Steps, in_turn, wait
from kvgraft.evaluate.progress import progress_bar
from scenarios import make_random_model

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
MLA = {  # of DeepSeek-V2-Lite, without experts
    "hidden_size": 2048, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, Mapping[str, Any], int]] = {  # family, shape, numbers kept of a token
    "gqa": ("qwen3", SHAPE, 2 * 8 * 128),
    "mla": ("deepseek_v3", MLA, 512 + 64),
}
STAGES = ("indexer", "top-k", "attention")  # the indexer's share holds that of its top-k
MEMORY_GIB = 12.0  # of keys and values; configurations that need more are left out
FLOWS = ";".join(
    f"{flow},layers_skip=none"
    for flow in ("block_topk:topk_blocks=29", "block_topk:topk_blocks=61", "quest:topk_blocks=29")
)


@dataclass(frozen=True)
class DecodeResult:
    """One side at one length and batch size: ms of a step, tokens a second, ratio to dense of the whole step and of
    its attention with the indexer, and shares of the step."""

    host: str
    flow: str
    context: int
    batch: int
    step_ms: float
    tokens_per_s: float
    faster: float
    attention_faster: float
    shares: Mapping[str, float]


class Clock:
    """Seconds of each stage, while it runs."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def watching(self, attention: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """Time the stages wherever they are called; attention are functions of modules, dense and sparse."""
        places: dict[str, list[tuple[Any, str]]] = {
            "indexer": [(indexing, "select"), (indexing, "tables"), (indexing, "fill")],
            "top-k": [(operators, "radix_topk")],
            "attention": [*attention],
        }
        before = [(owner, name, getattr(owner, name)) for found in places.values() for owner, name in found]
        for stage, found in places.items():
            for owner, name in found:
                setattr(owner, name, self._timed(stage, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            self.seconds[stage] += time.perf_counter() - start
            return result

        return timed


class Native:
    """The native engine, its pool full of random keys and values."""

    name, watched = "native", ((indexing, "block_sparse_attention"), (decoding, "segpaged_attention"))

    def __init__(self, folder: Path, flows: list[str], context: int, batch: int, block: int, place: tuple[str, str]):
        pages, (dtype, device) = batch * (-(-context // block) + 1), place
        self.engine = Engine(folder, dtype=dtype, device=device, num_pages=pages, block_size=block)
        steps = Steps(self.engine, context, batch)
        self.sides = {flow: steps.under(flow) for flow in [DENSE, *flows]}


class Vllm:
    """vLLM with our backend, whose prompts skip attention: only steps that decode are of interest."""

    name = "vllm"

    def __init__(self, folder: Path, flows: list[str], context: int, batch: int, block: int, place: tuple[str, str]):
        from vllm import LLM, SamplingParams
        from vllm import _custom_ops as ops

        from kvgraft.vllm.compat import FLOW, WORKER_CLASS
        from kvgraft.vllm.sparse.attention import SparseImpl

        self.watched = ((ops, "cpu_attention_with_kv_cache"), (ops, "cpu_attn_get_scheduler_metadata"))
        blocks = batch * (-(-(context + 4096) // block) + 1) + 1
        self.llm = LLM(
            str(folder), dtype=place[0], enforce_eager=True, block_size=block, max_model_len=context + 4096,
            num_gpu_blocks_override=blocks, kv_cache_memory_bytes=blocks * block * 8 * 128 * 2 * 4 * 4,
            enable_prefix_caching=False, worker_cls=WORKER_CLASS, additional_config={FLOW: flows[0]},
        )  # fmt: skip
        engine = self.llm.llm_engine
        runner = engine.model_executor.driver_worker.worker.model_runner
        builder = runner.attn_groups[0][0].get_metadata_builder()
        impls = [m.impl for m in runner.get_model().modules() if isinstance(getattr(m, "impl", None), SparseImpl)]
        forward = SparseImpl.forward

        def skipping(impl: Any, *args: Any, **kwargs: Any) -> Any:
            metadata, output = args[5], args[6] if len(args) > 6 else kwargs["output"]
            if metadata is not None and metadata.max_query_len > 1:
                return output.zero_()
            return forward(impl, *args, **kwargs)

        SparseImpl.forward = skipping  # type: ignore[method-assign, assignment]
        prompt = {"prompt_token_ids": np.random.default_rng(0).integers(1, 4096, context).tolist()}
        for number in range(batch):
            engine.add_request(str(number), prompt, SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True))
        scheduler = engine.engine_core.engine_core.scheduler
        while not all(r.num_output_tokens > 1 for r in scheduler.requests.values()):
            engine.step()
        programs = {flow: self._program(flow, block) for flow in [DENSE, *flows]}
        caches: dict[str, dict[Any, Any]] = {flow: dict.fromkeys(impls) for flow in programs}
        self._now = flows[0]

        def step(flow: str) -> None:
            for impl in impls:
                caches[self._now][impl] = impl._caches
                impl._program, impl._caches = programs[flow], caches[flow][impl]
            builder.program, self._now = programs[flow], flow
            engine.step()

        self.sides: dict[str, Step] = {flow: partial(step, flow) for flow in programs}

    @staticmethod
    def _program(flow: str, block: int) -> Any:
        from kvgraft.decode.flow import trace

        found = parse_flow(flow)
        return None if found is None else trace(found, block, 128, 2)


def measure(host: Any, context: int, batch: int, rounds: int) -> list[DecodeResult]:
    """All sides in turn; then each once more, watched."""
    times = in_turn(host.sides, rounds)
    rows, dense = [], 0.0
    for name, column in times.items():
        clock, seconds = Clock(), 0.0
        with clock.watching(host.watched):
            for _ in range(rounds):
                start = time.perf_counter()
                host.sides[name]()
                wait()
                seconds += time.perf_counter() - start
        ratio = statistics.median(dense / own for dense, own in zip(times[DENSE], column, strict=True))
        own = clock.seconds["indexer"] + clock.seconds["attention"]
        dense = dense or own  # the first side
        shares = {stage: found / seconds for stage, found in clock.seconds.items()}
        step = statistics.median(column)
        rows.append(DecodeResult(host.name, name, context, batch, 1e3 * step, batch / step, ratio, dense / own, shares))
    return rows


@torch.inference_mode()
def main(
    host: Annotated[str, typer.Option(help="native | vllm")] = "native",
    contexts: Annotated[str, typer.Option(help="Tokens, by commas.")] = "4096,16384,32768,131072",
    batches: Annotated[str, typer.Option(help="Sequences of a step, by commas.")] = "1,4,16",
    flows: Annotated[str, typer.Option(help="By semicolons.")] = FLOWS,
    attention: Annotated[str, typer.Option(help="gqa, or natively mla")] = "gqa",
    layers: int = 2,
    block: Annotated[int, typer.Option(help="Tokens of a page: 16, 32 or 64; vLLM on CPU has no 16.")] = 16,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "float32",
    device: str = "cpu",
    rounds: int = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all configurations that fit."""
    made: dict[str, Any] = {"native": Native, "vllm": Vllm}
    if host not in made:
        raise typer.BadParameter(f"host must be native or vllm, got {host!r}")
    if attention not in MODELS or (attention, host) == ("mla", "vllm"):
        raise typer.BadParameter(f"attention must be gqa, or natively mla, got {attention!r}")
    family, shape, kept = MODELS[attention]
    if host == "vllm":
        wanted = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": str(os.cpu_count()),
        }  # fmt: skip
        if not wanted.items() <= os.environ.items():
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # noqa: S606
    lengths, sizes = ([int(part) for part in text.split(",")] for text in (contexts, batches))
    itemsize, sides = DTYPES[dtype].itemsize, flows.split(";")
    rows, left_out = [], []
    todo = [(context, batch) for context in lengths for batch in sizes]
    with (
        TemporaryDirectory() as folder,
        progress_bar(Console(stderr=True), "decode") as on_progress,
    ):
        make_random_model(Path(folder), layers, max(lengths) + 8192, shape, family)
        for number, (context, batch) in enumerate(todo):
            on_progress(number, len(todo))
            if batch * context * layers * kept * itemsize > MEMORY_GIB * 2**30:
                left_out.append(f"{context // 1024}K x {batch}")
                continue
            if host == "vllm":
                block = max(block, 32)
            rows += measure(
                made[host](Path(folder), sides, context, batch, block, (dtype, device)), context, batch, rounds
            )
    configuration = {
        "host": host, "attention": attention, "layers": layers, "block": block, "dtype": dtype, "device": device,
        "rounds": rounds, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "left out, too large": left_out,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    Console().print(table_of(rows))


def table_of(rows: list[DecodeResult]) -> Table:
    """One line a side, length and batch."""
    table = Table("", box=box.MARKDOWN)
    for name in ("context", "batch", "step ms", "tokens/s", "faster", "attention faster", *STAGES):
        table.add_column(name, justify="right")
    for row in rows:
        shares = [f"{row.shares[stage]:.0%}" for stage in STAGES]
        table.add_row(
            row.flow, f"{row.context // 1024}K", str(row.batch), f"{row.step_ms:.2f}", f"{row.tokens_per_s:.0f}",
            f"{row.faster:.2f}x", f"{row.attention_faster:.1f}x", *shares,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
