"""KV cache by decoder layer, where each KV head may be an attention layer of vLLM."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgraft.vllm.compat.layer_caches import LayerCaches


class DecoderCaches(LayerCaches):
    """`LayerCaches` that also maps decoder layers to their attention layers.

    Args:
        attentions: vLLM's attention layers by decoder layer: one each, or one for each KV head.
        group_of: by attention layer, the number of its KV cache group, 0 being the main one (see
            `groups`).
        given: arguments of `LayerCaches` behind the attention layers.

    Attributes:
        num_kv_heads: KV heads of a decoder layer.
    """

    def __init__(
        self, attentions: Sequence[Sequence[Any]], group_of: Sequence[int], *given: Any
    ) -> None:
        stops = np.cumsum([len(own) for own in attentions]).tolist()
        self._attentions_of = [range(*edges) for edges in pairwise([0, *stops])]
        self.group_of = list(group_of)
        super().__init__([attention for own in attentions for attention in own], *given)
        self.num_kv_heads *= len(attentions[0])

    def attentions_of(self, index: int) -> range:
        """Return the numbers of a decoder layer's attention layers."""
        return self._attentions_of[index]

    def read_layer(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, Hkv, d] of a decoder layer in slots int64 [groups, n]."""
        return _joined(
            [self.read(at, slots[self.group_of[at]]) for at in self.attentions_of(index)]
        )

    def read_layer_again(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as `read_layer` does, for `store_layer` to store bit for bit."""
        return _joined(
            [self.read_again(at, slots[self.group_of[at]]) for at in self.attentions_of(index)]
        )

    def write_layer(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values [n, Hkv, d] of a decoder layer to slots int64 [groups, n]."""
        for given in self._by_attention(index, keys, values, slots):
            self.write(*given)

    def store_layer(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values of a decoder layer as `store` does."""
        for given in self._by_attention(index, keys, values, slots):
            self.store(*given)

    def _by_attention(
        self, index: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield number, keys, values and slots [n] for each attention layer of a decoder layer."""
        own = self.attentions_of(index)
        slots_of = [slots[self.group_of[at]] for at in own]
        return zip(
            own, keys.chunk(len(own), dim=1), values.chunk(len(own), dim=1), slots_of, strict=True
        )


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join keys and values [n, H, d] of attention layers to those of their decoder layer."""
    if len(parts) == 1:
        return parts[0]
    keys, values = (torch.cat(heads, dim=1) for heads in zip(*parts, strict=True))
    return keys, values
