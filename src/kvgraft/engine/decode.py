"""One decode step of the native engine: a token of every running sequence, dense or as its flow says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.sparse import FlowBatch, SparseDecode
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout, Context, StepRows
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kv.cache import KVCache


def decode(decoder: Decoder, cache: KVCache, flows: SparseDecode, sequences: Sequence[SequenceState]) -> Tensor:
    """Logits [b, V] after the last token of each, which is computed and written to the pool."""
    step = StepInputs.of(cache, sequences)
    longest = max(sequence.num_computed + sequence.num_dropped for sequence in sequences) + 1
    cos, sin = decoder.config.rope.fresh_table(step.positions, longest)
    batches = flows.plan(sequences, step.pages[:, 0])
    attention = StepAttention(cache, flows, step.layout, batches, decoder.config.attention_scale)
    slots = step.layout.query_slots
    hidden = decoder.embed(step.tokens)  # [b, D]
    for layer in range(decoder.config.num_layers):
        query, keys, values = decoder.project(layer, hidden, cos, sin)
        cache.write(layer, slots, keys, values)
        cache.write_residual(layer, slots, hidden)
        hidden = decoder.after_attention(layer, hidden, attention.attend(layer, query).flatten(1))
    return decoder.logits(hidden)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What changes from one step to the next, brought to the device in one copy.

    Attributes:
        tokens: int64 [b], whose keys and values are computed.
        positions: int64 [b], of the tokens in their texts.
        pages: int64 [b, lists, blocks], any page behind the last block.
        layout: where they lie in the pool.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    layout: AttentionLayout

    @classmethod
    def of(cls, cache: KVCache, sequences: Sequence[SequenceState]) -> "StepInputs":
        """Of the next token of each sequence."""
        count, num_lists, size = len(sequences), cache.layout.num_lists, cache.block_size
        places = np.array([sequence.num_computed for sequence in sequences])
        num_blocks = int(places.max()) // size + 1
        pages = np.zeros((count, num_lists, num_blocks), np.int64)
        for own, sequence in zip(pages, sequences, strict=True):
            held = sequence.pages.pages[:, :num_blocks]
            own[:, : held.shape[1]] = held
        slots = pages[np.arange(count), :, places // size] * size + (places % size)[:, None]  # [b, lists]
        tokens = [sequence.tokens[-1] for sequence in sequences]
        dropped = [sequence.num_dropped for sequence in sequences]
        parts = np.array(tokens), places + dropped, places, slots.T.ravel(), pages.ravel()
        [packed] = upload(cache.keys.device, torch.from_numpy(np.concatenate(parts)))
        token, position, place, slot, page = packed.split([part.size for part in parts])
        rows = StepRows(place, slot.view(num_lists, count), page.view(pages.shape), size)
        contexts = tuple(Context(torch.tensor([sequence.num_computed]), sequence.pages.slots) for sequence in sequences)
        layout = AttentionLayout(contexts, cache.layout.sinks, cache.layout.window, rows)
        return cls(token, position, rows.pages, layout)


@dataclass(frozen=True, eq=False)
class StepAttention:
    """The attention of a step: of some sequences as their flows say, of all others dense.

    Attributes:
        batches: of sequences that follow flows.
        scale: of the logits.
    """

    cache: KVCache
    flows: SparseDecode
    layout: AttentionLayout
    batches: Sequence[FlowBatch]
    scale: float

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Queries [b, Hq, d] -> [b, Hq, d], of keys and values in the pool."""
        sparse = tuple(batch for batch in self.batches if layer not in batch.indexer.program.flow.layers_skip)
        if not sparse:
            return self._dense(layer, query, self.layout)
        if sparse[0].rows is None:
            return self._sparse(layer, query, sparse[0])
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        for batch in sparse:
            attended[batch.rows] = self._sparse(layer, query[batch.rows], batch)
        others, rows = self._others(sparse)
        if others:
            attended[rows] = self._dense(layer, query[rows], self.layout.part(others))
        return attended

    def _dense(self, layer: int, query: Tensor, layout: AttentionLayout) -> Tensor:
        heads = self.cache.layout.layers[layer]
        return segpaged_attention(query, self.cache.keys, self.cache.values, heads, layout, self.scale)

    def _sparse(self, layer: int, query: Tensor, batch: FlowBatch) -> Tensor:
        return batch.attend(query, self.flows.at(layer, batch.indexer), self.scale)

    @memoised
    def _others(self, batches: tuple[FlowBatch, ...]) -> tuple[tuple[int, ...], Tensor]:
        """Sequences that are in none of the batches, and the same beside the pool."""
        taken = {number for batch in batches for number in batch.numbers}
        others = tuple(number for number in range(len(self.layout.contexts)) if number not in taken)
        return others, upload(self.cache.keys.device, torch.tensor(others, dtype=torch.int64))[0]
