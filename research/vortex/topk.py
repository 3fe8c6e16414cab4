"""Top-k of scores: time against recall, of PyTorch's, of radix top-k, and of its lossy form with
and without remapping.

python -m research.vortex.topk [--columns 2048,8192] [--k 29,61] [--device cuda] [--json]
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvgraft.kernels.dispatch import radix_topk
from kvgraft_lab.evaluate.decoding import in_turn

DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "uniform": lambda shape, g: torch.rand(shape, generator=g),
    "lognormal": lambda shape, g: torch.randn(shape, generator=g).exp(),
    "bimodal": lambda shape, g: (
        torch.randn(shape, generator=g) + 8.0 * (torch.rand(shape, generator=g) < 0.05)
    ),
}
FAMILIES = {  # name -> tolerance, remap; torch.topk stands for itself
    "torch.topk": None,
    "radix": (0.0, False),
    "radix + remap": (0.0, True),
    "approximate .1": (0.1, False),
    "approximate .5": (0.5, False),
    "approximate 1": (1.0, False),
    "approximate .1 + remap": (0.1, True),
    "approximate .5 + remap": (0.5, True),
    "approximate 1 + remap": (1.0, True),
}


@dataclass(frozen=True)
class TopkResult:
    """Medians: milliseconds, times as fast as torch.topk, and the share of the true k that is found
    (mean, worst)."""

    distribution: str
    columns: int
    k: int
    family: str
    ms: float
    faster: float
    recall: float
    worst: float


def measure(scores: Tensor, k: int, rounds: int) -> dict[str, tuple[list[float], Tensor]]:
    """Seconds in every round and what is found, of each family in turn."""
    lengths = torch.full((len(scores),), scores.shape[1], device=scores.device)
    sides: dict[str, Callable[[], Tensor]] = {}
    for name, how in FAMILIES.items():
        if how is None:
            sides[name] = lambda: scores.topk(k, dim=1).indices
        else:
            sides[name] = partial(radix_topk, scores, lengths, k, how[0], remap=how[1])
    times = in_turn(sides, rounds)
    return {name: (times[name], side()) for name, side in sides.items()}


def recall(found: Tensor, best: Tensor) -> Tensor:
    """float [S]: share of the best in what was found."""
    return (found[:, :, None] == best[:, None]).any(1).float().mean(1)


@torch.inference_mode()
def main(
    columns: Annotated[
        str, typer.Option(help="Blocks of a sequence, by commas.")
    ] = "256,2048,8192",
    k: Annotated[str, typer.Option(help="By commas.")] = "29,61",
    sequences: Annotated[int, typer.Option(help="Rows: requests times KV heads.")] = 64,
    device: str = "cpu",
    rounds: int = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all distributions and sizes."""
    rows = []
    for name, draw in DISTRIBUTIONS.items():
        for size in map(int, columns.split(",")):
            scores = draw((sequences, size), torch.Generator().manual_seed(size)).to(device)
            for count in map(int, k.split(",")):
                sides = measure(scores, count, rounds)
                base, best = sides["torch.topk"]
                for family, (times, found) in sides.items():
                    shares = recall(found, best)
                    ratio = statistics.median(a / b for a, b in zip(base, times, strict=True))
                    rows.append(
                        TopkResult(
                            name, size, count, family, 1e3 * statistics.median(times), ratio,
                            float(shares.mean()), float(shares.min()),
                        )
                    )  # fmt: skip
    configuration = {
        "sequences": sequences, "device": device, "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"configuration": configuration, "rows": [asdict(row) for row in rows]}))
        return
    Console().print(configuration)
    table = Table("scores", box=box.MARKDOWN)
    for name in ("blocks", "k", "", "ms", "x torch", "recall", "worst"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.distribution, str(row.columns), str(row.k), row.family, f"{row.ms:.2f}",
            f"{row.faster:.2f}",
            f"{row.recall:.3f}", f"{row.worst:.3f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
