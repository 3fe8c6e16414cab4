"""Indexer of a host: a flow traced for the model's geometry, and the flow's caches for the paged
pool.
"""

from functools import cached_property

import torch
from torch import Tensor

from kvgraft.decode.batch import Batch, tables
from kvgraft.decode.codegen import cache_source
from kvgraft.decode.executor import HeadPages, Paged, Pool, fill, select
from kvgraft.decode.flow import Program
from kvgraft.decode.fused import choose, kernels_of
from kvgraft.decode.graph import Value
from kvgraft.decode.planner import plan
from kvgraft.kernels import dispatch
from kvgraft.kernels.dispatch import block_sparse_attention
from kvgraft.kernels.watched import watched
from kvgraft.kernels.workload import Lengths


class Indexer:
    """A flow over a paged pool of keys and values [rows, b, d]. A row is a page of one KV head of
    one layer.

    The caches of the flow have the same rows. The owner of a page also owns its cache entries.
    `fill` computes the entries when a page becomes full, or when a host cannot know them. State
    that steps change (`Save`) is reset at that time. Requests cannot share pages with such state
    (`Program.is_stateful`).

    Args:
        like: tensor with the dtype and the device of the caches.
    """

    def __init__(self, program: Program, num_rows: int, like: Tensor) -> None:
        self.program = program
        self.groups = plan(program)
        self.caches = {
            name: torch.empty(
                num_rows,
                *shape,
                # saved state adds up many small steps
                dtype=torch.float32 if name in program.saved else like.dtype,
                device=like.device,
            )
            for name, shape in program.caches.items()
        }

    @cached_property
    def is_fused(self) -> bool:
        """True if a host that generates kernels need not know lengths: no size and no decision
        depends on them.
        """
        program = self.program
        chooses = not isinstance(program.selection, Value) or kernels_of(program) is not None
        return chooses and (not program.stores or cache_source(program) is not None)

    def at(self, rows: slice, keys: Paged, values: Paged) -> "LayerIndexer":
        """Return the indexer of one layer, with its rows, and its keys and values [rows, b, d]."""
        return LayerIndexer(
            self, {"k": keys, "v": values, **{name: x[rows] for name, x in self.caches.items()}}
        )


class LayerIndexer:
    """Part of an `Indexer` for one layer."""

    def __init__(self, indexer: Indexer, pool: Pool) -> None:
        self._indexer = indexer
        self._pool = pool

    @watched("indexer")
    def fill(self, rows: Tensor, count: Lengths | None = None) -> None:
        """Compute the cache entries of pages that have become full.

        Args:
            rows: int64 [n].
            count: n as the length of a sequence, to share its plan among layers.
        """
        if rows.numel():
            fill(self._indexer.program, self._pool, rows, count)

    @watched("indexer")
    def choose(self, query: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choose blocks for queries [S, g, d].

        Returns:
            Tables int64 [S, m] and the number of tokens in them, int64 [S], for any paged decode
            kernel.
        """
        program = self._indexer.program
        if not isinstance(program.selection, Value):
            return batch.fixed(tuple(program.selection), program.flow)
        if (
            dispatch.generates(query.device.type)
            and batch.num_blocks
            and (kernels := kernels_of(program))
        ):
            return choose(kernels, program, query, self._pool, batch)
        return tables(
            select(program, self._indexer.groups, query, self._pool, batch), batch, program.flow
        )

    def attend(self, query: Tensor, batch: Batch, scale: float) -> Tensor:
        """Return the attention [S, g, d] of queries [S, g, d] to the chosen blocks. Keys and values
        are tensors or `HeadPages`.
        """
        tables, lengths = self.choose(query, batch)
        bound = batch.attended(tables.shape[1])
        keys, values = (
            x.by_block if isinstance(x, HeadPages) else x
            for x in (self._pool["k"], self._pool["v"])
        )
        return block_sparse_attention(query, keys, values, tables, lengths, scale, bound)
