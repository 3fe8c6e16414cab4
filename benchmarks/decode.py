"""Decode steps, dense and under flows, on a random model in which attention dominates: time,
throughput, shares.

The layers are Qwen3-0.6B's, 16 query and 8 KV heads of 128: at 32K keys and values are four times
what the weights are; or, with latent attention, DeepSeek-V2-Lite's without experts. The context is
random keys and values, not a prompt: what flows choose has no meaning here, what it costs has. All
sides decode the same context in turn; medians and medians of paired ratios are printed. With
`--graphs` native sides are also measured with CUDA graphs; their shares are those of steps without,
since stages of a graph cannot be told apart.

    python benchmarks/decode.py [--host vllm | --attention mla] [--batches 1,4] [--device cuda]
        [--graphs] [--json]
"""

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from kvgraft import Engine
from kvgraft.cli.progress import progress_bar
from kvgraft.decode.flow import Program, trace
from kvgraft.engine.decoder import DTYPES
from kvgraft.engine.step_graphs import StepGraphs
from kvgraft.flows import DENSE, parse_flow
from kvgraft.kernels.watched import watched, watching
from kvgraft_lab.evaluate.decoding import Step, Steps, in_turn, wait
from scenarios import make_random_model
from servers import restart_with
from tables import markdown_table

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
MLA = {  # of DeepSeek-V2-Lite, without experts
    "hidden_size": 2048, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, Mapping[str, Any], int]] = {  # family, shape, numbers kept of a token
    "gqa": ("qwen3", SHAPE, 2 * 8 * 128),
    "mla": ("deepseek_v3", MLA, 512 + 64),
}
INDEXER, ATTENTION = "indexer", "attention"
STAGES = (INDEXER, "top-k", ATTENTION)  # the indexer's share holds that of its top-k
WITH_GRAPHS = ", CUDA graphs"  # behind the name of a side
MEMORY_GIB = 12.0  # of keys and values; configurations that need more are left out
FLOWS = ";".join(
    f"{flow},layers_skip=none"
    for flow in ("block_topk:topk_blocks=29", "block_topk:topk_blocks=61", "quest:topk_blocks=29")
)


@dataclass(frozen=True)
class DecodeResult:
    """One side at one length and batch size: ms of a step, tokens a second, ratio to dense of the
    whole step and of its attention with the indexer, shares of the step, and how many steps a CUDA
    graph has replayed."""

    host: str
    flow: str
    context: int
    batch: int
    step_ms: float
    tokens_per_s: float
    faster: float
    attention_faster: float
    shares: Mapping[str, float]
    replayed: int


class Clock:
    """Seconds of each stage; an indexer that runs inside attention, as vLLM's does, is no part of
    it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[str] = []

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what happens inside."""
        self._open.append(stage)
        wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            wait()
            seconds = time.perf_counter() - start
            self._open.pop()
            self.seconds[stage] += seconds
            if stage == INDEXER and ATTENTION in self._open:
                self.seconds[ATTENTION] -= seconds


