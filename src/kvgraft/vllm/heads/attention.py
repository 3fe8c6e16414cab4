"""Attention by KV head: layers of one head each, and the attention of local heads.

Local heads use our kernel on every platform, since stock kernels would read blocks that were freed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.memoised import memoised
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.vllm.groups import NULL_PAGE
from kvgraft.vllm.heads.spec import SinkWindowSpec
from kvgraft.vllm.lengths import lengths_of

ONE_HEAD = LayerHeads((0,), (0,), (True,))


class LocalBackend(AttentionBackend):
    """Attention to sinks and a window, for every device.

    It takes every cache layout in which the tokens of a block follow each other.
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's registry for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["LocalImpl"]:
        return LocalImpl

    @staticmethod
    def get_builder_cls() -> type["LocalBuilder"]:
        return LocalBuilder


@dataclass(frozen=True, eq=False)
class LocalMetadata:
    """Queries of a step for local heads.

    Attributes:
        positions: positions of each request's queries, int64 [n] on the CPU.
        pages: block table of each request, int64 [b].
        block_size: tokens per block.
        sinks: number of sink tokens.
        window: tokens in the window.
    """

    positions: list[Tensor]
    pages: list[Tensor]
    block_size: int
    sinks: int
    window: int

    @memoised
    def layout(self, stride: int) -> AttentionLayout:
        """Return the queries and the rows that they read; a block begins every `stride` rows.

        Blocks that a table no longer holds are not read.
        """
        slots = []
        for pages in self.pages:
            offsets = torch.arange(self.block_size, device=pages.device)
            found = (pages[:, None] * stride + offsets).masked_fill(pages[:, None] == NULL_PAGE, -1)
            slots.append(found.flatten()[None])
        return AttentionLayout.of(self.positions, slots, self.sinks, self.window)


class LocalBuilder(AttentionMetadataBuilder[LocalMetadata]):
    """Builder of `LocalMetadata` for a group of layers.

    Its steps are never captured as a whole, because the host computes which tokens the tiles of
    windows hold.
    """

    kv_cache_spec: SinkWindowSpec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> LocalMetadata:
        """Build the metadata of a step as in vLLM."""
        common, size = common_attn_metadata, int(self.kv_cache_spec.block_size)
        counts = common.query_start_loc_cpu.diff().tolist()
        stops = lengths_of(common)[: len(counts)].tolist()
        positions = [
            torch.arange(stop - count, stop) for count, stop in zip(counts, stops, strict=True)
        ]
        tables = common.block_table_tensor
        pages = [tables[number, : -(-stop // size)].long() for number, stop in enumerate(stops)]
        return LocalMetadata(
            positions, pages, size, self.kv_cache_spec.sinks, self.kv_cache_spec.sliding_window
        )


class LocalImpl(AttentionImpl[LocalMetadata]):
    """Attention of one KV head to sinks and a window.

    The cache holds each key next to its value.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str, *rest: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value [n, 1, d] to their slots.

        Padding goes to the null block, which is never read.
        """
        rows, stride, size = _rows_of(kv_cache)
        slots, count = slot_mapping.long().clamp(min=0), slot_mapping.numel()
        rows[slots // size * stride + slots % size] = torch.cat(
            (key[:count, 0], value[:count, 0]), dim=-1
        )

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend as in vLLM: query and output are [n, heads, d]."""
        # vLLM passes no metadata when it warms up.
        if attn_metadata is None:
            return output
        rows, stride, _ = _rows_of(kv_cache)
        keys, values = rows[None].chunk(2, dim=-1)
        layout = attn_metadata.layout(stride)
        count = sum(context.positions.numel() for context in layout.contexts)
        output[:count] = segpaged_attention(
            query[:count], keys, values, ONE_HEAD, layout, self.scale
        )
        return output


class LocalAttention(Attention):
    """Attention layer of one local KV head."""

    def __init__(self, *args: Any, sinks: int, window: int, **kwargs: Any) -> None:
        super().__init__(*args, attn_backend=LocalBackend, **kwargs)
        self.sink_tokens, self.window_tokens = sinks, window

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SinkWindowSpec:
        """Return the spec of its cache."""
        return SinkWindowSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            sliding_window=self.window_tokens,
            sinks=self.sink_tokens,
        )


class HeadAttention(nn.Module):
    """Attention of a decoder layer, KV head by KV head.

    Args:
        whole: vLLM's attention layer that this replaces.
        head_map: classes of the KV heads.
        layer: number of the decoder layer.
        cache_config: vLLM's cache configuration.
    """

    def __init__(self, whole: Attention, head_map: HeadMap, layer: int, cache_config: Any) -> None:
        super().__init__()
        del get_current_vllm_config().compilation_config.static_forward_context[whole.layer_name]
        groups = whole.num_heads // whole.num_kv_heads
        self.query_size, self.key_size = groups * whole.head_size, whole.head_size
        heads: list[Attention] = []

        for head, head_class in enumerate(head_map.classes[layer]):
            arguments: dict[str, Any] = {
                "num_heads": groups,
                "head_size": whole.head_size,
                "scale": whole.impl.scale,
                "num_kv_heads": 1,
                "cache_config": cache_config,
                "prefix": f"{whole.layer_name}.kv_head_{head}",
            }
            if head_class is HeadClass.LOCAL:
                heads.append(
                    LocalAttention(**arguments, sinks=head_map.sinks, window=head_map.window)
                )
            else:
                heads.append(Attention(**arguments))

        self.heads = nn.ModuleList(heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attention` does: [n, Hq d] and twice [n, Hkv d] -> [n, Hq d]."""
        parts = (
            query.split(self.query_size, dim=-1),
            key.split(self.key_size, dim=-1),
            value.split(self.key_size, dim=-1),
        )
        attended = [
            attention(*(part.contiguous() for part in own))
            for attention, *own in zip(self.heads, *parts, strict=True)
        ]
        return torch.cat(attended, dim=-1)


def _rows_of(kv_cache: Tensor) -> tuple[Tensor, int, int]:
    """Return a cache [blocks, 1, N, 2 d] as rows of tokens [rows, 2 d], with its strides.

    Returns:
        The rows, the number of rows from one block to the next, and N.

    Raises:
        ValueError: the cache is not rows of tokens.
    """
    blocks, _, size, width = kv_cache.shape
    stride, odd = divmod(kv_cache.stride(0), kv_cache.stride(2))
    if odd or kv_cache.stride(3) != 1:
        raise ValueError(
            f"blocks of a KV cache of strides {kv_cache.stride()} are no rows of tokens"
        )
    return (
        kv_cache.as_strided(((blocks - 1) * stride + size, width), (kv_cache.stride(2), 1)),
        stride,
        size,
    )
