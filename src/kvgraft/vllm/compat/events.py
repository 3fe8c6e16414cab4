"""vLLM's KV cache events, which tell routers what they find where: of ours they name exact blocks
only."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


class ExactEvents:
    """Takes out of the events what a request has hidden. To vLLM such blocks are ordinary ones, and
    it would publish them under the prompt's own tokens, behind the last exact block.

    Args:
        block_pool: vLLM's, two entrances of which are replaced on this instance.
        first_hidden: the first hidden block of a request; those behind it are hidden, too.
    """

    def __init__(self, block_pool: Any, first_hidden: Callable[[Any], int]) -> None:
        self._pool, self._first_hidden = block_pool, first_hidden
        self._cache, block_pool.cache_full_blocks = (
            block_pool.cache_full_blocks,
            self.cache_full_blocks,
        )
        self._take, block_pool.take_events = block_pool.take_events, self.take_events
        # hidden hashes that were cached since the last events were taken
        self._new: Counter[Any] = Counter()
        self._hidden: Counter[Any] = Counter()  # before that, and not removed yet

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As vLLM's own, which it calls."""
        self._cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        if self._pool.enable_kv_cache_events:
            first = max(self._first_hidden(request), num_cached_blocks)
            self._new.update(
                map(maybe_convert_block_hash, request.block_hashes[first:num_full_blocks])
            )

    def take_events(self) -> list[Any]:
        """As vLLM's own, which it calls."""
        events = [event for event in map(self._exact, self._take()) if event is not None]
        self._new.clear()
        return events

    def _exact(self, event: Any) -> Any:
        """What of an event may be told, or None."""
        if isinstance(event, AllBlocksCleared):
            self._hidden.clear()
        elif isinstance(event, BlockStored):
            return _first_blocks(event, self._count_exact(event.block_hashes))
        elif isinstance(event, BlockRemoved):
            event.block_hashes = list(self._published(event.block_hashes))
            return event if event.block_hashes else None
        return event

    def _count_exact(self, block_hashes: list[Any]) -> int:
        """How many of consecutive blocks come before the first hidden one; notes the others."""
        hidden = [
            block_hash in self._new or block_hash in self._hidden for block_hash in block_hashes
        ]
        first = hidden.index(True) if True in hidden else len(hidden)
        for block_hash in block_hashes[first:]:
            if self._new[block_hash]:  # else it is told again
                self._new[block_hash] -= 1
                self._hidden[block_hash] += 1
        return first

    def _published(self, block_hashes: Iterable[Any]) -> Iterator[Any]:
        """Of removed blocks those that were ever told."""
        for block_hash in block_hashes:
            if block_hash not in self._hidden:
                yield block_hash
            elif self._hidden[block_hash] > 1:
                self._hidden[block_hash] -= 1
            else:
                del self._hidden[block_hash]


def _first_blocks(event: BlockStored, count: int) -> BlockStored | None:
    """The event of its first blocks alone."""
    event.block_hashes, event.token_ids = (
        event.block_hashes[:count],
        event.token_ids[: count * event.block_size],
    )
    event.extra_keys = event.extra_keys and event.extra_keys[:count]
    return event if count else None
