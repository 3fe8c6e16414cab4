"""Attention by KV head: layers of one head each, and the attention of local heads.

Local heads use our kernel on every platform, since stock kernels would read blocks that were freed.
One call serves all local heads of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.memoised import memoised
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.vllm.compat.cache_dtype import as_codes, encode
from kvgraft.vllm.groups import NULL_PAGE
from kvgraft.vllm.heads.spec import SinkWindowSpec
from kvgraft.vllm.lengths import lengths_of
from kvgraft.vllm.limits import READABLE

# attribute of a local head's cache: where all local heads of its layer are
PLACES = "kvgraft_places"
# operator that attends for the local heads of a layer
ATTEND_LOCAL = "vllm::kvgraft_attend_local"


class LocalBackend(AttentionBackend):
    """Attention to sinks and a window, for every device.

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
    def layout(self, stride: int, *others: "LocalMetadata") -> AttentionLayout:
        """Return the queries and the rows that they read; a block begins every `stride` rows.

        Blocks that a table no longer holds are not read.

        Args:
            others: metadata of the same queries for heads with other block tables. The layout has a
                page list for each table, this one's first.
        """
        slots = []
        for tables in zip(self.pages, *(other.pages for other in others), strict=True):
            pages = torch.stack(tables)[..., None]
            offsets = torch.arange(self.block_size, device=pages.device)
            found = (pages * stride + offsets).masked_fill(pages == NULL_PAGE, -1)
            slots.append(found.flatten(1))
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
    """Implementation of one local head. `HeadAttention` attends for all of a layer together."""

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
        pool = LocalPool.of([kv_cache], self.kv_cache_dtype)
        pool.write(keys, values, slot_mapping.long()[None])

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("local heads of a layer attend together")


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
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
            sliding_window=self.window_tokens,
            sinks=self.sink_tokens,
        )


@dataclass(frozen=True, eq=False)
class LocalPool:
    """Caches of a layer's local heads as streams of one pool.

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
    def of(cls, caches: Sequence[Tensor], cache_dtype: str = "auto") -> "LocalPool":
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
        rows = slots // self.block_size * self.stride + slots % self.block_size
        numbers = torch.cat((keys, values), dim=-1)
        if self.rows.dtype.itemsize == 1:
            numbers = encode(numbers, 1.0, self.rows.dtype)
        self.rows.flatten(0, 1)[self.firsts + rows] = numbers.to(self.rows.dtype)


class HeadAttention(nn.Module):
    """Attention of a decoder layer by KV head: the local heads in one call of our kernel, each
    other head in a call of its backend.

    Args:
        whole: vLLM's attention layer that this replaces.
        head_map: classes of this rank's KV heads.
        layer: number of the decoder layer.
        cache_config: vLLM's cache configuration.
    """

    def __init__(self, whole: Attention, head_map: HeadMap, layer: int, cache_config: Any) -> None:
        super().__init__()
        groups = whole.num_heads // whole.num_kv_heads
        self.scale, self.layer_name = float(whole.impl.scale), whole.layer_name
        self._cache_dtype: str = whole.kv_cache_dtype
        is_local = head_map.heads(layer, HeadClass.LOCAL)
        self.local = tuple(head for head, local in enumerate(is_local) if local)

        heads: list[Attention] = []
        # A name says the class of a head on every rank, because all ranks have one block table.
        names = sorted(range(len(is_local)), key=lambda head: not is_local[head])
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
                heads.append(
                    LocalAttention(**arguments, sinks=head_map.sinks, window=head_map.window)
                )
            else:
                heads.append(Attention(**arguments))

        self.heads = nn.ModuleList(heads)
        # `attend_local` finds this layer by its name
        get_current_vllm_config().compilation_config.static_forward_context[self.layer_name] = self

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attention` does: [n, Hq d] and twice [n, Hkv d] -> [n, Hq d]."""
        # [n, Hkv, G d or d]
        parts = [rows.unflatten(-1, (len(self.heads), -1)) for rows in (query, key, value)]
        output = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        if self.local:
            torch.ops.vllm.kvgraft_attend_local(*parts, output, self.layer_name)
        for head, attention in enumerate(self.heads):
            if head not in self.local:
                output[:, head] = attention(*(rows[:, head].contiguous() for rows in parts))
        return output.flatten(1)

    def attend_local(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the KV of the local heads, and write their attention into the output.

        Args:
            query, output: [n, Hkv, G d].
            key, value: [n, Hkv, d].
        """
        contexts = [get_attention_context(self.heads[head].layer_name) for head in self.local]
        metadata, _, caches, slots = zip(*contexts, strict=True)
        # vLLM gives none when it warms up.
        if slots[0] is None or not caches[0].numel():
            return

        pool, own = self._places_of(caches)
        count = slots[0].numel()
        keys, values = (rows[:count, own].transpose(0, 1) for rows in (key, value))
        pool.write(keys, values, torch.stack(slots).long())
        if metadata[0] is None:
            return

        # one page list for each group of heads with the same block tables
        tables = list(dict.fromkeys(metadata))
        lists = tuple(map(tables.index, metadata))
        heads = LayerHeads(pool.streams, lists, (True,) * len(lists))
        layout = tables[0].layout(pool.stride, *tables[1:])
        if not layout.contexts:
            return
        count = layout.rows[-1].stop
        asking = query[:count, own].reshape(count, -1, key.shape[-1])
        pool_keys, pool_values = pool.rows.chunk(2, dim=-1)
        attended = segpaged_attention(asking, pool_keys, pool_values, heads, layout, self.scale)
        output[:count, own] = attended.view(count, len(self.local), -1)

    def _places_of(self, caches: Sequence[Any]) -> tuple[LocalPool, slice | Tensor]:
        """Return the pool of the local heads' caches, and the index of these heads.

        Both are on the device and kept with the first cache, so that they end with it.
        """
        found: tuple[LocalPool, slice | Tensor] | None = getattr(caches[0], PLACES, None)
        if found is None:
            first, last = self.local[0], self.local[-1]
            own: slice | Tensor = slice(first, last + 1)
            if last - first + 1 != len(self.local):
                own = torch.tensor(self.local, device=caches[0].device)
            found = LocalPool.of(caches, self._cache_dtype), own
            setattr(caches[0], PLACES, found)
        return found


def attend_local(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str
) -> None:
    """Call `HeadAttention.attend_local` of a layer: an operator for compiled models."""
    get_forward_context().no_compile_layers[layer_name].attend_local(query, key, value, output)


def _attend_local_fake(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str
) -> None:
    """Stand for `attend_local` while a model is traced."""


direct_register_custom_op(
    op_name="kvgraft_attend_local",
    op_func=eager_break_during_capture(attend_local),
    mutates_args=["output"],
    fake_impl=_attend_local_fake,
)
