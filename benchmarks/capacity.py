"""Sessions that fit the same KV memory, dense and with a map that keeps 12.5 % of the KV heads
whole.

They are counted by admitting them: an engine with room for a few dense sessions is given more than
fit, each a prompt of its own, and the most that are answered at one time count. Then the payload of
one session is written as it would cross a prefill-decode boundary. A random-weight model (speed
does not matter), local heads of 64 sinks and a window of 256 tokens.

    python benchmarks/capacity.py [--host vllm] [--contexts 8192,32768] [--json]
    python benchmarks/capacity.py --device cuda --shape 8b --memory-gb 64 --dtype bfloat16
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvgraft import Engine, Request, SamplingParams
from kvgraft.engine.config import load_config
from kvgraft.engine.decoder import DTYPES
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadClass, HeadMap, StreamLayout
from tables import markdown_table

KV_HEADS, VOCABULARY = 8, 64
# layers, size of a head: all that KV memory depends on
SHAPES = {"small": (2, 32), "8b": (32, 128)}
SINKS, WINDOW, STEP = 64, 256, 2048
ROUNDS = 5  # in which payloads are taken up
OFFERED = 9  # sessions, for each dense one that fits
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


@dataclass(frozen=True)
class CapacityResult:
    """One context length; bytes are of the safetensors file of one session, seconds what another
    engine takes until it has gone on from it; None if none was written."""

    context: int
    dense: int
    by_head: int
    gain: float
    dense_bytes: int | None = None
    by_head_bytes: int | None = None
    dense_s: float | None = None
    by_head_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """What all engines have in common."""

    shape: str = "small"
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def bytes_per_token(self) -> int:
        """Of dense KV."""
        layers, head_dim = SHAPES[self.shape]
        return 2 * layers * KV_HEADS * head_dim * DTYPES[self.dtype].itemsize


def make_model(directory: Path, length: int, shape: str) -> Path:
    """A random model of 16 KV heads, of which the map beside it keeps 2, and a tokenizer that
    nobody uses."""
    layers, head_dim = SHAPES[shape]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim,
        max_position_embeddings=length, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(
        directory
    )
    classes = (HeadClass.GLOBAL,) + (HeadClass.LOCAL,) * (KV_HEADS - 1)
    HeadMap(load_config(directory).identity, SINKS, WINDOW, (classes,) * layers).save(
        directory / "heads.json"
    )
    return directory


def answer_tokens(context: int, most: int) -> int:
    """So many that the first session still runs when the last prompt has been computed, in steps of
    STEP tokens."""
    return most * -(-context // STEP) + 64


def prompt(context: int, seed: int, answer: int) -> list[int]:
    """Its own for every session, so that nothing is shared; the answer fills the context."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, context - answer - 1).tolist()


def count_native(
    model: Path, context: int, memory: int, head_paging: bool, most: int, setting: Setting
) -> int:
    """Sessions that are answered at one time."""
    layout = StreamLayout.by_class(HeadMap.load(model / "heads.json")) if head_paging else None
    layers, head_dim = SHAPES[setting.shape]
    dense = StreamLayout.dense(layers, KV_HEADS)
    per_page = KVCache.bytes_per_page(layout or dense, 16, head_dim, DTYPES[setting.dtype])
    engine = Engine(
        model, dtype=setting.dtype, device=setting.device, num_pages=memory // per_page,
        max_prefill_tokens=STEP,
        head_paging=head_paging, policy="full",
    )  # fmt: skip
    answer = answer_tokens(context, most)
    sampling, peak, idle = SamplingParams(max_tokens=answer, ignore_eos=True), 0, 0
    for _ in engine.stream(
        [Request(prompt(context, seed, answer), None, sampling) for seed in range(most)]
    ):
        running = len(engine.scheduler.running)
        peak, idle = max(peak, running), 0 if running > peak else idle + 1
        # events: nobody was admitted for several steps, so who waits does not fit
        if idle > 4 * peak:
            break
    engine.check()
    return peak


def count_vllm(
    model: Path, context: int, memory: int, by_head: bool, most: int, setting: Setting
) -> int:
    """The same of vLLM, in a process of its own."""
    given = json.dumps([str(model), context, memory, by_head, most, setting.dtype])
    environment = os.environ | VLLM_ENVIRONMENT
    done = subprocess.run(
        [sys.executable, __file__, "--inside", given],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.rsplit("sessions: ", 1)[1])


