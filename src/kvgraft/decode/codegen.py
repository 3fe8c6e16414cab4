"""Triton source for a group of operators that work block by block or need no blocks (Vortex,
section 5.1).

A program of the kernel takes a share of all sequences' blocks, and one tile of one sequence at a
time. A tile goes through all operators of the group in registers. The kernel reads each input once,
and writes only the values that others need. A value [1, B, ...] is a tensor [tile, ...]. Triton
needs sizes that are powers of two, so the other axes are padded. Operators that look along an axis
mask its padding.
"""

from dataclasses import dataclass
from functools import lru_cache

from kvgraft.decode.emitters import CannotGenerate, dots, emit, entries, entries_of
from kvgraft.decode.flow import Program
from kvgraft.decode.graph import Value
from kvgraft.decode.planner import Group, Template, plan_cache, template_of
from kvgraft.decode.shapes import block_axis
from kvgraft.decode.writer import Writer, is_cache, is_of_model, power

# entries of the largest tensor of a program, and of all that it loads, limited by the registers
TILE_ENTRIES = 16384
# the same limit for a tile of a single block
MOST_ENTRIES = 4 * TILE_ENTRIES
MOST_BLOCKS = 64
# name of the generated function
NAME = "fused"
HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

_SHARE = """\
    program = tl.program_id(0)
    first, last = tl.load(programs + program), tl.load(programs + program + 1)
    for chunk in tl.range(first, last, num_stages=1):
        s = tl.load(chunks + 3 * chunk).to(tl.int64)
        begin = tl.load(chunks + 3 * chunk + 1)
        end = begin + tl.load(chunks + 3 * chunk + 2)
        for number in tl.range(begin, end, num_stages=1):
            b = number * {tile} + tl.arange(0, {tile})
            there = b < tl.load(counts + s)
            row = tl.load(table + s * table_row + b, mask=there, other=0)
"""


@dataclass(frozen=True)
class Source:
    """A kernel.

    Attributes:
        text: source of a module. Arguments of its function: the inputs and outputs; with blocks
            also the table int64 [S, B], the stride of its rows, the blocks of each sequence, int64
            [S], the chunks and programs of a `Workload` of tiles, and Hkv; then the strides of
            every input and output. The grid is the programs of the workload, or without blocks the
            sequences.
        inputs: tensors that it reads: the query [S, g, d]; keys and values [blocks, Hkv, b, d],
            whose row r is head r % Hkv of block r // Hkv; other caches [rows, ...]; values of other
            groups [S, ...].
        outputs: tensors that it writes: values [S, ...], or for forward_cache entries of caches
            [rows, ...].
        tile: blocks that a program takes at a time; 0 without blocks.
    """

    text: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    tile: int


@lru_cache(maxsize=1024)
def source_of(group: Group, *, to_caches: bool = False) -> Source | None:
    """Return the kernel of a query or chunk group, or None if only batched torch can run it."""
    try:
        return _source(group, to_caches=to_caches)
    except CannotGenerate:
        return None


def cache_source(program: Program) -> Source | None:
    """Return the kernel of forward_cache. None if the flow has no caches, or only batched torch can
    run it.
    """
    return source_of(plan_cache(program), to_caches=True) if program.stores else None


def _source(group: Group, *, to_caches: bool) -> Source:
    """Generate the kernel of a group. Raise CannotGenerate if the group does not fit a kernel."""
    if (largest := max((entries(value) for value in group.values), default=1)) > MOST_ENTRIES:
        raise CannotGenerate(f"{largest} entries of a block do not fit registers")
    of_blocks = [
        value for value in group.values if to_caches or template_of(value) is not Template.QUERY
    ]

    # The compiler loads all inputs of a tile before it uses the first, and `tl.dot` copies them.
    # The kernel of a whole indexer (`fused.py`) names no inputs: it fits without this limit.
    loaded = sum(entries_of(value) for value in group.inputs if block_axis(value.shape) is not None)
    loaded *= 2 if any(dots(value) for value in group.values) else 1
    widest = max([loaded, *(entries(value) for value in of_blocks)])
    tile = (
        min(MOST_BLOCKS, max(1, TILE_ENTRIES // power(widest)))
        if group.template is Template.CHUNK
        else 0
    )

    writer = Writer(tile)
    for value in group.values:
        emit(writer, value)
        # what is stored at once leaves its registers to the values behind it
        if value in group.outputs and not to_caches:
            writer.store(f"out{group.outputs.index(value)}", value, cached=False)
    # caches are stored last, because forward_cache may read what they held before
    for number, value in enumerate(group.outputs if to_caches else ()):
        writer.store(f"out{number}", value, cached=True)

    tensors = [
        (name, len(value.shape) - is_cache(value) + is_of_model(value))
        for value, name in writer.inputs.items()
    ]
    tensors += [
        (f"out{number}", len(value.shape) - to_caches) for number, value in enumerate(group.outputs)
    ]

    arguments, head, indent = (
        [name for name, _ in tensors],
        ["    s = tl.program_id(0).to(tl.int64)"],
        "    ",
    )
    if tile:
        arguments += ["table", "table_row", "counts", "chunks", "programs", "heads"]
        head, indent = _SHARE.format(tile=tile).splitlines(), 12 * " "
    arguments += [f"{name}_{axis}" for name, rank in tensors for axis in range(rank)]
    body = "".join(f"{line}\n" for line in [*head, *(indent + line for line in writer.lines)])
    return Source(
        f"{HEAD}def {NAME}({', '.join(arguments)}):\n{body}",
        tuple(writer.inputs),
        group.outputs,
        tile,
    )
