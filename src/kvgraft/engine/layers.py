"""Layers and pages of the native host, for prompts that keep parts of documents."""

import sys

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.kv.cache import KVCache
from kvgraft.prefill.documents.partial import Attend, LayerHost


class NativeLayers(LayerHost):
    """A decoder, and the pages of one prompt.

    Args:
        slots: int64 [lists, n], slots of the prompt's pages; None if nothing is cached.
    """

    max_rows = sys.maxsize

    def __init__(self, decoder: Decoder, cache: KVCache, slots: Tensor | None = None) -> None:
        config = decoder.config
        self.num_layers, self.num_kv_heads, self.head_dim = (
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
        )
        self.dtype, self.device, self.rope = decoder.dtype, decoder.device, config.rope
        self.scale = config.attention_scale
        self._decoder, self._cache = decoder, cache
        self._slots = (
            torch.zeros(1, 0, dtype=torch.int64, device=decoder.device) if slots is None else slots
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._decoder.embed(token_ids)

    def run(
        self, index: int, states: Tensor, positions: Tensor, rows: Tensor, attend: Attend
    ) -> Tensor:
        attended = attend(*self._decoder.project(index, states, *self.rope.fresh_table(positions)))
        if attended is None:
            return states[:0]
        return self._decoder.after_attention(index, states[rows], attended.flatten(1))

    def read(self, index: int, places: Tensor) -> tuple[Tensor, Tensor]:
        return self._cache.read(index, self._slots[:, places])

    def write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        self._cache.write(index, self._slots[:, places], keys, values)
