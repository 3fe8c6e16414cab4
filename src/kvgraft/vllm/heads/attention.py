"""Attention by KV head: layers of one head each, and the attention of all heads of a layer.

Local heads use our kernel on every platform, since stock kernels would read blocks that were freed.
Where our kernel is Triton, the other heads use it too, in the same call. On CPUs, under a flow and
with FP8 KV each other head is a call of vLLM's backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import get_kv_quant_mode, is_quantized_kv_cache

from kvgraft.kernels.dispatch import has_triton, segpaged_attention
from kvgraft.kernels.heads import LayerHeads, index_of
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.memoised import memoised
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.vllm.compat.cache_dtype import as_codes, encode
from kvgraft.vllm.groups import NULL_PAGE
from kvgraft.vllm.heads.spec import SinkWindowSpec
from kvgraft.vllm.lengths import lengths_of
from kvgraft.vllm.limits import READABLE
from kvgraft.vllm.sparse.program import program_of

# attribute of a head's cache: where all heads of its layer that our kernel serves are
PLACES = "kvgraft_places"
# operator that attends for the heads of a layer that our kernel serves
ATTEND_HEADS = "vllm::kvgraft_attend_heads"
# made once, because an instance computes sets of heads when they are first needed
layer_heads = cache(LayerHeads)


class HeadBackend(AttentionBackend):
    """Attention of single KV heads by our kernel, for every device.

    It takes every cache layout in which the tokens of a block follow each other.
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(READABLE)

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's registry for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["HeadImpl"]:
        return HeadImpl

    @staticmethod
    def get_builder_cls() -> type["HeadBuilder"]:
        return HeadBuilder


@dataclass(frozen=True, eq=False)
class HeadMetadata:
    """Queries of a step for heads with the same block tables.

    Attributes:
        group: name of the first layer of these heads' attention group.
        is_local: True for local heads.
        positions: positions of each request's queries, int64 [n] on the CPU.
        pages: block table of each request, int64 [b].
        block_size: tokens per block.
    """

    group: str
    is_local: bool
    positions: list[Tensor]
    pages: list[Tensor]
    block_size: int

    @memoised
    def layout(
        self, stride: int, sinks: int, window: int, *others: "HeadMetadata"
    ) -> AttentionLayout:
        """Return the queries and the rows that they read; a block begins every `stride` rows.

        Blocks that a table no longer holds are not read.

        Args:
            sinks, window: number of tokens that local heads see.
            others: metadata of the same queries for heads with other block tables, those of local
                heads last. The layout has a page list for each table, this one's first.
        """
        complete = sum(not part.is_local for part in (self, *others))
        slots = []
        for tables in zip(self.pages, *(other.pages for other in others), strict=True):
            pages = torch.stack(tables)[..., None]
            offsets = torch.arange(self.block_size, device=pages.device)
            found = (pages * stride + offsets).masked_fill(pages == NULL_PAGE, -1)
            slots.append(found.flatten(1))
        return AttentionLayout.of(self.positions, slots, sinks, window, complete_lists=complete)


