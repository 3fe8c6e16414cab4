"""The indexer of a flow as two kernels: the work block by block, then all work across blocks with
the choice.

`codegen.py` writes the first kernel, which also computes values without blocks. In the second
kernel, each program has one sequence. The first kernel leaves a few numbers of each block, and the
program passes over them several times. The first pass computes all reductions that need no other
reduction, the next pass those that need these, and so on. Each pass recomputes the values of a
block that it needs. The last pass makes the scores, and then the program chooses pages
(`choose_pages` in `kernels/triton/topk.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvgraft.decode.batch import Batch
from kvgraft.decode.codegen import NAME, Source, source_of
from kvgraft.decode.emitters import CannotGenerate, emit, entries
from kvgraft.decode.executor import Pool, heads_of, of_pool
from kvgraft.decode.flow import Program
from kvgraft.decode.graph import Value
from kvgraft.decode.operators import OPERATORS, Operator
from kvgraft.decode.planner import Group, Template, template_of
from kvgraft.decode.shapes import block_axis, broadcast
from kvgraft.decode.vtensor import NumBlocks
from kvgraft.decode.writer import Writer, is_cache, is_of_model, power
from kvgraft.decode.writer import number as literal
from kvgraft.kernels import dispatch

# blocks of a tile, and entries of its largest tensor
TILE, TILE_ENTRIES = 1024, 8192
_HEAD = """\
import triton
import triton.language as tl

from kvgraft.kernels.triton.topk import choose_pages


