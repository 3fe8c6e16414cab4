"""Attention backends of vLLM with a flow: each KV head decodes over its own blocks.

The page of one KV head counts as a page. Each KV head of each token is a sequence with its own
block table. Prompts, short requests and skipped layers use the unchanged backend of vLLM.
"""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvgraft.decode.flow import Program
from kvgraft.decode.indexer import Indexer
from kvgraft.vllm.compat.cache_dtype import FP8
from kvgraft.vllm.sparse.layouts import CacheLayout, Latents, Packed, Strided
from kvgraft.vllm.sparse.metadata import SparseBuilder, SparseMetadata
from kvgraft.vllm.sparse.program import BACKENDS, LATENT_BACKENDS, program_of

# values by which backends mean no window
NO_WINDOW = (None, -1, (-1, -1))


def __getattr__(name: str) -> type:
    """Return vLLM's backend with this name, for example `FLASH_ATTN`, with a flow."""
    known = (*BACKENDS, *LATENT_BACKENDS)
    if name not in known:
        raise AttributeError(f"no attention backend {name!r} can follow flows: {', '.join(known)}")
    return _named(name)


@cache
def _named(name: str) -> type:
    """Return the backend with this name, made once per process."""
    layouts: dict[str, type[CacheLayout]] = {"CPU_ATTN": Packed} | dict.fromkeys(
        LATENT_BACKENDS, Latents
    )
    backend = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    return with_flow(backend, layouts.get(name, Strided)())


def with_flow(backend: type, layout: CacheLayout) -> type:
    """Return a subclass of a vLLM backend that decodes sparsely if the server has a flow."""
    own: Any = backend
    builder, impl = own.get_builder_cls(), own.get_impl_cls()
    sparse_builder = type(f"Sparse{builder.__name__}", (SparseBuilder, builder), {"STOCK": builder})
    mixin = SparseLatentImpl if isinstance(layout, Latents) else SparseImpl
    sparse_impl = type(f"Sparse{impl.__name__}", (mixin, impl), {"layout": layout})
    classes = {"get_builder_cls": lambda: sparse_builder, "get_impl_cls": lambda: sparse_impl}
    members = {name: staticmethod(get) for name, get in classes.items()}
    return type(f"Sparse{backend.__name__}", (backend,), {**members, "__module__": __name__})


class FollowingImpl:
    """Mixin before an implementation of vLLM: one attention layer with the caches of its flow."""

    layout: ClassVar[CacheLayout]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        decodes = getattr(self, "attn_type", AttentionType.DECODER) == AttentionType.DECODER
        whole = getattr(self, "sliding_window", None) in NO_WINDOW
        self._config = get_current_vllm_config()
        # traced for the block size of that time; the builder gives the final one
        self._program = program_of(self._config) if decodes and whole else None
        self._caches: FlowLayerCaches | None = None

    @property
    def follows(self) -> bool:
        """True if the layer decodes by a flow."""
        return self._program is not None

    def follow(self, program: Program | None) -> None:
        """Decode by this flow from now on, or densely with None.

        The flow's caches are filled again.
        """
        self._program, self._caches = program, None

    def note_written(self, kv_cache: Tensor, slots: Tensor) -> None:
        """Mark the blocks of slots int64 [n] as changed."""
        if self._program is not None and kv_cache.numel():
            self._of(kv_cache, self._program).note(slots)

    def _program_at(self, layer: Any) -> Program | None:
        """Return the flow of this layer; None if the flow skips it."""
        program = self._program
        if program is None or extract_layer_index(layer.layer_name) in program.flow.layers_skip:
            return None
        return program

    def _decode(
        self, layer: Any, query: Tensor, kv_cache: Tensor, sparse: SparseMetadata, program: Program
    ) -> Tensor:
        """Return the attention [r, Hq, d] of the sparse requests' queries [r, Hq, d]."""
        caches = self._of(kv_cache, program)
        # [r * Hkv, g, d]
        decoding = query.unflatten(1, (caches.num_heads, -1)).flatten(0, 1)
        tables, lengths = caches.choose(layer, decoding, sparse)
        bound = sparse.batch.attended(tables.shape[1])
        found = self.layout.attend(self, layer, decoding, kv_cache, tables, lengths, bound)
        return found.view(*query.shape[:2], -1)

    def _of(self, kv_cache: Tensor, program: Program) -> "FlowLayerCaches":
        """Return the flow's caches for this KV cache, new ones if the cache is new."""
        if self._caches is None or self._caches.kv_cache is not kv_cache:
            quantised = self.kv_cache_dtype in FP8  # type: ignore[attr-defined]
            dtype = self._config.model_config.dtype if quantised else kv_cache.dtype
            self._caches = FlowLayerCaches(program, kv_cache, dtype, self.layout)
        return self._caches