class Native:
    """The native engine, its pool full of random keys and values."""

    name = "native"

    def __init__(
        self, folder: Path, flows: list[str], context: int, batch: int, block: int,
        place: tuple[str, str], *,
        graphs: bool,
    ) -> None:  # fmt: skip
        pages, (dtype, device) = batch * (-(-context // block) + 1), place
        self.engine = Engine(folder, dtype=dtype, device=device, num_pages=pages, block_size=block)
        steps = Steps(self.engine, context, batch)
        self.sides = {flow: steps.of(flow, enforce_eager=True)[0] for flow in [DENSE, *flows]}
        self.graphs = {}
        for flow in [DENSE, *flows] if graphs else []:
            name = flow + WITH_GRAPHS
            self.sides[name], self.graphs[name] = steps.of(flow)


class Attention:
    """vLLM's implementation of one attention layer, watched, and without what prompts would
    take."""

    def __init__(self, impl: Any) -> None:
        self._impl = impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    @watched(ATTENTION)
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        """As in vLLM; zeros for a step that reads a prompt."""
        if attn_metadata is not None and attn_metadata.max_query_len > 1:
            return output.zero_()
        return self._impl.forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *rest, **named
        )

    def under(self, program: Program | None) -> "Attention":
        """The same layer under a flow, with caches of its own."""
        impl = copy(self._impl)
        impl.follow(program)
        return Attention(impl)


class Vllm:
    """vLLM with our backend, whose prompts skip attention: only steps that decode are of
    interest."""

    name = "vllm"

    graphs: Mapping[str, StepGraphs] = {}  # vLLM's own are not used

    def __init__(
        self, folder: Path, flows: list[str], context: int, batch: int, block: int,
        place: tuple[str, str], *,
        graphs: bool,
    ) -> None:  # fmt: skip
        from vllm import LLM, SamplingParams

        from kvgraft.vllm.compat import FLOW, WORKER_CLASS
        from kvgraft.vllm.sparse.attention import SparseImpl

        blocks = batch * (-(-(context + 4096) // block) + 1) + 1
        self.llm = LLM(
            str(folder), dtype=place[0], enforce_eager=True, block_size=block,
            max_model_len=context + 4096,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=blocks * block * 8 * 128 * 2 * 4 * 4,
            enable_prefix_caching=False, worker_cls=WORKER_CLASS,
            additional_config={FLOW: flows[0]},
        )  # fmt: skip
        self._engine = self.llm.llm_engine
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._builder = runner.attn_groups[0][0].get_metadata_builder()
        modules = [
            m
            for m in runner.get_model().modules()
            if isinstance(getattr(m, "impl", None), SparseImpl)
        ]
        self._programs = {flow: self._program(flow, block) for flow in [DENSE, *flows]}
        self._layers = {  # by flow
            flow: [(module, Attention(module.impl).under(program)) for module in modules]
            for flow, program in self._programs.items()
        }
        self._choose(flows[0])
        prompt = {"prompt_token_ids": np.random.default_rng(0).integers(1, 4096, context).tolist()}
        sampling = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
        for number in range(batch):
            self._engine.add_request(str(number), prompt, sampling)
        scheduler = self._engine.engine_core.engine_core.scheduler
        while not all(r.num_output_tokens > 1 for r in scheduler.requests.values()):
            self._engine.step()
        self.sides: dict[str, Step] = {flow: partial(self._step, flow) for flow in self._programs}

    def _choose(self, flow: str) -> None:
        for module, attention in self._layers[flow]:
            module.impl = attention
        self._builder.program = self._programs[flow]

    def _step(self, flow: str) -> None:
        self._choose(flow)
        self._engine.step()

    @staticmethod
    def _program(flow: str, block: int) -> Program | None:
        found = parse_flow(flow)
        return None if found is None else trace(found, block, 128, 2)


def measure(host: Any, context: int, batch: int, rounds: int) -> list[DecodeResult]:
    """All sides in turn; then each once more, watched."""
    times = in_turn(host.sides, rounds)
    rows, dense = [], 0.0
    for name, column in times.items():
        clock, seconds = Clock(), 0.0
        with watching(clock.timed):
            for _ in range(rounds):
                start = time.perf_counter()
                host.sides[name]()
                wait()
                seconds += time.perf_counter() - start
        ratio = statistics.median(
            dense / own for dense, own in zip(times[DENSE], column, strict=True)
        )
        own = clock.seconds[INDEXER] + clock.seconds[ATTENTION]
        dense = dense or own  # the first side
        shares = {stage: found / seconds for stage, found in clock.seconds.items()}
        step, steps = statistics.median(column), host.graphs.get(name)
        replayed = 0 if steps is None else steps.counts["replayed"]
        rows.append(
            DecodeResult(
                host.name,
                name,
                context,
                batch,
                1e3 * step,
                batch / step,
                ratio,
                dense / own,
                shares,
                replayed,
            )
        )
    return rows


@torch.inference_mode()
def main(
    host: Annotated[str, typer.Option(help="native | vllm")] = "native",
    contexts: Annotated[str, typer.Option(help="Tokens, by commas.")] = "4096,16384,32768,131072",
    batches: Annotated[str, typer.Option(help="Sequences of a step, by commas.")] = "1,4,16",
    flows: Annotated[str, typer.Option(help="By semicolons.")] = FLOWS,
    attention: Annotated[str, typer.Option(help="gqa, or natively mla")] = "gqa",
    layers: int = 2,
    block: Annotated[
        int, typer.Option(help="Tokens of a page: 16, 32 or 64; vLLM on CPU has no 16.")
    ] = 16,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "float32",
    device: str = "cpu",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Measure CUDA graphs, too; natively.")
    ] = False,
    rounds: int = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all configurations that fit."""
    made: dict[str, Any] = {"native": Native, "vllm": Vllm}
    if host not in made:
        raise typer.BadParameter(f"host must be native or vllm, got {host!r}")
    if attention not in MODELS or (attention, host) == ("mla", "vllm"):
        raise typer.BadParameter(f"attention must be gqa, or natively mla, got {attention!r}")
    if graphs and host == "vllm":
        raise typer.BadParameter("--graphs is of the native host: leave --host out")
    family, shape, kept = MODELS[attention]
    if host == "vllm":
        wanted = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": str(os.cpu_count()),
        }  # fmt: skip
        restart_with(wanted)
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
            loaded = made[host](
                Path(folder), sides, context, batch, block, (dtype, device), graphs=graphs
            )
            rows += measure(loaded, context, batch, rounds)
    configuration = {
        "host": host, "attention": attention, "layers": layers, "block": block, "dtype": dtype,
        "device": device,
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
    names = ("", "context", "batch", "step ms", "tokens/s", "faster", "attention faster", *STAGES)
    table = markdown_table(names)
    for row in rows:
        shares = [f"{row.shares[stage]:.0%}" for stage in STAGES]
        table.add_row(
            row.flow, f"{row.context // 1024}K", str(row.batch), f"{row.step_ms:.2f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.faster:.2f}x", f"{row.attention_faster:.1f}x", *shares,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
