"""Admission over vLLM's block pool, and registration of what requests have computed."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft.core.admission import Admission
from kvgraft.core.cost_model import CostModel
from kvgraft.core.costs import TOKENS
from kvgraft.core.pins import PinnedDocuments
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.groups import CacheGroups
from kvgraft.vllm.options import Control
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.settings import KVGraftSettings


def make_admission(
    kv_cache_manager: Any,
    block_size: int,
    settings: KVGraftSettings,
    pin_capacity: float,
    anchors: Iterable[Sequence[int]] = (),
) -> Admission[SharedPool]:
    """Make the admission of a server.

    Args:
        kv_cache_manager: vLLM's KV cache manager.
        block_size: tokens per block.
        settings: settings of the server.
        pin_capacity: share of the pool that pinned blocks may take.
        anchors: token sequences that begin a segment, for near-duplicates.
    """
    groups = CacheGroups.of(kv_cache_manager, block_size)
    pool = SharedPool(kv_cache_manager.block_pool, block_size, groups)
    index = ReuseIndex(
        pool,
        max_depth=settings.max_depth,
        require_clean_context=settings.require_clean_context,
        similarity=settings.similarity,
        anchors=anchors,
    )
    if groups.local:
        index.is_whole = pool.complete

    return Admission(
        pool,
        index,
        PinnedDocuments(pool, settings.watermark, pin_capacity),
        CostModel(settings.given_costs or TOKENS, settings.exactness_weight),
        continuation=settings.continuation,
        # Block tables of groups with windows no longer hold the blocks of a prefix.
        recovers_in_place=not groups.others,
    )


def register_blocks(
    admission: Admission[SharedPool], state: RequestState, blocks: list[int], num_tokens: int
) -> None:
    """Register the full blocks of the first `num_tokens` tokens that vLLM has hashed.

    Blocks that hold or follow grafts are registered with their depth. See `leaves_kv` for requests
    that register nothing.

    Args:
        blocks: blocks of the request in the main KV cache group.
    """
    if not state.leaves_kv:
        return

    provenance, size = state.provenance, admission.pool.block_size
    first, stop = provenance.num_registered, min(num_tokens // size, len(blocks))
    stop = first + admission.pool.num_hashed(blocks[first:stop])
    if stop > first:
        admission.register(
            state,
            np.array(blocks[:stop]),
            provenance.depths(stop, size),
            state.request.block_hashes[provenance.first_approximate // size : stop],
            unlimited=isinstance(state.options, Control),
        )
