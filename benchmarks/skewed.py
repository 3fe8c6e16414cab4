"""One long sequence beside many short ones: what an indexer goes through, in equal shares and
padded to the longest.

Counted: blocks that the programs of a device take up, padding of tiles included, and the largest
share of one program. Timed, on CPU: the selection of blocks, with its sequences in parts of similar
length and padded, in turn; of the skewed batch, and of one whose sequences are all as long as its
average.

    python benchmarks/skewed.py [--long 32768] [--short 1024] [--shorts 15] [--programs 528]
        [--json]
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console

from kvgraft.decode.batch import Batch, Part
from kvgraft.decode.codegen import source_of
from kvgraft.decode.executor import fill, select
from kvgraft.decode.flow import Program, trace
from kvgraft.decode.planner import Template, plan
from kvgraft.flows import parse_flow
from kvgraft.kernels.workload import plan_work
from kvgraft_lab.evaluate.decoding import in_turn
from tables import markdown_table

FLOWS = "block_topk;quest"
KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 2, 128, 16  # Qwen3-0.6B's
H100 = 132 * 4  # programs


class Padded(Batch):
    """Sequences that are computed together, whatever their lengths."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(slice(0, len(self.rows)), self.num_blocks, None),)


@dataclass(frozen=True)
class Counted:
    """Blocks that a kernel goes through, and those of its longest program: in equal shares, and
    padded."""

    flow: str
    tile: int
    blocks: int
    balanced: int
    balanced_longest: int
    padded: int
    padded_longest: int


@dataclass(frozen=True)
class Timed:
    """Milliseconds of the selection in parts and padded, and the median of how many times faster
    parts are."""

    flow: str
    lengths: str
    parts_ms: float
    padded_ms: float
    faster: float


def counted(flow: str, program: Program, lengths: list[int], programs: int) -> Counted:
    """Of the kernel with the most operators."""
    chunks = [
        source
        for group in plan(program)
        if group.template is Template.CHUNK and (source := source_of(group))
    ]
    tile = chunks[0].tile
    filled = torch.tensor(lengths).repeat_interleave(KV_HEADS) // BLOCK

    def shares(blocks: torch.Tensor) -> tuple[int, int]:
        work = plan_work(-(-blocks // tile), programs)
        own = torch.stack(
            [work.chunks[a:b, 2].sum() for a, b in work.programs.unfold(0, 2, 1).tolist()]
        )
        return tile * int(own.sum()), tile * int(own.max())

    return Counted(
        flow,
        tile,
        int(filled.sum()),
        *shares(filled),
        *shares(torch.full_like(filled, int(filled.max()))),
    )


def timed(flow: str, program: Program, lengths: list[int], what: str, rounds: int) -> Timed:
    """A layer's pages scattered as in a pool that has been used."""
    blocks = [-(-length // BLOCK) for length in lengths]
    free, width = torch.randperm(sum(blocks)), max(blocks)
    table = torch.stack(
        [torch.nn.functional.pad(own, (0, width - len(own))) for own in free.split(blocks)]
    )
    rows = (table[:, None] * KV_HEADS + torch.arange(KV_HEADS)[:, None]).flatten(0, 1)
    keys = torch.randn(sum(blocks) * KV_HEADS, BLOCK, HEAD_DIM)
    pool = {"k": keys, "v": keys}
    pool |= {name: torch.empty(len(keys), *shape) for name, shape in program.caches.items()}
    fill(program, pool, torch.arange(len(keys)))
    query = torch.randn(len(rows), GROUP, HEAD_DIM)
    groups, tokens = plan(program), torch.tensor(lengths).repeat_interleave(KV_HEADS)
    sides: dict[str, Callable[[], object]] = {
        name: partial(select, program, groups, query, pool, kind(rows, tokens, BLOCK))
        for name, kind in (("parts", Batch), ("padded", Padded))
    }
    times = in_turn(sides, rounds)
    ratios = [padded / parts for parts, padded in zip(times["parts"], times["padded"], strict=True)]
    own, other = (1e3 * statistics.median(times[name]) for name in sides)
    return Timed(flow, what, own, other, statistics.median(ratios))


@torch.inference_mode()
def main(
    long: Annotated[int, typer.Option(help="Tokens of the long sequence.")] = 32768,
    short: Annotated[int, typer.Option(help="Tokens of the short ones.")] = 1024,
    shorts: Annotated[int, typer.Option(help="How many short ones.")] = 15,
    programs: Annotated[int, typer.Option(help="Programs that a device runs at once.")] = H100,
    flows: Annotated[str, typer.Option(help="By semicolons.")] = FLOWS,
    rounds: int = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count and time."""
    skewed = [long, *[short] * shorts]
    equal = [sum(skewed) // len(skewed)] * len(skewed)
    counts, times = [], []
    for name in flows.split(";"):
        flow = parse_flow(name)
        if flow is None:
            raise typer.BadParameter(f"flows must be sparse, got {name!r}")
        program = trace(flow, BLOCK, HEAD_DIM, GROUP)
        counts.append(counted(name, program, skewed, programs))
        times += [
            timed(name, program, skewed, "skewed", rounds),
            timed(name, program, equal, "equal", rounds),
        ]
    if as_json:
        configuration = {"long": long, "short": short, "shorts": shorts, "programs": programs,
        "rounds": rounds,
                         "threads": torch.get_num_threads(),
                         "torch": torch.__version__}  # fmt: skip
        print(json.dumps({"configuration": configuration,
        "counted": [asdict(row) for row in counts],
                          "timed": [asdict(row) for row in times]}))  # fmt: skip
        return
    table = markdown_table(("", "tile", "blocks", "balanced", "longest", "padded", "longest "))
    for row in counts:
        table.add_row(*(str(value) for value in asdict(row).values()))
    Console().print(table)
    table = markdown_table(("", "lengths", "in parts ms", "padded ms", "faster"))
    for one in times:
        table.add_row(
            one.flow,
            one.lengths,
            f"{one.parts_ms:.2f}",
            f"{one.padded_ms:.2f}",
            f"{one.faster:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
