"""One decode step of the native engine: one token of every running sequence, with dense attention
or by its flow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.sparse import FlowBatch, Followers, SparseDecode
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout, Context, StepRows
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.kv.cache import KVCache


def decode(
    decoder: Decoder,
    cache: KVCache,
    flows: SparseDecode,
    sequences: Sequence[SequenceState],
    followed: Sequence[Followers],
) -> Tensor:
    """Compute the last token of each sequence, write its KV to the pool, and return logits [b, V]
    after it.

    Args:
        followed: result of `flows.follow` for these sequences.
    """
    numbers = numbers_of(cache, sequences, len(sequences), num_blocks(cache, sequences))
    step = StepInputs.of(cache, upload(cache.keys.device, numbers)[0], len(sequences))
    contexts = tuple(
        Context(torch.tensor([sequence.num_computed]), sequence.pages.slots)
        for sequence in sequences
    )
    batches = [flows.batch(followers, step.rows.pages[:, 0]) for followers in followed]
    layout = AttentionLayout(contexts, cache.layout.sinks, cache.layout.window, step.rows)
    attention = StepAttention(cache, flows, layout, batches, decoder.config.attention_scale)
    return decoder.logits(last_hidden(decoder, attention, step, longest(sequences)))


def last_hidden(
    decoder: Decoder, attention: "StepAttention", step: "StepInputs", length: int
) -> Tensor:
    """Return hidden states [b, D] that leave the last layer; write keys and values to the pool.

    Args:
        length: greater than all positions.
    """
    cos, sin = decoder.config.rope.fresh_table(step.positions, length)
    cache, slots = attention.cache, step.rows.query_slots
    hidden = decoder.embed(step.tokens)  # [b, D]
    for layer in range(decoder.config.num_layers):
        query, keys, values = decoder.project(layer, hidden, cos, sin)
        cache.write(layer, slots, keys, values)
        cache.write_residual(layer, slots, hidden)
        hidden = decoder.after_attention(layer, hidden, attention.attend(layer, query).flatten(1))
    return hidden


def num_blocks(cache: KVCache, sequences: Sequence[SequenceState]) -> int:
    """Blocks of the longest sequence, including its next token."""
    return max(sequence.num_computed for sequence in sequences) // cache.block_size + 1


def longest(sequences: Sequence[SequenceState]) -> int:
    """One more than the greatest position of the next tokens."""
    return max(sequence.num_computed + sequence.num_dropped for sequence in sequences) + 1


def numbers_of(
    cache: KVCache, sequences: Sequence[SequenceState], rows: int, blocks: int
) -> Tensor:
    """Pack all numbers that a step needs about the next token of each sequence, int64 [n] on the
    CPU, for `StepInputs`.

    Rows behind the last sequence are padding: they see nothing and are not written.
    """
    count, num_lists, size = len(sequences), cache.layout.num_lists, cache.block_size
    own = np.zeros((2, rows), np.int64)  # tokens, positions
    places, slots = np.full(rows, -1), np.full((num_lists, rows), -1)
    pages = np.zeros((rows, num_lists, blocks), np.int64)
    places[:count] = [sequence.num_computed for sequence in sequences]
    own[0, :count] = [sequence.tokens[-1] for sequence in sequences]
    own[1, :count] = places[:count] + [sequence.num_dropped for sequence in sequences]
    for part, sequence in zip(pages, sequences, strict=False):
        held = sequence.pages.pages[:, :blocks]
        part[:, : held.shape[1]] = held

    block, place = np.divmod(places[:count], size)
    slots[:, :count] = (pages[np.arange(count), :, block] * size + place[:, None]).T
    return torch.from_numpy(np.concatenate([part.ravel() for part in (own, places, slots, pages)]))


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Inputs that change from one step to the next, on the device.

    Attributes:
        tokens: int64 [b], tokens whose keys and values are computed.
        positions: int64 [b], of the tokens in their texts.
        rows: where the tokens lie in the pool.
    """

    tokens: Tensor
    positions: Tensor
    rows: StepRows

    @classmethod
    def of(cls, cache: KVCache, numbers: Tensor, rows: int) -> "StepInputs":
        """Unpack the result of `numbers_of` for `rows` rows."""
        num_lists = cache.layout.num_lists
        sizes = [rows, rows, rows, num_lists * rows]
        tokens, positions, places, slots, pages = numbers.split([*sizes, len(numbers) - sum(sizes)])
        pages = pages.view(rows, num_lists, -1)
        return cls(
            tokens,
            positions,
            StepRows(places, slots.view(num_lists, rows), pages, cache.block_size),
        )


@dataclass(frozen=True, eq=False)
class StepAttention:
    """The attention of a step: by their flow for some sequences, dense for all others.

    Heads that see only sinks and a window have no blocks to choose, so no flow changes them.

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
        """Queries [b, Hq, d] -> attention output [b, Hq, d] over keys and values in the pool."""
        sparse = tuple(
            batch for batch in self.batches if layer not in batch.indexer.program.flow.layers_skip
        )
        if not sparse or not self.cache.layout.layers[layer].whole:
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
        return self._heads(query, self.cache.layout.layers[layer], layout)

    def _heads(self, query: Tensor, heads: LayerHeads, layout: AttentionLayout) -> Tensor:
        return segpaged_attention(
            query, self.cache.keys, self.cache.values, heads, layout, self.scale
        )

    def _sparse(self, layer: int, query: Tensor, batch: FlowBatch) -> Tensor:
        heads, indexer = self.cache.layout.layers[layer], self.flows.at(layer, batch.indexer)
        # [r, Hkv, g, d]
        by_head = query.unflatten(1, (len(heads.streams), -1))
        if not heads.windowed:
            return batch.attend(by_head, indexer, self.scale).view(query.shape)

        layout = self.layout if batch.rows is None else self.layout.part(batch.numbers)
        [whole], attended = heads.whole, torch.empty_like(by_head)
        places = self.flows.places(whole.heads)
        found = batch.attend(by_head.index_select(1, places), indexer, self.scale)
        attended.index_copy_(1, places, found)

        places = self.flows.places(heads.windowed)
        own = by_head.index_select(1, places)
        found = self._heads(own.flatten(1, 2), heads.of_windowed, layout)
        attended.index_copy_(1, places, found.view(own.shape))
        return attended.flatten(1, 2)

    @memoised
    def _others(self, batches: tuple[FlowBatch, ...]) -> tuple[tuple[int, ...], Tensor]:
        """Sequences that are in none of the batches, as numbers and as a tensor on the pool's
        device."""
        taken = {number for batch in batches for number in batch.numbers}
        others = tuple(number for number in range(len(self.layout.contexts)) if number not in taken)
        return others, upload(self.cache.keys.device, torch.tensor(others, dtype=torch.int64))[0]
