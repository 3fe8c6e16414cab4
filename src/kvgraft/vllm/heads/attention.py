"""Attention of local heads on vLLM's paged cache: ours, since the stock kernels would read what was given back."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout, LayerHeads
from kvgraft.vllm.heads.spec import SinkWindowSpec

ONE_HEAD = LayerHeads((0,), (0,), (True,))
NULL_BLOCK = 0  # what a block table holds in the place of a block that was given back


class LocalBackend(CPUAttentionBackend):
    """The CPU backend with another attention."""

    @staticmethod
    def get_impl_cls() -> type["LocalImpl"]:
        return LocalImpl


class LocalImpl(CPUAttentionBackendImpl):
    """One KV head that sees sinks and a window; keys and values lie plainly in each block, one after the other."""

    def __init__(self, *args: Any, sink_tokens: int, window_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sink_tokens, self.window_tokens = sink_tokens, window_tokens

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value [n, 1, d] to their slots."""
        keys, values, size = _pools(kv_cache)
        rows = _rows(slot_mapping.long(), size)
        keys[0, rows] = key[: rows.numel(), 0]
        values[0, rows] = value[: rows.numel(), 0]

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As in vLLM: query and output [n, heads, d]."""
        if attn_metadata is None:  # warming up
            return output
        keys, values, size = _pools(kv_cache)
        layout = getattr(attn_metadata, "kvgraft_layout", None)
        if layout is None:
            layout = _layout(attn_metadata, size, self.sink_tokens, self.window_tokens)
            attn_metadata.kvgraft_layout = layout  # for the other layers of the group
        count = layout.query_positions.numel()
        output[:count] = segpaged_attention(query[:count], keys, values, ONE_HEAD, layout, self.scale)
        return output


class LocalAttention(Attention):
    """A layer of one local KV head."""

    def __init__(self, *args: Any, sinks: int, window: int, **kwargs: Any) -> None:
        super().__init__(*args, attn_backend=LocalBackend, sink_tokens=sinks, window_tokens=window, **kwargs)
        self.sink_tokens, self.window_tokens = sinks, window

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SinkWindowSpec:
        """What its cache holds."""
        return SinkWindowSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            sliding_window=self.window_tokens,
            sinks=self.sink_tokens,
        )


def _pools(kv_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values as pools of one stream, [1, rows, d], in which one row number finds both; and the block size."""
    num_blocks, _, block_size, double = kv_cache.shape
    rows = kv_cache.view(1, num_blocks * block_size * 2, double // 2)
    return rows, rows[:, block_size:], block_size


def _rows(slots: Tensor, block_size: int) -> Tensor:
    """The row of each slot: the keys of a block stand before its values."""
    return slots + slots // block_size * block_size


def _layout(metadata: Any, block_size: int, sinks: int, window: int) -> AttentionLayout:
    """The queries of a step; what a block table no longer has is not seen."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    positions, slots = [], []
    for number, length in enumerate(lengths):
        positions.append(torch.arange(length - (starts[number + 1] - starts[number]), length))
        blocks = metadata.block_table[number, : -(-length // block_size)].long()  # [b]
        offsets = torch.arange(block_size, device=blocks.device)
        found = _rows(blocks[:, None] * block_size + offsets, block_size)
        slots.append(found.masked_fill(blocks[:, None] == NULL_BLOCK, -1).flatten()[None])
    return AttentionLayout.of(positions, slots, sinks, window)
