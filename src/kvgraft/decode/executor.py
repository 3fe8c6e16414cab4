"""Runs the groups of a flow: all sequences of a step at once.

In batched torch a group that works block by block takes a chunk of blocks at a time, one that fits
a cache, of sequences of similar length. On CUDA with Triton such groups are generated kernels,
whose programs have equal shares of all blocks. What looks across blocks is padded to the longest
sequence: by then a block is a few numbers."""

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

Data = Any  # a tensor, or a number that stands for one
CHUNK_BYTES = PIECE  # of what a group holds at a time


class Paged(Protocol):
    """Keys or values [rows, b, d], plain tensors or not."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadPages:
    """Keys or values whose heads do not all lie equally far apart, by row: row r is head r % Hkv of
    block r // Hkv.

    Attributes:
        by_block: [blocks, Hkv, b, d], with any strides but for the last, which is 1.
    """

    by_block: Tensor

    @property
    def shape(self) -> Sequence[int]:
        """[rows, b, d], as of a tensor."""
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
    """The blocks that a flow chooses.

    Args:
        query: [S, g, d].
        pool: what the flow saves is changed.
        implementation: of what works block by block: cpu (batched torch) | triton; by default the
            device decides.

    Returns:
        int64 [S, n], -1 for none; some may be those that are always attended to.
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
        spacing: as of `Part`, from the first of these sequences on.
    """

    rows: slice
    blocks: slice
    spacing: tuple[int, int] | None


class _Run:
    def __init__(self, program: Program, query: Tensor, pool: Pool, batch: Batch) -> None:
        self.made: dict[Value, Tensor] = {}
        self._program, self._query, self._pool, self._batch = program, query.float(), pool, batch
        self._saves: list[tuple[str, Tensor]] = []

    def query_group(self, group: Group) -> None:
        """Values without blocks: once."""
        for value in group.values:
            self.made[value] = self._apply(value, [self._read(given) for given in value.inputs])

    def chunks(self, group: Group) -> None:
        """Values block by block: a chunk goes through all operators of the group."""
        self.made |= {value: self._new(value) for value in group.outputs}
        for piece in self._pieces(group):
            local: dict[Value, Data] = {}
            for value in group.values:
                inputs = [self._part(given, piece, local) for given in value.inputs]
                local[value] = self._apply(value, inputs)
            for value in group.outputs:
                _cut(self.made[value][piece.rows], value, piece.blocks).copy_(local[value])

    def generated(self, source: Source) -> None:
        """Values of a group, by its kernel; those of blocks that a sequence does not have are left
        undefined."""
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
        """A value that looks across blocks; those that are not there hold what it passes by."""
        operator, batch, options = value.made_by, self._batch, dict(value.options)
        if value.saves_to:
            self.made[value] = self._read(value.inputs[1]).clone()  # it may lie in a room
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
        """Leave for the next step what was saved, of blocks that are there."""
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
        """Of some sequences and blocks; `local` holds what is known of them."""
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
        """A cache of some sequences and blocks, [s, t, ...], until the next call for this cache."""
        cache, table = self._pool[name], self._batch.rows[piece.rows, piece.blocks]
        if isinstance(cache, Tensor) and piece.spacing is not None:
            first, apart = piece.spacing
            row, start = cache.stride(0), first + piece.blocks.start
            strides = (apart * row, row, *cache.stride()[1:])
            return cache.as_strided(
                (*table.shape, *cache.shape[1:]), strides, cache.storage_offset() + start * row
            )
        # each cache has its own room: a group may read several
        found = (
            take(f"cache {name}", cache, table.flatten())
            if isinstance(cache, Tensor)
            else cache[table.flatten()]
        )
        return found.view(*table.shape, *found.shape[1:])

    def _new(self, value: Value) -> Tensor:
        """For a value of all sequences."""
        shape = [
            self._batch.num_blocks if isinstance(size, NumBlocks) else size
            for size in value.shape[1:]
        ]
        return self._query.new_empty(len(self._query), *shape)

    def _pieces(self, group: Group) -> Iterator[_Piece]:
        """Chunks of sequences and blocks that fit the cache."""
        widest = max(size_of(value, 1) for value in group.values)
        size = 4 * (
            widest
            + sum(
                size_of(value, 1) for value in group.inputs if block_axis(value.shape) is not None
            )
        )
        for part in self._batch.parts:
            count = -(-size * part.num_blocks // CHUNK_BYTES)  # chunks of a sequence
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
        """Scores [S, B], minus infinity for the blocks that are attended to in any case."""
        flow, flat = self._program.flow, scores.flatten(1).clone()
        flat[:, : flow.FIRST] = -math.inf
        here = torch.arange(flat.shape[1], device=flat.device)
        return flat.masked_fill_(here >= (self._batch.totals - flow.LAST)[:, None], -math.inf)


def of_pool(pool: Pool, value: Value) -> Tensor:
    """A cache, as generated kernels read it: of plain keys or values every row is a block of one
    head."""
    found = pool[value.name]
    if isinstance(found, HeadPages):
        return found.by_block
    return cast(Tensor, found[:, None] if is_of_model(value) else found)


def heads_of(source: Source, tensors: Sequence[Tensor]) -> int:
    """Hkv of the keys and values that a kernel reads, if any."""
    return next(
        (
            x.shape[1]
            for value, x in zip(source.inputs, tensors, strict=False)
            if is_of_model(value)
        ),
        1,
    )


def _cut(x: Tensor, value: Value, blocks: slice) -> Tensor:
    """Some blocks of a value, in place."""
    axis = block_axis(value.shape)
    return x if axis is None else x.movedim(axis, 1)[:, blocks].movedim(1, axis)


def _filled(x: Data, given: Value | float, missing: Tensor, neutral: float) -> Data:
    """With `neutral` in the blocks that a sequence does not have."""
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
    """forward_cache for some blocks.

    Args:
        pool: the flow's own caches are changed.
        rows: int64 [n].
        count: n as the length of one sequence, where several layers shall share the plan.
        implementation: as of `select`.
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
