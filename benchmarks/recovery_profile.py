"""Where the time of a recovery inside vLLM goes.

Milliseconds to the first token by policy, milliseconds in which the device is busy, and
milliseconds of each kernel. One process; vLLM makes up the weights of the model
(`load_format="dummy"`).

    python benchmarks/recovery_profile.py --device cuda --dtype bfloat16 --shape 8b --layers 32
"""

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from kvgraft.cli.progress import progress_bar
from kvgraft.policies import parse_policy
from kvgraft.server.process import ENVIRONMENT
from overhead import IN_PROCESS
from scenarios import make_random_model
from servers import GPU_SHARE
from ttft import SHAPES, make_prompts

OFF: dict[str, Any] = {"reuse": "off"}
POLICIES = ["full", "spread", "naive"]
LENGTHS = [8192, 32768]
DEVICES = ("cpu", "cuda")
ROOM = 128  # tokens of a context beyond the prompt
SHOWN = 20  # kernels


def main(
    tokens: Annotated[list[int], typer.Option(help="Of a prompt (repeatable).")] = LENGTHS,
    reuse: Annotated[float, typer.Option(min=0, max=1, help="Known share of a prompt.")] = 0.9,
    policies: Annotated[list[str], typer.Option(help="full: no reuse (repeatable).")] = POLICIES,
    rounds: Annotated[int, typer.Option(min=1, help="Of each, after one that warms up.")] = 5,
    shape: Annotated[str, typer.Option(help=f"Of the model: {', '.join(SHAPES)}.")] = "small",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 12,
    dtype: str = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda: what vLLM is built for.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compiled", help="Without enforce_eager.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time and profile prompts whose documents were read before in another order."""
    for name, value, known in (("shape", shape, SHAPES), ("device", device, DEVICES)):
        if value not in known:
            raise typer.BadParameter(f"--{name} {value!r} is not one of {', '.join(known)}")
    try:
        for policy in policies:
            parse_policy(policy)
    except ValueError as error:
        raise typer.BadParameter(f"--policies: {error}") from error

    os.environ.update(ENVIRONMENT | IN_PROCESS)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        progress_bar(Console(stderr=True), "policies") as on_progress,
    ):
        make_random_model(Path(folder), layers, max(tokens) + ROOM, SHAPES[shape], weights=False)
        llm = _engine(folder, dtype, compiled=compiled, on_gpu=device != "cpu")
        todo = [(length, policy) for length in tokens for policy in policies]
        for number, (length, policy) in enumerate(todo):
            on_progress(number, len(todo))
            rows.append(_measure(llm, length, policy, reuse, rounds, device))

    settings = {
        "shape": shape,
        "layers": layers,
        "dtype": dtype,
        "reuse": reuse,
        "compiled": compiled,
    }
    if as_json:
        print(json.dumps({"device": device, "settings": settings, "rows": rows}))
        return
    for row in rows:
        table = Table("kernel", "launches", "ms", title=_title(row))
        for kernel in row["kernels"][:SHOWN]:
            table.add_row(kernel["name"], str(kernel["launches"]), f"{kernel['ms']:.2f}")
        Console().print(table)


def _title(row: dict[str, Any]) -> str:
    times = f"{row['median_ms']:.1f} ms, device busy {row['busy_ms']:.1f} ms"
    return f"{row['tokens']} tokens, {row['policy']}: {times}"


def _engine(folder: str, dtype: str, *, compiled: bool, on_gpu: bool) -> Any:
    from vllm import LLM

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    memory = {"gpu_memory_utilization": GPU_SHARE} if on_gpu else {}
    return LLM(
        folder,
        dtype=dtype,
        load_format="dummy",
        block_size=32,
        enforce_eager=not compiled,
        worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(costs="tokens"),  # whatever reuse takes here
        **memory,
    )


def _measure(
    llm: Any,
    length: int,
    policy: str,
    reuse: float,
    rounds: int,
    device: str,
) -> dict[str, Any]:
    """Times of some prompts, and the profile of one more."""
    options = OFF if policy == "full" else {"policy": policy}
    times, report = [], dict[str, Any]()
    for number in range(rounds + 2):
        read, prompt = make_prompts(length, reuse, number)
        llm.reset_prefix_cache()
        _ask(llm, read, OFF)
        if number <= rounds:
            seconds, report = _ask(llm, prompt, options)
            times.append(1e3 * seconds)

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with profile(activities=kinds) as profiled:
        seconds, _ = _ask(llm, prompt, options)
    busy, kernels = _kernels(profiled)
    return {
        "tokens": length,
        "policy": policy,
        "ms": times[1:],
        "median_ms": statistics.median(times[1:]),
        "stages_ms": {stage: 1e3 * own for stage, own in report.get("stages", {}).items()},
        "recomputed": report.get("recomputed_tokens", 0),
        "profiled_ms": 1e3 * seconds,
        "busy_ms": busy,
        "kernels": kernels,
    }


def _ask(llm: Any, prompt: list[int], options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(seconds to the first token, KVGraft's report)."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"kvgraft": options}}
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, extra_args=extra)
    started = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return time.perf_counter() - started, (output.kv_transfer_params or {}).get("kvgraft", {})


def _kernels(profiled: profile) -> tuple[float, list[dict[str, Any]]]:
    """(ms in which the device does anything, its kernels and copies by their time)."""
    on_device = torch.autograd.DeviceType.CUDA
    events = [event for event in profiled.events() if event.device_type == on_device]
    found: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        span = event.time_range
        found[event.name].append(span.elapsed_us() / 1e3)
        busy += max(0.0, span.end - max(span.start, end)) / 1e3
        end = max(end, span.end)
    rows = [{"name": name, "launches": len(own), "ms": sum(own)} for name, own in found.items()]
    return busy, sorted(rows, key=lambda row: -row["ms"])


if __name__ == "__main__":
    typer.run(main)
