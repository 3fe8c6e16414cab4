"""Documents that the native engine has read on their own, for policies that keep a part of them."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder, causal_attention
from kvgraft.kv.documents import Blocks, Document, DocumentStore
from kvgraft.kv.importance import by_block, exceptionally_small, received_attention

HOST = torch.device("cpu")  # where documents lie


class Library:
    """Gives documents by their tokens, and reads those that it does not have.

    Args:
        stable_layers: of the model (N*).
    """

    def __init__(self, decoder: Decoder, store: DocumentStore, stable_layers: Sequence[int]) -> None:
        self.store = store
        self.stable_layers = tuple(stable_layers)
        self._decoder = decoder

    def fetch(
        self, tokens: Sequence[int], scope: bytes, blocks: Blocks, *, remember: bool = True
    ) -> tuple[Document, bool]:
        """The document, and whether it had to be read; that is remembered if it may be."""
        key = np.array(tokens, np.int64)
        document = self.store.get(key, scope, blocks)
        if document is not None:
            return document, False
        document = read_document(self._decoder, tokens, blocks)
        if remember:
            self.store.put(key, scope, blocks, document)
        return document, True


def read_document(decoder: Decoder, tokens: Sequence[int], blocks: Blocks) -> Document:
    """Read a text on its own: its KV at positions 0..n-1, and what is known of its blocks (SamKV, Appendix A.1)."""
    config, device = decoder.config, decoder.device
    size = blocks.size_for(len(tokens))
    local = min(blocks.middle_tokens(len(tokens)).stop, len(tokens) - 1)  # the first; at least the last token asks
    cos, sin = config.rope.table(torch.arange(len(tokens), device=device))
    hidden = decoder.embed(torch.tensor(tokens, device=device))
    found: dict[str, list[Tensor]] = defaultdict(list)
    for index in range(config.num_layers):
        query, keys, values = decoder.project(index, hidden, cos, sin)
        attended = causal_attention(query, keys, values).flatten(1)
        hidden = decoder.feed_forward(index, decoder.add_attention(index, hidden, attended))
        importance = by_block(received_attention(query, keys), size)
        outliers = torch.zeros(len(tokens), dtype=torch.bool, device=device)
        outliers[importance.representative[exceptionally_small(importance.exponent)]] = True
        for name, value in (
            ("keys", keys.transpose(0, 1)),
            ("values", values.transpose(0, 1)),
            ("block_keys", torch.stack([part.float().mean(0).to(keys.dtype) for part in keys.split(size)])),
            ("local_query", query[local:].float().mean(0).to(query.dtype)),
            ("exponents", importance.exponent),
            ("attention", importance.attention),
            ("outliers", outliers),
        ):
            found[name].append(value.to(HOST))
    return Document(block_size=size, **{name: torch.stack(values) for name, values in found.items()})
