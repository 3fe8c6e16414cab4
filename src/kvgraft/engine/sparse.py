"""Flows on the native engine's pool: which sequences of a step attend sparsely, and to what."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvgraft.decode.batch import Batch
from kvgraft.decode.flow import Flow, Program, trace
from kvgraft.decode.flows import parse_flow
from kvgraft.decode.indexer import Indexer, LayerIndexer
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kernels.upload import upload
from kvgraft.kernels.workload import Lengths
from kvgraft.kv.cache import KVCache


@dataclass(frozen=True, eq=False)
class FlowBatch:
    """The sequences of a decode step that follow one flow.

    Attributes:
        numbers: which of the step.
        rows: the same beside the pool; None for all.
        batch: one row for each of their KV heads, of a layer's pages.
        full: int64 [n], pages of a layer that are full from this step on.
    """

    indexer: Indexer
    numbers: tuple[int, ...]
    rows: Tensor | None
    batch: Batch
    full: Tensor

    @cached_property
    def num_full(self) -> Lengths:
        """How many pages are full from this step on."""
        known = torch.tensor([len(self.full)])
        return Lengths(upload(self.full.device, known)[0], known)

    def attend(self, query: Tensor, layer: LayerIndexer, scale: float) -> Tensor:
        """Queries [r, Hq, d] of the rows -> [r, Hq, d]."""
        layer.fill(self.full, self.num_full)
        by_head = query.unflatten(1, (len(self.batch.rows) // len(query), -1)).flatten(0, 1)  # [r * Hkv, g, d]
        return layer.attend(by_head, self.batch, scale).view(query.shape)


class SparseDecode:
    """The flows of all running sequences. Their caches are made when they are first needed, filled anew for every
    sequence, and dropped when another flow needs its own and no sequence uses them.

    Args:
        group: query heads of a KV head.
    """

    def __init__(self, cache: KVCache, group: int) -> None:
        self._cache = cache
        self._group = group
        self._programs: dict[Flow, Program] = {}
        self._indexers: dict[Flow, Indexer] = {}

    def find(self, flow: str | Flow | None) -> Flow | None:
        """A flow that decode steps of this engine can follow, from what names it; None for dense attention.

        Raises:
            FileNotFoundError, ValueError: as `parse_flow` and `trace`, or local heads keep no blocks to choose.
        """
        chosen = parse_flow(flow) if isinstance(flow, str) else flow
        if chosen is not None:
            if self._cache.layout.num_local_lists:
                raise ValueError(f"flow {chosen.name!r} and head_paging exclude each other: local heads keep no blocks")
            self.program(chosen)
        return chosen

    def program(self, flow: Flow) -> Program:
        """The flow, traced for this model; raises FlowError if it cannot be right."""
        if flow not in self._programs:
            self._programs[flow] = trace(flow, self._cache.block_size, self._cache.keys.shape[2], self._group)
        return self._programs[flow]

    def plan(self, sequences: Sequence[SequenceState], pages: Tensor) -> list[FlowBatch]:
        """What a step that computes the next token of each can do sparsely. KV after such a step is approximate.

        Args:
            pages: int64 [sequences, blocks], of their first lists beside the pool; any page behind the last block.
        """
        rows_by_flow: dict[Flow, list[int]] = {}
        for number, sequence in enumerate(sequences):
            flow = sequence.flow
            if flow is not None and self.program(flow).reaches(sequence.num_computed + 1):
                rows_by_flow.setdefault(flow, []).append(number)
                sequence.offer.first_approximate = min(sequence.offer.first_approximate, sequence.num_computed)
        for flow in rows_by_flow.keys() - self._indexers.keys():
            used = {sequence.flow for sequence in sequences}
            self._indexers = {known: indexer for known, indexer in self._indexers.items() if known in used}
            num_rows = self._cache.keys.shape[:2].numel() // self._cache.block_size
            self._indexers[flow] = Indexer(self.program(flow), num_rows, self._cache.keys)
        return [self._batch_of(flow, rows, sequences, pages) for flow, rows in rows_by_flow.items()]

    def at(self, layer: int, indexer: Indexer) -> LayerIndexer:
        """A layer's part of the pool."""
        streams = self._cache.layout.layers[layer].whole[0].streams
        size, num_pages = self._cache.block_size, self._cache.keys.shape[1] // self._cache.block_size
        keys, values = (pool[streams].view(-1, size, pool.shape[2]) for pool in (self._cache.keys, self._cache.values))
        return indexer.at(slice(streams.start * num_pages, streams.stop * num_pages), keys, values)

    def _batch_of(self, flow: Flow, numbers: list[int], sequences: Sequence[SequenceState], pages: Tensor) -> FlowBatch:
        size, device, full = self._cache.block_size, pages.device, [np.zeros(0, np.int64)]
        rows = None if len(numbers) == len(sequences) else upload(device, torch.tensor(numbers))[0]
        chosen = [sequences[number] for number in numbers]
        tokens = [sequence.num_computed + 1 for sequence in chosen]
        for count, sequence in zip(tokens, chosen, strict=True):
            full.append(sequence.pages.pages[0, sequence.num_indexed : count // size])
            sequence.num_indexed = count // size
        num_heads = len(self._cache.layout.layers[0].streams)
        heads = torch.arange(num_heads, device=device)[:, None] * (self._cache.keys.shape[1] // size)  # [Hkv, 1]
        own = (pages if rows is None else pages[rows])[:, : -(-max(tokens) // size)]
        by_head = (own[:, None] + heads).flatten(0, 1)
        batch = Batch(by_head, torch.tensor(tokens).repeat_interleave(num_heads), size)
        fresh = torch.from_numpy(np.concatenate(full))
        if len(fresh):
            fresh = (upload(device, fresh)[0] + heads).flatten()
        return FlowBatch(self._indexers[flow], tuple(numbers), rows, batch, fresh)
