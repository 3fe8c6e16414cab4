"""SegPagedAttention against dense attention, with and without a mask, on attention layers of
Qwen3-32B's shape.

Decode is one query, prefill a chunk of queries behind the context (the paper's prefill grows
linearly with it). Local heads see 64 sinks and a window of 256. Ours reads a paged pool through
page lists; dense attention reads contiguous tensors and is the fastest of three forms. The sides
alternate; medians and the median of the paired ratios are printed.

    python -m research.redknot.segpaged [--device cuda --layers 64 --queries 512]
        [--dtype bfloat16] [--json]
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.engine.decoder import DTYPES
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadClass, HeadMap, StreamLayout
from kvgraft.kv.lists import PageLists
from kvgraft.kv.pages import PagePool

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
SINKS, WINDOW = 64, 256
MAPS = {"half local": 4, "12.5 % global": 1}  # KV heads of a layer that keep everything
Side = Callable[[], object]


@dataclass(frozen=True)
class PhaseResult:
    """One phase at one context length; milliseconds of all layers, and how many times faster ours
    is."""

    heads: str
    phase: str
    context: int
    ours_ms: float
    dense_ms: float
    dense_form: str
    masked_ms: float | None
    over_dense: float
    over_masked: float | None


class Layers:
    """The same keys and values twice: dense [L, Hkv, T, d], and in the pages of their heads."""

    def __init__(
        self,
        kept: int,
        context: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        scattered: bool,
    ) -> None:
        classes = (HeadClass.GLOBAL,) * kept + (HeadClass.LOCAL,) * (KV_HEADS - kept)
        self.layout = StreamLayout.by_class(
            HeadMap("benchmark", SINKS, WINDOW, (classes,) * num_layers)
        )
        shape = (num_layers, KV_HEADS, context, HEAD_DIM)
        generator = torch.Generator(device).manual_seed(0)
        self.keys, self.values = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for _ in range(2)
        )
        blocks = -(-context // BLOCK)
        pool = PagePool(2 * blocks + 64 * self.layout.num_local_lists, BLOCK)
        order = (
            np.random.default_rng(0).permutation(pool.num_pages)
            if scattered
            else np.arange(pool.num_pages)
        )
        self.cache = KVCache(self.layout, pool.num_pages, BLOCK, HEAD_DIM, dtype, device)
        self.lists = PageLists(self.layout, blocks, BLOCK, device)
        self.lists.place(slice(0, 1), np.arange(blocks), order[np.array([pool.allocate(blocks)])])
        self.blocks, self.pool, self.order, self.context = blocks, pool, order, context

    def fill(self, num_queries: int) -> AttentionLayout:
        """Give local heads the pages that these last queries see, copy the tokens, and lay out the
        queries."""
        here = np.arange(self.blocks)
        seen = here[self.layout.seen(here, self.context - num_queries, BLOCK)]
        missing = seen[self.lists.pages[1, seen] < 0]
        count = missing.size * self.layout.num_local_lists
        pages = self.order[np.array(self.pool.allocate(count), np.int64)].reshape(-1, missing.size)
        self.lists.place(slice(1, None), missing, pages)
        slots = self.lists.slots[:, : self.context]
        for index, heads in enumerate(self.layout.layers):
            for head, (stream, page_list) in enumerate(
                zip(heads.streams, heads.page_lists, strict=True)
            ):
                held = slots[page_list] >= 0
                self.cache.keys[stream, slots[page_list][held]] = self.keys[index, head, held]
                self.cache.values[stream, slots[page_list][held]] = self.values[index, head, held]
        positions = torch.arange(self.context - num_queries, self.context)
        return AttentionLayout.of([positions], [slots], SINKS, WINDOW)


def sides(layers: Layers, num_queries: int) -> Iterator[tuple[str, Side]]:
    """What is timed, by name: `ours`, `masked`, and forms of dense attention without a mask."""
    layout, cache, keys, values = layers.fill(num_queries), layers.cache, layers.keys, layers.values
    num_layers, groups = len(layers.layout.layers), QUERY_HEADS // KV_HEADS
    generator = torch.Generator(keys.device).manual_seed(1)
    shape = (num_layers, num_queries, QUERY_HEADS, HEAD_DIM)
    query = torch.randn(shape, generator=generator, device=keys.device, dtype=torch.float32).to(
        keys.dtype
    )
    scale = HEAD_DIM**-0.5
    by_head = query.transpose(1, 2)  # [L, Hq, n, d]
    folded = by_head.unflatten(1, (KV_HEADS, groups)).flatten(2, 3)  # [L, Hkv, G * n, d]
    here = torch.arange(layers.context, device=keys.device)
    at = here[layers.context - num_queries :, None]
    causal = here <= at
    local = torch.tensor(layers.layout.layers[0].local, device=keys.device).repeat_interleave(
        groups
    )
    mask = causal & ((here < SINKS) | (here > at - WINDOW) | ~local[:, None, None])  # [Hq, n, T]

    def ours(index: int) -> Tensor:
        heads = layers.layout.layers[index]
        return segpaged_attention(query[index], cache.keys, cache.values, heads, layout, scale)

    def masked(index: int) -> Tensor:
        return scaled_dot_product_attention(
            by_head[index][None],
            keys[index][None],
            values[index][None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )

    def grouped(index: int) -> Tensor:
        return scaled_dot_product_attention(
            by_head[index][None],
            keys[index][None],
            values[index][None],
            scale=scale,
            enable_gqa=True,
        )

    def one_product(index: int) -> Tensor:
        return scaled_dot_product_attention(
            folded[index][None], keys[index][None], values[index][None], scale=scale
        )

    def two_products(index: int) -> Tensor:
        weights = torch.bmm(folded[index] * scale, keys[index].transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, values[index])

    tolerance = 2e-5 if keys.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        ours(0), masked(0)[0].transpose(0, 1), atol=tolerance, rtol=tolerance
    )
    forms: dict[str, Callable[[int], Tensor]] = {
        "ours": ours,
        "masked": masked,
        "SDPA, GQA": grouped,
    }
    forms |= {"SDPA, folded": one_product}
    # weights that fit, and are exact
    if num_queries * layers.context <= 64 * 32768 and keys.dtype is torch.float32:
        forms |= {"two products": two_products}
    for name, form in forms.items():
        yield name, partial(_through, form, num_layers)


def _through(form: Callable[[int], Tensor], num_layers: int) -> None:
    for index in range(num_layers):
        form(index)


def measure(found: dict[str, Side], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every side in every round, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, side in found.items():
            start = time.perf_counter()
            side()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def row_of(heads: str, phase: str, context: int, times: dict[str, list[float]]) -> PhaseResult:
    """Medians, against the dense form that is fastest."""
    median = {name: statistics.median(column) for name, column in times.items()}
    best = min(
        (name for name in times if name not in ("ours", "masked")), key=lambda name: median[name]
    )

    def ratio(name: str) -> float:
        return statistics.median(
            other / ours for other, ours in zip(times[name], times["ours"], strict=True)
        )

    return PhaseResult(
        heads, phase, context, median["ours"], median[best], best, median["masked"], ratio(best),
        ratio("masked")
    )  # fmt: skip


@torch.inference_mode()
def main(
    contexts: Annotated[str, typer.Option(help="Tokens, by commas.")] = "8192,32768,131072",
    layers: Annotated[int, typer.Option(help="Attention layers that a round runs through.")] = 2,
    queries: Annotated[int, typer.Option(help="Of a prefill chunk.")] = 64,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "float32",
    device: str = "cpu",
    rounds: int = 7,
    scattered: Annotated[
        bool, typer.Option("--scattered", help="Pages of the pool in random order.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time all sides at all lengths."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    lengths = [int(part) for part in contexts.split(",")]
    if min(lengths) < queries:
        raise typer.BadParameter(
            f"contexts must have at least {queries} tokens, as many as there are queries"
        )
    where, rows = torch.device(device), []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("segpaged", total=len(lengths) * len(MAPS) * 2)
        for context in lengths:
            for name, kept in MAPS.items():
                made = Layers(kept, context, layers, DTYPES[dtype], where, scattered)
                for phase, count in (("decode", 1), ("prefill", queries)):
                    times = measure(dict(sides(made, count)), rounds, where)
                    rows.append(row_of(name, phase, context, times))
                    progress.advance(task)
                del made
    device_name = (
        torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or "cpu"
    )
    configuration = {
        "layers": layers, "queries": queries, "dtype": dtype, "device": device_name,
        "rounds": rounds,
        "pages": "scattered" if scattered else "in order", "threads": torch.get_num_threads(),
        "cores": os.cpu_count(), "torch": torch.__version__,
        "shape": f"{QUERY_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, local: {SINKS} + {WINDOW} tokens",
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    Console().print(table_of(rows))


def table_of(rows: list[PhaseResult]) -> Table:
    """One line a phase, map and length."""
    table = Table(box=box.MARKDOWN)
    for name in (
        "heads",
        "phase",
        "context",
        "ours ms",
        "dense ms",
        "masked ms",
        "x dense",
        "x masked",
    ):
        table.add_column(name, justify="left" if name in ("heads", "phase") else "right")
    for row in sorted(rows, key=lambda row: (row.heads, row.phase, row.context)):
        table.add_row(
            row.heads, row.phase, f"{row.context // 1024}K", f"{row.ours_ms:.2f}",
            f"{row.dense_ms:.1f}",
            f"{row.masked_ms:.1f}", f"{row.over_dense:.1f}", f"{row.over_masked:.1f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