class SparseImpl(FollowingImpl):
    """Mixin for attention with keys and values."""

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value [n, Hkv, d] as vLLM does, and mark their blocks as changed."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        self.note_written(kv_cache, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend as in vLLM, or sparsely by the metadata; query and output are [n, Hq, d]."""
        stock: Any = super()
        sparse: SparseMetadata | None = getattr(attn_metadata, "kvgraft_sparse", None)
        program = self._program_at(layer)
        if sparse is None or program is None:
            rest = output, output_scale, output_block_scale
            attended: Tensor = stock.forward(
                layer, query, key, value, kv_cache, attn_metadata, *rest
            )
            return attended

        if sparse.others is not None:
            stock.forward(layer, query, key, value, kv_cache, sparse.others, output)

        output[sparse.queries] = self._decode(
            layer, query[sparse.queries], kv_cache, sparse, program
        )
        return output


class SparseLatentImpl(FollowingImpl):
    """Mixin for latent attention (MLA): all query heads read one row a token."""

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:  # fmt: skip
        """Write latents [n, L] and rotated channels as vLLM does, and mark their blocks."""
        super().do_kv_cache_update(  # type: ignore[misc]
            kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
        )
        self.note_written(kv_cache, slot_mapping.flatten())

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Decode as in vLLM, or sparsely by the metadata: [n, Hq, L + R] -> [n, Hq, L]."""
        stock: Any = super()
        sparse: SparseMetadata | None = getattr(attn_metadata, "kvgraft_sparse", None)
        program = self._program_at(layer)
        if sparse is None or program is None:
            attended: tuple[Tensor, Tensor | None] = stock.forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return attended

        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        found = self._decode(layer, query[sparse.queries], kv_c_and_k_pe_cache, sparse, program)
        if sparse.others is None:
            return found, None
        output, _ = stock.forward_mqa(q, kv_c_and_k_pe_cache, sparse.others, layer)
        output[sparse.queries] = found
        return output, None


class FlowLayerCaches:
    """Data that a flow keeps about the blocks of one layer.

    Blocks that were written are processed again when they are read next. So it does not matter who
    wrote them, in which order, or what they held before.
    """

    def __init__(
        self, program: Program, kv_cache: Tensor, dtype: torch.dtype, layout: CacheLayout
    ) -> None:
        self.kv_cache = kv_cache
        blocks, self.num_heads, self._size, _ = layout.by_head(kv_cache).shape
        self._layout = layout
        # like keys and values, which the KV cache may hold as codes
        like = kv_cache.new_empty(0, dtype=dtype)
        self.indexer = Indexer(program, blocks * self.num_heads, like)
        self.written = torch.ones(blocks, dtype=torch.bool, device=kv_cache.device)

    def note(self, slots: Tensor) -> None:
        """Mark the blocks of slots int64 [n] as written.

        Slots below 0 fall into block 0, which is unused.
        """
        self.written[slots.clamp(min=0) // self._size] = True

    def choose(self, layer: Any, query: Tensor, sparse: SparseMetadata) -> tuple[Tensor, Tensor]:
        """Choose blocks as `LayerIndexer.choose` does, after changed blocks are processed."""
        own = self.indexer.at(slice(None), *self._layout.pages(layer, self.kv_cache))
        places = torch.arange(sparse.pages.shape[1], device=sparse.pages.device)
        fresh = self.written[sparse.pages] & (places < sparse.full[:, None])
        if bool(fresh.any()):
            pages = sparse.pages[fresh].unique()
            self.written[pages] = False
            own.fill(self.rows(pages))
        return own.choose(query, sparse.batch)

    def rows(self, pages: Tensor) -> Tensor:
        """Return the rows of all KV heads of these blocks, int64 [n * Hkv]."""
        return (
            pages[:, None] * self.num_heads + torch.arange(self.num_heads, device=pages.device)
        ).flatten()
