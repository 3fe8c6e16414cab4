"""Flows on the native engine's pool: which sequences of a step attend sparsely, and to which
blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.decode.batch import Batch
from kvgraft.decode.flow import Flow, Program, trace
from kvgraft.decode.indexer import Indexer, LayerIndexer
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.flows import parse_flow
from kvgraft.kernels.layout import StepRows
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kernels.workload import Lengths
from kvgraft.kv.cache import KVCache


@dataclass(frozen=True, eq=False)
class Followers:
    """The sequences of a decode step that follow one flow, on the host.

    Attributes:
        numbers: their indices in the step.
        tokens: number of tokens of each, including the one that is computed.
        full: int64 [n], pages of their first lists that become full in this step.
    """

    indexer: Indexer
    numbers: tuple[int, ...]
    tokens: list[int]
    full: np.ndarray


@dataclass(frozen=True, eq=False)
class FlowBatch:
    """The same sequences on the device of the pool.

    Attributes:
        numbers: their indices in the step, unless they are all.
        rows: the same indices on the device; None for all.
        pages: int64 [r, blocks], pages of their first lists; any page behind the last.
        tokens: int64 [r], see `Batch`.
        full: int64 [n], pages of first lists; the first `num_full` become full in this step.
        num_pages: pages of the pool.
    """

    indexer: Indexer
    numbers: tuple[int, ...]
    rows: Tensor | None
    pages: Tensor
    tokens: Tensor
    full: Tensor
    num_full: Lengths
    num_pages: int

    def attend(self, query: Tensor, layer: LayerIndexer, scale: float) -> Tensor:
        """Attend with KV heads that keep all tokens, and with no other head of a layer.

        Args:
            query: [r, Hkv, g, d], of the rows.

        Returns:
            [r, Hkv, g, d].
        """
        batch, full, num_full = self._by_head(query.shape[1])
        layer.fill(full, num_full)
        return layer.attend(query.flatten(0, 1), batch, scale).view(query.shape)

    @memoised
    def _by_head(self, num_heads: int) -> tuple[Batch, Tensor, Lengths]:
        """Return a batch with one row for each of `num_heads` KV heads of a layer, the rows that
        become full, and their number."""
        firsts = torch.arange(num_heads, device=self.pages.device) * self.num_pages
        rows = (self.pages[:, None] + firsts[:, None]).flatten(0, 1)
        block_size = self.indexer.program.block_size
        batch = Batch(rows, self.tokens.repeat_interleave(num_heads), block_size)
        full, num_full = self.full, self.num_full
        if len(full):
            full, num_full = (full[:, None] + firsts).flatten(), num_full.times(num_heads)
        return batch, full, num_full


class SparseDecode:
    """The flows of all running sequences.

    Their caches are made on first use and filled for every new sequence. A cache is dropped when
    another flow needs its own and no sequence uses it.

    Args:
        group: query heads of a KV head.
    """

    def __init__(self, cache: KVCache, group: int) -> None:
        self._cache = cache
        self._group = group
        self._programs: dict[Flow, Program] = {}
        self._indexers: dict[Flow, Indexer] = {}

    def find(self, flow: str | Flow | None) -> Flow | None:
        """Return the flow of this name that decode steps can follow; None for dense attention.

        Raises:
            FileNotFoundError, ValueError: as `parse_flow` and `trace`.
        """
        chosen = parse_flow(flow) if isinstance(flow, str) else flow
        if chosen is not None:
            self.program(chosen)
        return chosen

    def program(self, flow: Flow) -> Program:
        """Return the flow traced for this model; raises FlowError if it is not valid."""
        if flow not in self._programs:
            self._programs[flow] = trace(
                flow, self._cache.block_size, self._cache.keys.shape[2], self._group
            )
        return self._programs[flow]

    def follow(self, sequences: Sequence[SequenceState]) -> list[Followers]:
        """Return the sequences that follow a flow in a step that computes the next token of each.
        Their later KV is approximate."""
        numbers: dict[Flow, list[int]] = {}
        for number, sequence in enumerate(sequences):
            flow = sequence.flow
            if flow is not None and self.program(flow).reaches(sequence.num_computed + 1):
                numbers.setdefault(flow, []).append(number)
                sequence.provenance.first_approximate = min(
                    sequence.provenance.first_approximate, sequence.num_computed
                )

        for flow in numbers.keys() - self._indexers.keys():
            used = {sequence.flow for sequence in sequences}
            self._indexers = {
                known: indexer for known, indexer in self._indexers.items() if known in used
            }
            num_rows = self._cache.keys.shape[:2].numel() // self._cache.block_size
            self._indexers[flow] = Indexer(self.program(flow), num_rows, self._cache.keys)

        return [
            self._followers(flow, own, [sequences[number] for number in own])
            for flow, own in numbers.items()
        ]

    def batch(self, followers: Followers, pages: Tensor) -> FlowBatch:
        """Copy followers to the device of the pool.

        Args:
            pages: int64 [sequences, blocks], the first lists of all sequences of the step; any page
                behind the last.
        """
        size, device, numbers = self._cache.block_size, pages.device, followers.numbers
        rows = None if len(numbers) == len(pages) else upload(device, torch.tensor(numbers))[0]
        own = (pages if rows is None else pages[rows])[:, : -(-max(followers.tokens) // size)]
        full, known = torch.from_numpy(followers.full), torch.tensor([len(followers.full)])
        count = known
        if len(full):
            full, count = upload(device, full, known)
        return FlowBatch(
            followers.indexer,
            numbers,
            rows,
            own,
            torch.tensor(followers.tokens),
            full,
            Lengths(count, known),
            self._num_pages,
        )

    def batch_of_all(
        self, indexer: Indexer, step: StepRows, full: Tensor, num_full: Tensor
    ) -> FlowBatch:
        """Return a batch of all sequences of a step, whose lengths only the device knows.

        Args:
            full: int64 [n], pages of first lists. The first `num_full` int64 [1] of them become
                full in this step.
        """
        pages, tokens = step.pages[:, 0], step.positions + 1
        return FlowBatch(indexer, (), None, pages, tokens, full, Lengths(num_full), self._num_pages)

    def at(self, layer: int, indexer: Indexer) -> LayerIndexer:
        """Return the part of the pool that belongs to the heads of a layer that keep all tokens."""
        streams = self._cache.layout.layers[layer].whole[0].streams
        size, num_pages = self._cache.block_size, self._num_pages
        keys, values = (
            pool[streams].view(-1, size, pool.shape[2])
            for pool in (self._cache.keys, self._cache.values)
        )
        return indexer.at(slice(streams.start * num_pages, streams.stop * num_pages), keys, values)

    def _followers(
        self, flow: Flow, numbers: list[int], sequences: Sequence[SequenceState]
    ) -> Followers:
        full, tokens = (
            [np.zeros(0, np.int64)],
            [sequence.num_computed + 1 for sequence in sequences],
        )
        for count, sequence in zip(tokens, sequences, strict=True):
            full.append(
                sequence.pages.pages[0, sequence.num_indexed : count // self._cache.block_size]
            )
            sequence.num_indexed = count // self._cache.block_size
        return Followers(self._indexers[flow], tuple(numbers), tokens, np.concatenate(full))

    @memoised
    def places(self, heads: tuple[int, ...]) -> Tensor:
        """Return numbers of heads as a tensor on the device of the pool, made once."""
        return upload(self._cache.keys.device, torch.tensor(heads))[0]

    @property
    def _num_pages(self) -> int:
        """Number of pages of the pool."""
        return self._cache.keys.shape[1] // self._cache.block_size
