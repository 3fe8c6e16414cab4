"""One decode step of the native engine: a token of every running sequence, dense or as its flow says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.sparse import SparseDecode
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.cache import KVCache


def decode(decoder: Decoder, cache: KVCache, flows: SparseDecode, sequences: Sequence[SequenceState]) -> Tensor:
    """Logits [b, V] after the last token of each, which is computed and written to the pool."""
    device, scale = decoder.device, decoder.config.attention_scale
    tokens = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
    positions = [torch.tensor([sequence.num_computed]) for sequence in sequences]
    slots = [sequence.pages.slots for sequence in sequences]
    layout = AttentionLayout.of(positions, slots, cache.layout.sinks, cache.layout.window)
    dropped = torch.tensor([sequence.num_dropped for sequence in sequences], device=device)
    longest = max(sequence.num_computed + sequence.num_dropped for sequence in sequences) + 1
    cos, sin = decoder.config.rope.fresh_table(layout.query_positions + dropped, longest)
    flow_batches = flows.plan(sequences)
    hidden = decoder.embed(tokens)  # [b, D]
    for layer, heads in enumerate(cache.layout.layers):
        query, keys, values = decoder.project(layer, hidden, cos, sin)
        cache.write(layer, layout.query_slots, keys, values)
        cache.write_residual(layer, layout.query_slots, hidden)
        sparse = [batch for batch in flow_batches if layer not in batch.indexer.program.flow.layers_skip]
        dense = _others(len(sequences), [batch.rows for batch in sparse])
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        if dense:
            part = layout.part(dense)
            attended[list(dense)] = segpaged_attention(query[list(dense)], cache.keys, cache.values, heads, part, scale)
        for batch in sparse:
            attended[batch.rows] = batch.attend(query[batch.rows], flows.at(layer, batch.indexer), scale)
        hidden = decoder.after_attention(layer, hidden, attended.flatten(1))
    return decoder.logits(hidden)


def _others(count: int, taken: Sequence[Tensor]) -> tuple[int, ...]:
    used = {row for rows in taken for row in rows.tolist()}
    return tuple(row for row in range(count) if row not in used)