@triton.jit
"""
_BEGIN = """\
s = tl.program_id(0).to(tl.int64)
tokens = tl.load(all_tokens + s)
size = (tokens // {block}).to(tl.int32)
""".splitlines()
_LOOP = """\
for start in tl.range(0, size, {tile}, num_stages=1):
    b = start + tl.arange(0, {tile})
    there = b < size
    row = tl.load(table + s * table_row + b, mask=there, other=0)
""".splitlines()
_END = """\
tl.debug_barrier()
choose_pages(
    scores + s * scores_row, table + s * table_row, tokens, tables + s * {width}, lengths + s,
    {k}, {tolerated}, {block}, {first}, {last}, {width}, True, {tile},
)
""".splitlines()
# name -> initial value, update by a tile, and final result
_REDUCTIONS = {
    "Max": (-math.inf, "tl.maximum({found}, tl.max({x}, 0, keep_dims=True))", "{found}"),
    "Min": (math.inf, "tl.minimum({found}, tl.min({x}, 0, keep_dims=True))", "{found}"),
    "Sum": (0.0, "{found} + tl.sum({x}, 0, keep_dims=True)", "{found}"),
    "Mean": (0.0, "{found} + tl.sum({x}, 0, keep_dims=True)", "{found} / tl.maximum(size, 1)"),
    "L2Norm": (0.0, "{found} + tl.sum({x} * {x}, 0, keep_dims=True)", "tl.sqrt({found})"),
}
# authors of flows have no such operator
_DIVIDE = Operator("Divide", (), broadcast, torch.div)


@dataclass(frozen=True)
class Choice:
    """The second kernel.

    Attributes:
        text: source of a module; empty if only the choice remains. Arguments of its function:
            inputs, caches that it changes, table, tokens, scores, tables, lengths, the row strides
            of table and scores, and the strides of the inputs and caches.
        inputs: values of the first kernel, the query, and caches that it reads.
        saves: caches that it changes, and the shape of their entries for a block.
        k: blocks to choose.
        tolerance: tolerance of the top-k.
    """

    text: str
    inputs: tuple[Value, ...]
    saves: tuple[tuple[str, tuple[Any, ...]], ...]
    k: int
    tolerance: float


@dataclass(frozen=True)
class Kernels:
    """Both kernels. If the second one has no text, the first one leaves the scores."""

    blocks: Source
    choice: Choice


@lru_cache(maxsize=256)
def kernels_of(program: Program) -> Kernels | None:
    """Return the kernels of a flow that chooses by scores, or None if its groups must run one after
    the other.
    """
    top = program.selection
    if not isinstance(top, Value) or top.made_by.name not in ("topK", "approxTopK"):
        return None

    ahead, behind = _parted(program, top)
    needed = {given for value in (*behind, top) for given in value.inputs}
    outputs = tuple(value for value in ahead if value in needed and value not in behind)
    group = Group(Template.CHUNK, _needed_for(outputs, ahead), (), outputs)
    if not outputs or any(block_axis(value.shape) != 1 for value in outputs):
        return None

    source = source_of(group)
    try:
        return None if source is None else Kernels(source, _choice(program, top, behind))
    except CannotGenerate:
        return None


def choose(
    kernels: Kernels, program: Program, query: Tensor, pool: Pool, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return tables and lengths as in `decode.batch.tables`. Caches that the flow saves to are
    changed.
    """
    source, choice, flow = kernels.blocks, kernels.choice, program.flow
    made = {value: query for value in (*source.inputs, *choice.inputs) if value.name == "q"}
    for value in source.outputs:
        shape: list[int] = [
            batch.num_blocks if isinstance(size, NumBlocks) else size for size in value.shape[1:]
        ]
        made[value] = query.new_empty(len(query), *shape, dtype=torch.float32)

    tensors = [
        made[value] if value in made else of_pool(pool, value)
        for value in (*source.inputs, *source.outputs)
    ]
    dispatch.generated(
        source.text, NAME, tensors, (batch.rows, batch.work), source.tile, heads_of(source, tensors)
    )

    always = flow.FIRST, flow.LAST

    if not choice.text:
        scores, where = (
            made[source.outputs[0]].flatten(1),
            (batch.rows, batch.lengths, program.block_size),
        )
        return dispatch.page_topk(scores, *where, always, choice.k, choice.tolerance)
    tensors = [made[value] if value in made else pool[value.name] for value in choice.inputs]
    tensors += [pool[name].view(-1, *sizes) for name, sizes in choice.saves]
    blocks = batch.rows, batch.lengths, batch.num_blocks
    return dispatch.generated_choice(choice.text, NAME, tensors, blocks, sum(always) + choice.k)


def _parted(program: Program, top: Value) -> tuple[list[Value], list[Value]]:
    """Return the operators of the first kernel, and those that the second kernel runs before the
    choice.
    """
    behind: set[Value | float] = set()
    for value in program.indexer:
        if template_of(value) is Template.SPECIAL or any(given in behind for given in value.inputs):
            behind.add(value)

    ahead = [value for value in program.indexer if value not in behind]
    wanted = [
        value
        for value in (*program.indexer, top.inputs[0])
        if isinstance(value, Value) and value in behind
    ]
    wanted = [value for value in wanted if value.saves_to or value is top.inputs[0]]
    # both kernels can compute values without blocks and loads of caches at the same cost
    near = [
        v
        for v in program.indexer
        if v in behind or block_axis(v.shape) is None or v.made_by.name == "Load"
    ]
    return ahead, list(_needed_for(wanted, [value for value in near if value is not top]))


def _needed_for(wanted: Iterable[Value], among: Sequence[Value]) -> tuple[Value, ...]:
    """Return the wanted values and all values that they depend on, in order."""
    needed: set[Value | float] = set(wanted)
    for value in reversed(among):
        if value in needed:
            needed.update(value.inputs)
    return tuple(value for value in among if value in needed)


def _choice(program: Program, top: Value, values: Sequence[Value]) -> Choice:
    """Generate the second kernel of a flow."""
    k, tolerance = top.options["k"], top.options.get("tolerance") or 0.0
    if not values:
        return Choice("", (), (), k, tolerance)

    flow, passes = program.flow, _Passes(values, top.inputs[0])
    names = passes.inputs
    if any(is_of_model(value) for value in names):
        raise CannotGenerate("keys and values of a sequence are too much for one program")

    arguments = [*names.values(), *(f"save{number}" for number in range(len(passes.saves)))]
    ranks = [len(value.shape) - is_cache(value) for value in names] + [
        len(value.shape) - 1 for value in passes.saves
    ]
    strides = [
        f"{name}_{axis}"
        for name, rank in zip(arguments, ranks, strict=True)
        for axis in range(rank)
    ]
    arguments += [
        "table",
        "all_tokens",
        "scores",
        "tables",
        "lengths",
        "table_row",
        "scores_row",
        *strides,
    ]

    known = {
        "block": program.block_size, "k": k, "tolerated": int(tolerance * k), "first": flow.FIRST,
        "last": flow.LAST,
        "width": flow.FIRST + k + flow.LAST, "tile": TILE,
    }  # fmt: skip

    lines = [line.format(**known) for line in (*_BEGIN, *passes.lines, *_END)]
    text = f"{_HEAD}def {NAME}({', '.join(arguments)}):\n" + "".join(
        f"    {line}\n" for line in lines
    )
    saves = tuple((value.saves_to, value.shape[2:]) for value in passes.saves)
    return Choice(text, tuple(names), saves, k, tolerance)


class _Passes:
    """Writer of the passes over the blocks of a sequence. Pass p computes values that depend on a
    chain of at most p reductions.

    Attributes:
        lines: lines of all passes.
        inputs: loaded values, and the names of their arguments.
        saves: values that are written to caches, as `save0` and so on.
    """

    def __init__(self, values: Sequence[Value], scores: Value | float) -> None:
        self._values, known = _plain(values)
        for value in self._values:
            slices = value.made_by.name == "MaskSlice"
            if template_of(value) is Template.SPECIAL and not (
                _reduces(value) or value.saves_to or slices
            ):
                raise CannotGenerate(f"{value.made_by.name} over blocks")

        widest = max(entries(value) for value in self._values)
        if widest > TILE_ENTRIES:
            raise CannotGenerate(f"{widest} numbers of a block do not fit registers")

        self._tile = min(TILE, TILE_ENTRIES // power(widest))
        self._outer = Writer(self._tile)
        self._pass: dict[Value | float, int] = {}
        for value in self._values:
            self._pass[value] = max(self._pass.get(given, 0) for given in value.inputs) + _reduces(
                value
            )

        self.lines: list[str] = []
        self.saves = [value for value in self._values if value.saves_to]

        for number in range(1, max(self._pass.values()) + 1):
            self._reduce(
                number,
                [
                    value
                    for value in self._values
                    if _reduces(value) and self._pass[value] == number
                ],
            )

        self._last(known.get(scores, scores))
        self.inputs = self._outer.inputs

    def _reduce(self, number: int, values: Sequence[Value]) -> None:
        """Write a pass for reductions."""
        self._without_blocks(number - 1)
        inner = self._inner([given for value in values for given in value.inputs])
        steps, after = [], []

        for place, value in enumerate(values):
            found, (given, *_) = f"found{number}_{place}", value.inputs
            neutral, join, whole = _REDUCTIONS[value.made_by.name]
            self.lines.append(
                f"{found} = tl.full({inner.shape(value.shape)}, {literal(neutral)}, tl.float32)"
            )
            x = inner.let(
                f"tl.where({_there('there', given)}, {inner.operand(given)}, {literal(neutral)})"
            )
            steps.append(f"{found} = {join.format(found=found, x=x)}")
            after.append(f"{found}_whole = {whole.format(found=found)}")
            self._outer.name(value, f"{found}_whole")

        self._loop([*inner.lines, *steps])
        self.lines += after

    def _last(self, scores: Value | float) -> None:
        """Write the pass that stores scores and saved values."""
        self._without_blocks(max(self._pass.values()))
        inner = self._inner([scores, *self.saves])
        score = inner.let(f"tl.reshape({inner.operand(scores)}, [{self._tile}])")
        stored = len(inner.lines)
        for number, value in enumerate(self.saves):
            inner.store(f"save{number}", value, cached=True)
        # a save may overwrite entries that are still to be loaded
        barrier = ["tl.debug_barrier()"] * bool(self.saves)
        lines = [*inner.lines[:stored], *barrier, *inner.lines[stored:]]
        self._loop([*lines, f"tl.store(scores + s * scores_row + b, {score}, mask=there)"])

    def _without_blocks(self, number: int) -> None:
        """Write the values of a pass that need no blocks, in front of the pass."""
        for value in self._values:
            if (
                self._pass[value] == number
                and block_axis(value.shape) is None
                and not _reduces(value)
            ):
                emit(self._outer, value)
        self.lines += self._outer.lines
        self._outer.lines.clear()

    def _inner(self, wanted: Sequence[Value | float]) -> Writer:
        """Return the body of a pass that computes the wanted values."""
        inner = Writer(self._tile, self._outer)
        with_blocks = [value for value in self._values if block_axis(value.shape) is not None]

        for value in _needed_for(
            [value for value in wanted if isinstance(value, Value)], with_blocks
        ):
            given, *rest = value.inputs
            if value.saves_to:
                inner.define(
                    value, f"tl.reshape({inner.operand(rest[0])}, {inner.shape(value.shape)})"
                )
            elif value.made_by.name == "MaskSlice" and template_of(value) is Template.SPECIAL:
                inside = _there(
                    f"(b >= {_end(value.options['start'])}) & (b < {_end(value.options['stop'])})",
                    value,
                )
                inner.define(
                    value,
                    f"tl.where({inside}, {inner.operand(given)}, {literal(value.options['fill'])})",
                )
            elif block_axis(value.shape) != 1:
                raise CannotGenerate(f"{value.made_by.name} with blocks behind the second axis")
            else:
                emit(inner, value)

        return inner

    def _loop(self, lines: Sequence[str]) -> None:
        """Write a loop over the tiles of a sequence."""
        self.lines += [line.format(tile=self._tile) for line in _LOOP] + [
            f"    {line}" for line in lines
        ]


def _reduces(value: Value) -> bool:
    """Return whether a value is one number for all blocks."""
    return value.made_by.name in _REDUCTIONS and template_of(value) is Template.SPECIAL


def _there(condition: str, value: Value | float) -> str:
    """Return a condition on blocks, broadcast to the rank of a value."""
    rank = len(value.shape) - 1 if isinstance(value, Value) else 1
    return f"({condition})" + (f"[:{', None' * (rank - 1)}]" if rank > 1 else "")


def _end(place: int | None) -> str:
    """Return the code for an end of a slice of blocks."""
    return "size" if place is None else f"size + {place}" if place < 0 else str(place)


def _plain(values: Sequence[Value]) -> tuple[list[Value], dict[Value | float, Value]]:
    """Return the values with softmax and normalisation over blocks as reductions and quotients, and
    the replacement of each value.
    """
    made: list[Value] = []
    known: dict[Value | float, Value] = {}

    def apply(name: str, like: Value, *inputs: Value | float, **options: int) -> Value:
        shape = (*like.shape[:1], 1, *like.shape[2:]) if options else like.shape
        made.append(Value(shape, like.line, OPERATORS.get(name, _DIVIDE), inputs, options))
        return made[-1]

    for value in values:
        inputs = tuple(known.get(given, given) for given in value.inputs)
        x, name = inputs[0], value.made_by.name
        if template_of(value) is Template.SPECIAL and name == "Softmax":
            most = apply("Max", value, x, dim=1)
            most = apply("Multiply", most, most, -1.0)
            weights = apply("Exp", value, apply("Add", value, x, most))
            known[value] = apply("Divide", value, weights, apply("Sum", value, weights, dim=1))
        elif template_of(value) is Template.SPECIAL and name == "Normalize":
            norm = apply("L2Norm", value, x, dim=1)
            known[value] = apply("Divide", value, x, apply("Maximum", norm, norm, 1e-12))
        else:
            known[value] = replace(value, inputs=inputs)
            made.append(known[value])
    return made, known