def inside_vllm(model: str, context: int, memory: int, by_head: bool, most: int, dtype: str) -> int:
    """What `count_vllm` runs: sessions that are decoding at one time, none of them ever
    preempted."""
    from vllm import LLM
    from vllm import SamplingParams as Sampling

    heads = {
        "hf_overrides": {"architectures": ["KVGraftByHeadQwen3ForCausalLM"]},
        "additional_config": {"kvgraft_head_map": f"{model}/heads.json"},
    }
    llm = LLM(
        model, dtype=dtype, enforce_eager=True, block_size=32, kv_cache_memory_bytes=memory,
        max_num_seqs=most,
        max_model_len=context, max_num_batched_tokens=STEP, enable_prefix_caching=True,
        **(heads if by_head else {}),
    )  # fmt: skip
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    answer = answer_tokens(context, most)
    sampling = Sampling(temperature=0, max_tokens=answer, ignore_eos=True)
    for seed in range(most):
        engine.add_request(str(seed), {"prompt_token_ids": prompt(context, seed, answer)}, sampling)
    peak, idle = 0, 0
    while idle < 3 * (context // STEP) and not any(output.finished for output in engine.step()):
        running = [r for r in scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens]
        count = sum(r.num_preemptions == 0 for r in running)
        peak, idle = max(peak, count), 0 if count > peak else idle + 1
    return peak


def payloads(
    model: Path, context: int, directory: Path, setting: Setting
) -> tuple[list[int], list[float]]:
    """Of the files that hand a session over, dense and by head: bytes, and the median of the
    seconds until an engine has read one and computed the next token; the engines take turns."""
    sizes: list[int] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    engines, paths = [], []
    for head_paging in (False, True):
        engine = Engine(
            model, dtype=setting.dtype, device=setting.device, head_paging=head_paging,
            max_prefill_tokens=STEP,
            kv_gib=max(1.0, 1.5 * context * setting.bytes_per_token / 2**30), policy="full",
        )  # fmt: skip
        path = directory / f"payload-{head_paging}.safetensors"
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.prefill(Request(prompt(context, 0, 2), None, sampling), path)
        engine.clear_cache()
        sizes.append(path.stat().st_size)
        engines.append(engine)
        paths.append(path)
    for _ in range(ROUNDS):
        for times, engine, path in zip(seconds, engines, paths, strict=True):
            start = time.perf_counter()
            engine.resume(path)
            times.append(time.perf_counter() - start)
    return sizes, [statistics.median(times) for times in seconds]


def main(
    contexts: Annotated[
        str, typer.Option(help="Tokens of a session, prompt and answer, by commas.")
    ] = "8192,32768",
    dense_sessions: Annotated[
        int, typer.Option(help="Dense sessions that the memory is made for.")
    ] = 4,
    host: Annotated[str, typer.Option(help="native or vllm.")] = "native",
    memory_gb: Annotated[
        float, typer.Option(help="Of KV, in place of that; 0: by dense sessions.")
    ] = 0.0,
    shape: Annotated[str, typer.Option(help=" | ".join(SHAPES))] = "small",
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "float32",
    device: Annotated[str, typer.Option(help="Of the native engine.")] = "cpu",
    payload: Annotated[
        bool, typer.Option(help="Also write what crosses a prefill-decode boundary.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    inside: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Count sessions."""
    if inside is not None:
        print(f"sessions: {inside_vllm(*json.loads(inside))}")
        return
    if host not in ("native", "vllm"):
        raise typer.BadParameter(f"host {host!r}: choose native or vllm")
    for name, value, allowed in (("--shape", shape, SHAPES), ("--dtype", dtype, DTYPES)):
        if value not in allowed:
            raise typer.BadParameter(f"{name} {value!r}: allowed are {', '.join(allowed)}")
    lengths, setting = [int(part) for part in contexts.split(",")], Setting(shape, dtype, device)
    if min(lengths) < 1024:
        raise typer.BadParameter("contexts must have at least 1024 tokens")
    count = count_native if host == "native" else count_vllm
    console, rows = Console(stderr=True), []
    with (
        tempfile.TemporaryDirectory() as place,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("capacity", total=2 * len(lengths))
        model = make_model(Path(place) / "model", max(lengths), shape)
        for context in lengths:
            sessions = (
                int(memory_gb * 1e9 / (context * setting.bytes_per_token))
                if memory_gb
                else dense_sessions
            )
            if not sessions:
                raise typer.BadParameter(
                    f"--memory-gb {memory_gb}: too little for a session of {context} tokens"
                )
            memory = sessions * context * setting.bytes_per_token
            memory += memory // sessions // 64  # vLLM keeps one block of its own
            found = []
            for by_head in (False, True):
                found.append(
                    count(
                        model,
                        context,
                        memory,
                        by_head,
                        (OFFERED if by_head else 2) * sessions,
                        setting,
                    )
                )
                progress.advance(task)
            row = CapacityResult(context, found[0], found[1], found[1] / found[0])
            if payload and host == "native":
                sizes, seconds = payloads(model, context, Path(place), setting)
                row = CapacityResult(*list(asdict(row).values())[:4], *sizes, *seconds)
            rows.append(row)
    configuration: dict[str, Any] = {
        "host": host, "layers": SHAPES[shape][0], "dtype": dtype, "device": device,
        "KV heads": f"1 of {KV_HEADS} keeps everything", "sinks": SINKS, "window": WINDOW,
        "memory for": f"{memory_gb} GB" if memory_gb else f"{dense_sessions} dense sessions",
        "block size": 16 if host == "native" else 32, "tokens at a time": STEP,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    names = (
        "context",
        "dense",
        "by head",
        "gain",
        "dense MiB",
        "by head MiB",
        "fewer bytes",
        "dense s",
        "by head s",
    )
    table = markdown_table(names)
    for row in rows:
        size = [f"{n / 2**20:.1f}" if n else "-" for n in (row.dense_bytes, row.by_head_bytes)]
        ratio = (
            f"{row.dense_bytes / row.by_head_bytes:.1f}x"
            if row.dense_bytes and row.by_head_bytes
            else "-"
        )
        times = [f"{seconds:.3f}" if seconds else "-" for seconds in (row.dense_s, row.by_head_s)]
        table.add_row(
            f"{row.context // 1024}K",
            str(row.dense),
            str(row.by_head),
            f"{row.gain:.2f}x",
            *size,
            ratio,
            *times,
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