class HeadBuilder(AttentionMetadataBuilder[HeadMetadata]):
    """Builder of `HeadMetadata` for a group of layers.

    Its steps are never captured as a whole, because the host computes which tokens the tiles of
    windows hold.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> HeadMetadata:
        """Build the metadata of a step as in vLLM.

        Consecutive runs of a prompt in a recovery are one request, so that they share what they
        read.
        """
        common, size = common_attn_metadata, int(self.kv_cache_spec.block_size)
        counts = common.query_start_loc_cpu.diff().tolist()
        stops = lengths_of(common)[: len(counts)].tolist()
        prompts = getattr(common, "prompts", None) or range(len(counts))
        requests: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            before = number - 1
            follows = number and prompts[before] == prompt
            if follows and stops[before] <= stops[number] - counts[number]:
                requests[-1].append(number)
            else:
                requests.append([number])

        positions = [
            torch.cat([torch.arange(stops[run] - counts[run], stops[run]) for run in runs])
            for runs in requests
        ]
        tables = common.block_table_tensor
        pages = [tables[runs[-1], : -(-stops[runs[-1]] // size)].long() for runs in requests]
        is_local = isinstance(self.kv_cache_spec, SinkWindowSpec)
        return HeadMetadata(self.layer_names[0], is_local, positions, pages, size)


class HeadImpl(AttentionImpl[HeadMetadata]):
    """Implementation of one head. `HeadAttention` attends for all of a layer together."""

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
        """Write key and value [n, 1, d] to their slots."""
        keys, values = (rows[: slot_mapping.numel()].transpose(0, 1) for rows in (key, value))
        pool = HeadPool.of([kv_cache], self.kv_cache_dtype)
        pool.write(keys, values, slot_mapping.long()[None])

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("heads of a layer attend together")


class LocalAttention(Attention):
    """Attention layer of one local KV head."""

    def __init__(self, *args: Any, sinks: int, window: int, **kwargs: Any) -> None:
        super().__init__(*args, attn_backend=HeadBackend, **kwargs)
        self.sink_tokens, self.window_tokens = sinks, window

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SinkWindowSpec:
        """Return the spec of its cache."""
        return SinkWindowSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
            sliding_window=self.window_tokens,
            sinks=self.sink_tokens,
        )


@dataclass(frozen=True, eq=False)
class HeadPool:
    """Caches of a layer's heads as streams of one pool.

    vLLM keeps all caches in one allocation. In each, the tokens of a block follow each other, the
    key of a token next to its value.

    Attributes:
        rows: [streams, n, 2 d], a view of the allocation; quantised numbers have the scale 1.
        streams: stream of each head.
        firsts: int64 [heads, 1], first row of each head's stream in `rows` end to end.
        stride: rows from one block of a head to the next.
        block_size: tokens per block.
    """

    rows: Tensor
    streams: tuple[int, ...]
    firsts: Tensor
    stride: int
    block_size: int

    @classmethod
    def of(cls, caches: Sequence[Tensor], cache_dtype: str = "auto") -> "HeadPool":
        """Return the pool of caches [blocks, 1, N, 2 d], whose dtype has this name in vLLM.

        Raises:
            ValueError: they are not rows of tokens in one allocation.
        """
        like = as_codes(caches[0], cache_dtype)
        _, _, size, width = like.shape
        stride, odd = divmod(like.stride(0), width)
        offsets = [int(cache.storage_offset()) for cache in caches]
        base, end = min(offsets), int(like.untyped_storage().nbytes()) // like.element_size()
        end -= (end - base) % width  # ROCm pads the allocation
        # rows from one stream to the next
        unit, rest = divmod(gcd(*(offset - base for offset in (*offsets, end))), width)
        same = {(cache.untyped_storage().data_ptr(), cache.stride()) for cache in caches}
        if odd or rest or len(same) > 1 or like.stride()[2:] != (width, 1):
            raise ValueError(
                f"KV caches of shape {tuple(like.shape)} and strides {like.stride()} are not rows "
                "of tokens in one allocation"
            )

        shape = (end - base) // (unit * width), unit, width
        rows = like.as_strided(shape, (unit * width, width, 1), base)
        streams = tuple((offset - base) // (unit * width) for offset in offsets)
        # filled on the device: an upload would wait, in each layer of a recovery
        firsts = [torch.full((1, 1), stream * unit, device=like.device) for stream in streams]
        return cls(rows, streams, torch.cat(firsts), stride, size)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values [heads, n, d] to vLLM's slots int64 [heads, n].

        Padding goes to the null block, which is never read.
        """
        slots = slots.clamp(min=0)
        rows = torch.add(slots, slots // self.block_size, alpha=self.stride - self.block_size)
        numbers = torch.cat((keys, values), dim=-1)
        if self.rows.dtype.itemsize == 1:
            numbers = encode(numbers, 1.0, self.rows.dtype)
        self.rows.flatten(0, 1)[self.firsts + rows] = numbers.to(self.rows.dtype)


class HeadAttention(nn.Module):
    """Attention of a decoder layer by KV head.

    Args:
        whole: vLLM's attention layer that this replaces.
        head_map: classes of this rank's KV heads.
        layer: number of the decoder layer.
        cache_config: vLLM's cache configuration.

    Attributes:
        together: heads that our kernel serves, in one call.
        apart: heads that are a call of vLLM's backend each.
    """

    def __init__(self, whole: Attention, head_map: HeadMap, layer: int, cache_config: Any) -> None:
        super().__init__()
        config = get_current_vllm_config()
        groups = whole.num_heads // whole.num_kv_heads
        self.scale, self.layer_name = float(whole.impl.scale), whole.layer_name
        self.sinks, self.window = head_map.sinks, head_map.window
        self._cache_dtype: str = whole.kv_cache_dtype
        is_local = head_map.heads(layer, HeadClass.LOCAL)
        serves_all = (
            has_triton(current_platform.device_type)
            and program_of(config) is None
            # flash attention reads no codes
            and not is_quantized_kv_cache(self._cache_dtype)
        )
        ours = [local or serves_all for local in is_local]
        self.together = tuple(head for head, own in enumerate(ours) if own)
        self.apart = tuple(head for head, own in enumerate(ours) if not own)

        heads: list[Attention] = []
        # A name says the class of a head on every rank, because all ranks have one block table.
        names = sorted(range(len(ours)), key=lambda head: not is_local[head])
        for head, local in enumerate(is_local):
            arguments: dict[str, Any] = {
                "num_heads": groups,
                "head_size": whole.head_size,
                "scale": self.scale,
                "num_kv_heads": 1,
                "cache_config": cache_config,
                "prefix": f"{self.layer_name}.kv_head_{names.index(head)}",
            }
            if local:
                heads.append(LocalAttention(**arguments, sinks=self.sinks, window=self.window))
            else:
                backend = HeadBackend if serves_all else None
                heads.append(Attention(**arguments, attn_backend=backend))

        self.heads = nn.ModuleList(heads)
        # `attend_heads` finds this layer by its name
        config.compilation_config.static_forward_context[self.layer_name] = self

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attention` does: [n, Hq d] and twice [n, Hkv d] -> [n, Hq d]."""
        # [n, Hkv, G d or d]
        parts = [rows.unflatten(-1, (len(self.heads), -1)) for rows in (query, key, value)]
        output = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        if self.together:
            torch.ops.vllm.kvgraft_attend_heads(*parts, output, self.layer_name)
        for head in self.apart:
            output[:, head] = self.heads[head](*(rows[:, head].contiguous() for rows in parts))
        return output.flatten(1)

    def attend_heads(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the KV of the heads that our kernel serves, and write their attention into the
        output.

        Args:
            query, output: [n, Hkv, G d].
            key, value: [n, Hkv, d].
        """
        contexts = [get_attention_context(self.heads[head].layer_name) for head in self.together]
        metadata, _, caches, slots = zip(*contexts, strict=True)
        # vLLM gives none when it warms up.
        if slots[0] is None or not caches[0].numel():
            output.zero_()
            return

        pool, own = self._places_of(caches)
        count = slots[0].numel()
        keys, values = (rows[:count, own].transpose(0, 1) for rows in (key, value))
        pool.write(keys, values, torch.stack(slots).long())
        if metadata[0] is None:
            output.zero_()
            return

        # a page list for each group of heads with the same block tables, in an order that layers
        # share
        tables = sorted(set(metadata), key=lambda found: (found.is_local, found.group))
        is_local = tuple(found.is_local for found in metadata)
        heads = layer_heads(pool.streams, tuple(map(tables.index, metadata)), is_local)
        layout = tables[0].layout(pool.stride, self.sinks, self.window, *tables[1:])
        if not layout.contexts:
            return
        count = layout.rows[-1].stop
        asking = query[:count, own].reshape(count, -1, key.shape[-1])
        pool_keys, pool_values = pool.rows.chunk(2, dim=-1)
        attended = segpaged_attention(asking, pool_keys, pool_values, heads, layout, self.scale)
        output[:count, own] = attended.view(count, len(self.together), -1)

    def _places_of(self, caches: Sequence[Any]) -> tuple[HeadPool, slice | Tensor]:
        """Return the pool of these heads' caches, and the index of the heads.

        Both are on the device and kept with the first cache, so that they end with it.
        """
        found: tuple[HeadPool, slice | Tensor] | None = getattr(caches[0], PLACES, None)
        if found is None:
            places = index_of(self.together)
            own = (
                places
                if isinstance(places, slice)
                else torch.tensor(places, device=caches[0].device)
            )
            found = HeadPool.of(caches, self._cache_dtype), own
            setattr(caches[0], PLACES, found)
        return found


def attend_heads(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str
) -> None:
    """Call `HeadAttention.attend_heads` of a layer: an operator for compiled models."""
    get_forward_context().no_compile_layers[layer_name].attend_heads(query, key, value, output)


def _attend_heads_fake(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str
) -> None:
    """Stand for `attend_heads` while a model is traced."""


direct_register_custom_op(
    op_name="kvgraft_attend_heads",
    op_func=eager_break_during_capture(attend_heads),
    mutates_args=["output"],
    fake_impl=_attend_heads_fake,
)
