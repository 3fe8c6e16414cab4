"""Execution of the groups of a flow, for all sequences of a step at once.

In batched torch, a group that works block by block takes one chunk of blocks at a time. A chunk
fits the CPU cache and comes from sequences of similar length. On CUDA with Triton such groups are
generated kernels, whose programs get equal shares of all blocks. Operators that look across blocks
are padded to the longest sequence, because a block is only a few numbers by then.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvgraft.decode.batch import Batch, static_selection
from kvgraft.decode.codegen import NAME, Source, cache_source, source_of
from kvgraft.decode.flow import Program
from kvgraft.decode.graph import Value
from kvgraft.decode.planner import Group, Template, size_of
from kvgraft.decode.shapes import block_axis
from kvgraft.decode.vtensor import NumBlocks
from kvgraft.decode.writer import is_of_model
from kvgraft.kernels import dispatch
from kvgraft.kernels.scratch import PIECE, take
from kvgraft.kernels.workload import Lengths

# a tensor, or a number in place of one
Data = Any
# bytes of a chunk in all values of a group
CHUNK_BYTES = PIECE


class Paged(Protocol):
    """Keys or values [rows, b, d], as a tensor or a view such as `HeadPages`."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadPages:
    """Keys or values by row, for pools in which heads are not at equal distances.

    Row r is head r % Hkv of block r // Hkv.

    Attributes:
        by_block: [blocks, Hkv, b, d]. The last stride must be 1, all others are free.
    """

    by_block: Tensor

    @property
    def shape(self) -> Sequence[int]:
        """Shape as a tensor of rows, [rows, b, d]."""
        return (self.by_block.shape[:2].numel(), *self.by_block.shape[2:])

    def __getitem__(self, rows: Tensor) -> Tensor:
        heads = self.by_block.shape[1]
        return self.by_block[rows // heads, rows % heads]


# by name: k and v as `Paged`, the flow's own caches as tensors [rows, ...]
Pool = Mapping[str, Any]


def select(
    program: Program,
    groups: Sequence[Group],
    query: Tensor,
    pool: Pool,
    batch: Batch,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the blocks that a flow chooses.

    Args:
        query: [S, g, d].
        pool: keys, values and caches of the flow. Caches that the flow saves to are changed.
        implementation: cpu (batched torch) or triton, for groups that work block by block; the
            device decides by default.

    Returns:
        int64 [S, n], -1 for none. The result may contain blocks that every query attends to.
    """
    if not isinstance(program.selection, Value):
        return static_selection(program.selection, batch)

    if not batch.num_blocks:
        return torch.full(
            (len(query), cast(int, program.selection.shape[1])), -1, device=query.device
        )

    run = _Run(program, query, pool, batch)
    generates = dispatch.generates(query.device.type, implementation)
    for group in groups:
        if group.template is Template.SPECIAL:
            run.special(group.values[0])
        elif generates and (source := source_of(group)) is not None:
            run.generated(source)
        elif group.template is Template.QUERY:
            run.query_group(group)
        else:
            run.chunks(group)

    run.save()
    return run.made[program.selection]


@dataclass(frozen=True)
class _Piece:
    """Some blocks of some sequences.

    Attributes:
        spacing: see `Part`; it begins at the first of these sequences.
    """

    rows: slice
    blocks: slice
    spacing: tuple[int, int] | None


class _Run:
    """Execution of one flow for one step; `made` holds the values computed so far."""

    def __init__(self, program: Program, query: Tensor, pool: Pool, batch: Batch) -> None:
        self.made: dict[Value, Tensor] = {}
        self._program, self._query, self._pool, self._batch = program, query.float(), pool, batch
        self._saves: list[tuple[str, Tensor]] = []

    def query_group(self, group: Group) -> None:
        """Compute values without blocks, once for each sequence."""
        for value in group.values:
            self.made[value] = self._apply(value, [self._read(given) for given in value.inputs])

    def chunks(self, group: Group) -> None:
        """Compute values block by block. Each chunk goes through all operators of the group."""
        self.made |= {value: self._new(value) for value in group.outputs}
        for piece in self._pieces(group):
            local: dict[Value, Data] = {}
            for value in group.values:
                inputs = [self._part(given, piece, local) for given in value.inputs]
                local[value] = self._apply(value, inputs)
            for value in group.outputs:
                _cut(self.made[value][piece.rows], value, piece.blocks).copy_(local[value])

    def generated(self, source: Source) -> None:
        """Compute a group by its generated kernel. Entries of blocks that a sequence does not have
        are undefined.
        """
        made = self.made | {value: self._query for value in source.inputs if value.name == "q"}
        tensors = [
            made[value] if value in made else of_pool(self._pool, value) for value in source.inputs
        ]
        for value in source.outputs:
            self.made[value] = self._new(value)
            tensors.append(self.made[value])
        blocks = (self._batch.rows, self._batch.work)
        dispatch.generated(
            source.text, NAME, tensors, blocks, source.tile, heads_of(source, tensors)
        )

    def special(self, value: Value) -> None:
        """Compute a value that looks across blocks. Missing blocks are padded with its neutral
        value.
        """
        operator, batch, options = value.made_by, self._batch, dict(value.options)
        if value.saves_to:
            # the tensor may be in memory that the next call reuses
            self.made[value] = self._read(value.inputs[1]).clone()
            self._saves.append((value.saves_to, self.made[value]))
            return

        inputs = [self._read(given) for given in value.inputs]
        if operator.selects and operator.name != "Union":
            inputs, options["lengths"] = [self._eligible(inputs[0])], batch.filled
        elif batch.missing is not None:
            if operator.takes_lengths:
                options["lengths"] = batch.filled
            pairs = zip(inputs, value.inputs, strict=True)
            inputs = [_filled(x, given, batch.missing, operator.neutral) for x, given in pairs]

        self.made[value] = operator.run(*inputs, **options)

    def save(self) -> None:
        """Write saved values to the caches for the next step, for blocks that exist."""
        batch = self._batch
        there = slice(None) if batch.missing is None else ~batch.missing
        rows = batch.rows[:, : batch.num_blocks][there].flatten()
        for name, new in self._saves:
            cache = self._pool[name]
            cache[rows] = (
                new.reshape(*new.shape[:2], *cache.shape[1:])[there]
                .reshape(-1, *cache.shape[1:])
                .to(cache.dtype)
            )

    def _apply(self, value: Value, inputs: Sequence[Data]) -> Tensor:
        return value.made_by.run(*inputs, **value.options)

    def _read(self, given: Value | float) -> Data:
        batch = self._batch
        together = (
            batch.parts[0].spacing if len(batch.parts) == 1 and batch.missing is None else None
        )
        return self._part(given, _Piece(slice(None), slice(0, batch.num_blocks), together))

    def _part(
        self, given: Value | float, piece: _Piece, local: dict[Value, Data] | None = None
    ) -> Data:
        """Return a value for some sequences and blocks. `local` holds the values already known for
        them.
        """
        if not isinstance(given, Value):
            return given
        if local is not None and given in local:
            return local[given]
        if given in self.made:
            return _cut(self.made[given][piece.rows], given, piece.blocks)
        if given.name == "q":
            return self._query[piece.rows]
        found = self._gather(given.name, piece).float()
        if local is not None:
            local[given] = found
        return found

    def _gather(self, name: str, piece: _Piece) -> Tensor:
        """Return entries of a cache for some sequences and blocks, [s, t, ...].

        The result is valid until the next call for this cache.
        """
        cache, table = self._pool[name], self._batch.rows[piece.rows, piece.blocks]
        if isinstance(cache, Tensor) and piece.spacing is not None:
            first, apart = piece.spacing
            row, start = cache.stride(0), first + piece.blocks.start
            strides = (apart * row, row, *cache.stride()[1:])
            return cache.as_strided(
                (*table.shape, *cache.shape[1:]), strides, cache.storage_offset() + start * row
            )

        # each cache has its own buffer, because a group may read several
        found = (
            take(f"cache {name}", cache, table.flatten())
            if isinstance(cache, Tensor)
            else cache[table.flatten()]
        )
        return found.view(*table.shape, *found.shape[1:])

    def _new(self, value: Value) -> Tensor:
        """Allocate a value for all sequences."""
        shape = [
            self._batch.num_blocks if isinstance(size, NumBlocks) else size
            for size in value.shape[1:]
        ]
        return self._query.new_empty(len(self._query), *shape)

    def _pieces(self, group: Group) -> Iterator[_Piece]:
        """Yield chunks of sequences and blocks that fit the CPU cache."""
        widest = max(size_of(value, 1) for value in group.values)
        size = 4 * (
            widest
            + sum(
                size_of(value, 1) for value in group.inputs if block_axis(value.shape) is not None
            )
        )

        for part in self._batch.parts:
            # number of chunks of a sequence
            count = -(-size * part.num_blocks // CHUNK_BYTES)
            blocks = -(-part.num_blocks // count)
            rows = max(CHUNK_BYTES // (size * blocks), 1)
            for first in range(part.rows.start, part.rows.stop, rows):
                here = slice(first, min(first + rows, part.rows.stop))
                spacing = part.spacing
                if spacing is not None:
                    spacing = (spacing[0] + (first - part.rows.start) * spacing[1], spacing[1])
                for start in range(0, part.num_blocks, blocks):
                    yield _Piece(here, slice(start, min(start + blocks, part.num_blocks)), spacing)

    def _eligible(self, scores: Tensor) -> Tensor:
        """Return scores [S, B], with minus infinity for blocks that every query attends to."""
        flow, flat = self._program.flow, scores.flatten(1).clone()
        flat[:, : flow.FIRST] = -math.inf
        here = torch.arange(flat.shape[1], device=flat.device)
        return flat.masked_fill_(here >= (self._batch.totals - flow.LAST)[:, None], -math.inf)


def of_pool(pool: Pool, value: Value) -> Tensor:
    """Return a cache in the form that generated kernels read. In plain keys or values, every row is
    a block of one head.
    """
    found = pool[value.name]
    if isinstance(found, HeadPages):
        return found.by_block
    return cast(Tensor, found[:, None] if is_of_model(value) else found)


def heads_of(source: Source, tensors: Sequence[Tensor]) -> int:
    """Return Hkv of the keys and values that a kernel reads, or 1 if it reads none."""
    return next(
        (
            x.shape[1]
            for value, x in zip(source.inputs, tensors, strict=False)
            if is_of_model(value)
        ),
        1,
    )


def _cut(x: Tensor, value: Value, blocks: slice) -> Tensor:
    """Return some blocks of a value, as a view."""
    axis = block_axis(value.shape)
    return x if axis is None else x.movedim(axis, 1)[:, blocks].movedim(1, axis)


def _filled(x: Data, given: Value | float, missing: Tensor, neutral: float) -> Data:
    """Return a tensor with `neutral` in the blocks that a sequence does not have."""
    axis = block_axis(given.shape) if isinstance(given, Value) else None
    if axis is None:
        return x
    return (
        x.movedim(axis, 1)
        .masked_fill(missing.view(*missing.shape, *(1,) * (x.dim() - 2)), neutral)
        .movedim(1, axis)
    )


def fill(
    program: Program,
    pool: Pool,
    rows: Tensor,
    count: Lengths | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Run forward_cache for some blocks.

    Args:
        pool: keys, values and caches. The flow's own caches are changed.
        rows: int64 [n].
        count: n as the length of one sequence, if several layers share the plan.
        implementation: see `select`.
    """
    source = cache_source(program) if dispatch.generates(rows.device.type, implementation) else None
    if source is not None:
        tensors = [of_pool(pool, value) for value in source.inputs]
        tensors += [pool[name].view(-1, *value.shape[2:]) for name, value in program.stores.items()]
        blocks = (rows[None], count or Lengths(torch.full((1,), rows.numel(), device=rows.device)))
        dispatch.generated(
            source.text, NAME, tensors, blocks, source.tile, heads_of(source, tensors)
        )
        return
    entries = sum(size_of(value, 1) for value in program.cache) + 2 * math.prod(pool["k"].shape[1:])
    for part in rows.split(max(CHUNK_BYTES // (4 * entries), 1)):
        made: dict[Value | float, Tensor] = {}

        def read(
            value: Value | float, part: Tensor = part, made: dict[Value | float, Tensor] = made
        ) -> Data:
            if not isinstance(value, Value):
                return value
            return made[value] if value in made else pool[value.name][part].float()[None]

        for value in program.cache:
            made[value] = value.made_by.run(*map(read, value.inputs), **value.options)
        for name, value in program.stores.items():
            cache = pool[name]
            cache[part] = read(value).reshape(-1, *cache.shape[1:]).to(cache.dtype)
