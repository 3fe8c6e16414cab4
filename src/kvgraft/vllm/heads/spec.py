"""Block management of local heads: a request keeps its first blocks and those of its window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """Cache spec of a sliding window and the first `sinks` tokens."""

    sinks: int

    @property
    def sink_blocks(self) -> int:
        """Number of blocks that hold sinks."""
        return -(-self.sinks // self.block_size)

    def left_out(self, num_skipped_tokens: int) -> range:
        """Return the blocks left out when a window skips `num_skipped_tokens` tokens."""
        stop = num_skipped_tokens // self.block_size
        return range(min(self.sink_blocks, stop), stop)

    @property
    def num_retained_tokens(self) -> int:
        """Number of tokens before a step's tokens that stay readable: all of them.

        The second model runner (from vLLM 0.33) takes older ones out of block tables, sinks
        included.
        """
        return 2**31 - 1

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Return the maximum number of blocks that a request holds."""
        window: int = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return window + self.sink_blocks


class SinkWindowManager(SlidingWindowManager):
    """Manager of a sliding window that never frees the sinks and accepts no hit without them."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool, alignment_tokens: int, dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Any:  # fmt: skip
        """Return the hit of the window with the sinks; no hit if a sink block is gone."""
        hit_blocks, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec,
            drop_eagle_block, alignment_tokens, dcp_world_size, pcp_world_size,
        )  # fmt: skip
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(kv_cache_spec.sink_blocks, len(hit_blocks[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(hit_blocks, cached, strict=True):
                blocks[number] = block

        return hit_blocks, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, *args: Any, kv_cache_spec: Any, **kwargs: Any
    ) -> Any:
        """Return a mask of blocks that later requests may need: those of a window, and the sinks.

        None means all.
        """
        mask = super().reachable_block_mask(
            start_block, *args, kv_cache_spec=kv_cache_spec, **kwargs
        )
        if mask is not None:
            for block in range(
                start_block, min(kv_cache_spec.sink_blocks, start_block + len(mask))
            ):
                mask[block - start_block] = True
        return mask

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        """Return the number of blocks to allocate, with those for the sinks.

        Sink blocks of a hit may have to be taken from the free queue. Sinks that a connector brings
        need new blocks.
        """
        count: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )

        # The request already has its sinks.
        if request_id in self.num_cached_block:
            return count

        known = self._skipped_sinks(new_computed_blocks, total_computed_tokens)
        return (
            count
            + self._get_num_evictable_blocks(known)
            + self._num_sinks(total_computed_tokens)
            - len(known)
        )

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        """Add the blocks of a hit as the window does, and restore the sinks that it drops."""
        computed = num_local_computed_tokens + num_external_computed_tokens
        sinks = self._skipped_sinks(new_computed_blocks, computed)
        self.block_pool.touch(sinks)
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self.req_to_blocks[request_id][: len(sinks)] = sinks

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Allocate blocks as the window does, and blocks for sinks that a connector brings."""
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, *args, **kwargs
        )
        blocks = self.req_to_blocks[request_id]
        sinks = range(self._num_sinks(num_local_computed_tokens + num_external_computed_tokens))
        missing = [number for number in sinks if blocks[number].is_null]
        for number, block in zip(
            missing, self.block_pool.get_new_blocks(len(missing)), strict=True
        ):
            blocks[number] = block
            if self._record_new_block_ids:
                self.new_block_ids.append(block.block_id)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Cache blocks as the window does, and first the sinks that a connector has brought.

        The window treats skipped blocks as cached already, but these sinks are not.
        """
        blocks = self.req_to_blocks[request.request_id]
        known = self.num_cached_block.get(request.request_id, 0)
        stop = min(self.kv_cache_spec.sink_blocks, num_tokens // self.block_size, known)
        new = [
            number
            for number in range(stop)
            if blocks[number].block_hash is None and not blocks[number].is_null
        ]
        if new:
            self.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=new[0],
                num_full_blocks=stop,
                block_size=self.block_size,
                kv_cache_group_id=self.kv_cache_group_id,
            )

        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks between the sinks and the window."""
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.sink_blocks, skipped)

    def _skipped_sinks(self, blocks: Sequence[Any], num_computed_tokens: int) -> list[Any]:
        """Return the sink blocks of a hit that its window has left behind."""
        return list(blocks[: self._num_sinks(num_computed_tokens)])

    def _num_sinks(self, num_computed_tokens: int) -> int:
        """Return the number of sink blocks that a window has left behind."""
        skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        return int(min(skipped, self.kv_cache_spec.sink_blocks))


KVCacheSpecRegistry._ensure_registered()
# Every process that receives such a spec imports this module, and so registers its manager.
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager)
