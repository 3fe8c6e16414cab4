"""Time of copy with delta-RoPE ("align") against a bare copy of the same slots and against the
plain reference.

OMP_NUM_THREADS=2 python benchmarks/align.py --dtype float32 [--paged] [--device cuda]
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from operator import truediv
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvgraft.kernels.dispatch import align_copy, align_paged
from kvgraft.kv.cache import slots_of
from kvgraft.kv.rope import Rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bare_copy(keys: Tensor, values: Tensor, layers: range, source: Tensor, target: Tensor) -> None:
    """The same bytes without the rotation: the least that any align could cost."""
    for layer in layers:
        for pool in (keys[layer], values[layer]):
            pool.index_copy_(0, target, pool.index_select(0, source))


def bare_paged_copy(caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """The same for caches of pages."""
    for cache in caches:
        rows, size = cache.transpose(1, 2), cache.shape[2]
        rows[target // size, target % size] = rows[source // size, source % size]


def milliseconds(call: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(
    sides: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each side in each round; the sides alternate, after one round that does not
    count."""
    lines = [[milliseconds(call, device) for call in sides.values()] for _ in range(rounds + 1)][1:]
    return dict(zip(sides, map(list, zip(*lines, strict=True)), strict=True))


def scattered_slots(num_tokens: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Source and target in random disjoint pages, as the pages of a paged pool lie."""
    num_pages = -(-num_tokens // block_size)
    pages = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    source, target = (
        slots_of(part, block_size)[:num_tokens] for part in (pages[:num_pages], pages[num_pages:])
    )
    return source, target


def main(
    tokens: int = 8192,
    layers: int = 12,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "float32",
    device: str = "cpu",
    rounds: int = 15,
    paged: Annotated[
        bool, typer.Option("--paged", help="A tensor for each layer, keys beside values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Time align_copy, a bare copy and the reference."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    configuration: dict[str, Any] = dict(
        locals(), threads=torch.get_num_threads(), torch=torch.__version__
    )
    del configuration["as_json"]
    where, every = torch.device(device), range(layers)
    source, target = (slots.to(where) for slots in scattered_slots(tokens, block_size))
    cos, sin = Rope(head_dim).table(torch.full((tokens,), 1000, device=where))
    sides: dict[str, Callable[[], None]]
    if paged:
        shape = (layers, 2 * -(-tokens // block_size), kv_heads, block_size, 2 * head_dim)
        caches = [*torch.randn(shape, device=where).to(DTYPES[dtype])]
        moves = (caches, source, target, cos, sin)
        sides = {
            "bare copy": lambda: bare_paged_copy(caches, source, target),
            "align_paged": lambda: align_paged(*moves),
            "reference": lambda: align_paged(*moves, implementation="reference"),
        }
    else:
        pool = (layers, int(max(source.max(), target.max())) + 1, kv_heads, head_dim)
        keys, values = (torch.randn(pool, device=where).to(DTYPES[dtype]) for _ in range(2))
        aligned = (keys, values, every, source, target, cos, sin)
        sides = {
            "bare copy": lambda: bare_copy(*aligned[:5]),
            "align_copy": lambda: align_copy(*aligned),
            "reference": lambda: align_copy(*aligned, implementation="reference"),
        }
    report(configuration, measure(sides, rounds, where), as_json)


def report(configuration: dict[str, Any], times: dict[str, list[float]], as_json: bool) -> None:
    """Medians over rounds, of the times and of the ratios within a round (other load moves those
    less)."""
    medians = {name: statistics.median(column) for name, column in times.items()}
    ratios = {
        name: statistics.median(map(truediv, column, times["bare copy"]))
        for name, column in times.items()
    }
    if as_json:
        print(
            json.dumps(
                {"configuration": configuration, "median_ms": medians, "ratio_to_bare_copy": ratios}
            )
        )
        return
    Console().print(configuration)
    table = Table("side", "median ms", "median ratio to bare copy")
    for name, value in medians.items():
        table.add_row(name, f"{value:.2f}", f"{ratios[name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
