"""vLLM's KV cache events, limited to exact blocks. Routers use these events to find cached text."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


class ExactEvents:
    """Filter masked blocks out of vLLM's KV cache events.

    To vLLM such blocks are ordinary ones. It would publish them under the prompt's own tokens,
    behind the last exact block.

    Args:
        block_pool: vLLM's block pool; two of its methods are replaced on this instance.
        first_hidden: returns the first masked block of a request. All blocks behind it are masked
            too.
    """

    def __init__(self, block_pool: Any, first_hidden: Callable[[Any], int]) -> None:
        self._pool, self._first_hidden = block_pool, first_hidden
        self._cache, block_pool.cache_full_blocks = (
            block_pool.cache_full_blocks,
            self.cache_full_blocks,
        )
        self._take, block_pool.take_events = block_pool.take_events, self.take_events
        # masked hashes cached since the last events were taken
        self._new: Counter[Any] = Counter()
        # masked hashes cached before, and not removed yet
        self._hidden: Counter[Any] = Counter()

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Cache blocks as vLLM does, and record the hashes of masked ones."""
        self._cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        if self._pool.enable_kv_cache_events:
            first = max(self._first_hidden(request), num_cached_blocks)
            self._new.update(
                map(maybe_convert_block_hash, request.block_hashes[first:num_full_blocks])
            )

    def take_events(self) -> list[Any]:
        """Return vLLM's events without masked blocks."""
        events = [event for event in map(self._exact, self._take()) if event is not None]
        self._new.clear()
        return events

    def _exact(self, event: Any) -> Any:
        """Return the part of an event that may be published, or None."""
        if isinstance(event, AllBlocksCleared):
            self._hidden.clear()
        elif isinstance(event, BlockStored):
            return _first_blocks(event, self._count_exact(event.block_hashes))
        elif isinstance(event, BlockRemoved):
            event.block_hashes = list(self._published(event.block_hashes))
            return event if event.block_hashes else None
        return event

    def _count_exact(self, block_hashes: list[Any]) -> int:
        """Return the number of blocks before the first masked one, and record the masked ones."""
        hidden = [
            block_hash in self._new or block_hash in self._hidden for block_hash in block_hashes
        ]
        first = hidden.index(True) if True in hidden else len(hidden)
        for block_hash in block_hashes[first:]:
            # Without a new entry, the event repeats a known block.
            if self._new[block_hash]:
                self._new[block_hash] -= 1
                self._hidden[block_hash] += 1
        return first

    def _published(self, block_hashes: Iterable[Any]) -> Iterator[Any]:
        """Yield those of the removed blocks that were published."""
        for block_hash in block_hashes:
            if block_hash not in self._hidden:
                yield block_hash
            elif self._hidden[block_hash] > 1:
                self._hidden[block_hash] -= 1
            else:
                del self._hidden[block_hash]


def _first_blocks(event: BlockStored, count: int) -> BlockStored | None:
    """Return the event with its first `count` blocks only, or None if there are none."""
    event.block_hashes, event.token_ids = (
        event.block_hashes[:count],
        event.token_ids[: count * event.block_size],
    )
    event.extra_keys = event.extra_keys and event.extra_keys[:count]
    return event if count else None
