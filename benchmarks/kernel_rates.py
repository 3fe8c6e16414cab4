"""How fast the kernels of a recovery work, in TFLOP/s and GB/s.

A matrix product and a copy of the same device stand beside them. One layer with the heads of an 8B
model. Scattered rows are recomputed tokens all over a prompt; scores are those of Sparse-Q.

    python benchmarks/kernel_rates.py --device cuda --dtype bfloat16 [--tokens 8192,32768] [--json]
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from align import DTYPES
from kvgraft.kernels.changes import average_changes, copy_changed, kv_changes
from kvgraft.kernels.dispatch import attention_mass, segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.rope import Rope
from tables import line_of_settings, markdown_table

AROUND = 17  # changes that are averaged
SCATTERED, NEW, ASKING, ANCHORS = (
    1 / 24,
    1 / 10,
    1 / 20,
    1 / 40,
)  # of a prompt: rows recomputed, new, that score, spread


@dataclass(frozen=True)
class Rate:
    """One kernel at one length: the median of all rounds, and what it does in that time.

    Attributes:
        tflops: of the products that causal attention needs; None for copies.
        gbytes: read and written, of keys and values alone; None for products.
    """

    name: str
    tokens: int
    milliseconds: float
    tflops: float | None = None
    gbytes: float | None = None


def main(
    tokens: Annotated[str, typer.Option(help="Of a prompt, by commas.")] = "8192,32768",
    heads: Annotated[int, typer.Option(help="Of queries.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Of keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels.")] = 128,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Measured, after one that does not count.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure all kernels, and print a row for each."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    settings: dict[str, Any] = dict(locals(), torch=torch.__version__)
    del settings["as_json"]
    rates = []
    for length in map(int, tokens.split(",")):
        with Console(stderr=True).status(f"{length} tokens"), torch.inference_mode():
            layer = Layer(length, heads, kv_heads, head_dim, DTYPES[dtype], torch.device(device))
            rates += [layer.rate(name, rounds) for name in layer.kernels]
    if as_json:
        print(json.dumps({"settings": settings, "rows": [asdict(rate) for rate in rates]}))
        return
    Console().print(line_of_settings(settings))
    table = markdown_table(["kernel", "tokens", "ms", "TFLOP/s", "GB/s"], ["kernel"])
    for rate in rates:
        shown = ("" if value is None else f"{value:.3g}" for value in (rate.tflops, rate.gbytes))
        table.add_row(rate.name, str(rate.tokens), f"{rate.milliseconds:.3f}", *shown)
    Console().print(table)


class Layer:
    """The cache of one layer with a prompt in scattered slots, and what recoveries do there.

    Attributes:
        kernels: by name what calls a kernel, its floating-point operations and its bytes.
    """

    def __init__(
        self,
        length: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._length, self._device = length, device
        random = torch.Generator().manual_seed(0)
        self._every = LayerHeads(tuple(range(kv_heads)), (0,) * kv_heads, (False,) * kv_heads)
        shape = kv_heads, 2 * length, head_dim
        self._pools = (
            torch.randn(shape, device=device).to(dtype),
            torch.randn(shape, device=device).to(dtype),
        )
        self._shape, self._scale, self._rope = (heads, head_dim), head_dim**-0.5, Rope(head_dim)
        slots = torch.randperm(2 * length, generator=random)
        self._slots, self._others = (part[None].to(device) for part in slots.split(length))
        scattered = (
            torch.randperm(length, generator=random)[: max(1, int(length * SCATTERED))]
            .sort()
            .values
        )
        new = torch.arange(length - max(1, int(length * NEW)), length)
        asking = torch.arange(length - max(1, int(length * ASKING)), length)
        token = 2 * kv_heads * head_dim * dtype.itemsize  # bytes of its keys and values
        side = min(4096, 8 * head_dim)
        self.kernels: dict[str, tuple[Callable[[], object], float | None, float | None]] = {
            "matrix product": (self._product(side, dtype), 2.0 * side**3, None),
            "copy": (self._copy(), None, 2.0 * token * length),
            "attention of scattered rows": (
                self._attention(scattered, dtype),
                self._flops(scattered),
                None,
            ),
            "attention of new text at the end": (
                self._attention(new, dtype),
                self._flops(new),
                None,
            ),
            "scores": (self._scores(asking, dtype), self._flops(asking), None),
            "copy that applies changes": (self._copy_changed(), None, 2.0 * token * length),
        }

    def rate(self, name: str, rounds: int) -> Rate:
        """Measure one of them."""
        call, operations, nbytes = self.kernels[name]
        seconds = statistics.median([self._seconds(call) for _ in range(rounds + 1)][1:])
        tflops = None if operations is None else operations / seconds / 1e12
        return Rate(
            name,
            self._length,
            1e3 * seconds,
            tflops,
            None if nbytes is None else nbytes / seconds / 1e9,
        )

    def _seconds(self, call: Callable[[], object]) -> float:
        """On a device by its own clock: launches are not counted."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host launches meanwhile
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _flops(self, positions: Tensor) -> float:
        """Of queries at these positions with the keys and values that they see."""
        heads, head_dim = self._shape
        return 4.0 * heads * head_dim * float((positions + 1).sum())

    def _product(self, side: int, dtype: torch.dtype) -> Callable[[], object]:
        one, two = (torch.randn(side, side, device=self._device).to(dtype) for _ in range(2))
        return lambda: one @ two

    def _copy(self) -> Callable[[], object]:
        source, target = self._slots[0], self._others[0]
        return lambda: [
            pool.index_copy_(1, target, pool.index_select(1, source)) for pool in self._pools
        ]

    def _attention(self, positions: Tensor, dtype: torch.dtype) -> Callable[[], object]:
        layout = AttentionLayout.of([positions], [self._slots])
        query = torch.randn(len(positions), *self._shape, device=self._device).to(dtype)
        return lambda: segpaged_attention(query, *self._pools, self._every, layout, self._scale)

    def _scores(self, positions: Tensor, dtype: torch.dtype) -> Callable[[], object]:
        query = torch.randn(len(positions), *self._shape, device=self._device).to(dtype)
        keys, at = self._pools[0].transpose(0, 1)[: self._length], positions.to(self._device)
        return lambda: attention_mass(query, keys, at, self._scale)

    def _copy_changed(self) -> Callable[[], object]:
        """All tokens are near anchors; the anchors' differences and averages are included."""
        num_anchors = max(2, int(self._length * ANCHORS))
        places = torch.linspace(0, self._length - 1, num_anchors, device=self._device).long()
        count, turn = len(places), self._rope.table(torch.arange(self._length, device=self._device))
        anchor_turn = turn[0][places], turn[1][places]
        nearby = torch.arange(count, device=self._device)[:, None] + torch.arange(
            AROUND, device=self._device
        )
        around = (
            (nearby - AROUND // 2).clamp(0, count - 1),
            torch.full((count, AROUND), 1 / AROUND, device=self._device),
        )
        behind = torch.searchsorted(places, torch.arange(self._length, device=self._device)).clamp(
            1, count - 1
        )
        sides, between = (
            torch.stack((behind - 1, behind)),
            torch.full((self._length,), 0.5, device=self._device),
        )

        def call() -> None:
            new, old = (self._others[:, places], anchor_turn), (self._slots[:, places], anchor_turn)
            changes = average_changes(kv_changes(self._pools, self._every, new, old), *around)
            source, target = (self._slots, turn), (self._others, turn)
            copy_changed(self._pools, self._every, source, target, changes, sides, between)

        return call


if __name__ == "__main__":
    typer.run(main)
