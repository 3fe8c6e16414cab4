"""vLLM's KV cache groups.

Layers with windows may have block tables that drop blocks behind the window.

A page of the *main* group, one of full attention, identifies content. Its *counterparts* are the
pages of the other groups with the KV of the same text. They are found by the same hash until vLLM
reclaims them. Local heads lose theirs early, and a policy may compute them again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvgraft.vllm.heads.spec import SinkWindowSpec

# entry of a block table for a block that was freed
NULL_PAGE = 0


def is_full(spec: Any) -> bool:
    """Return True if all layers of a group with this cache spec use full attention.

    Sizes may differ.
    """
    layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(layer, FullAttentionSpec) for layer in layers)


def order_of(specs: Sequence[Any]) -> list[int]:
    """Return the group numbers for these cache specs, the main group first.

    Raises:
        ValueError: no group is of full attention.
    """
    full = [number for number, spec in enumerate(specs) if is_full(spec)]
    if not full:
        raise ValueError("no KV cache group is of full attention")
    return [full[0], *(number for number in range(len(specs)) if number != full[0])]


@dataclass
class Reserved:
    """Pages that one recovery holds in addition to its request's own.

    Each list has one entry per group except the main one.

    Attributes:
        before: pages of the prefix that windows reach back to, by block number.
        scratch: pages for blocks of the prompt that the request's tables leave out, by block
            number.
    """

    before: list[dict[int, int]] = field(default_factory=list)
    scratch: list[dict[int, int]] = field(default_factory=list)


class CacheGroups:
    """KV cache groups of one server.

    Args:
        block_pool: vLLM's block pool, which all groups share.
        managers: vLLM's manager of each group.
        specs: cache spec of each group.
        block_size: tokens per block.

    Attributes:
        main: number of the main group.
        others: numbers of the other groups.
        local: numbers of the other groups that belong to local heads.
    """

    def __init__(
        self, block_pool: Any, managers: Sequence[Any], specs: Sequence[Any], block_size: int
    ) -> None:
        self.main, *self.others = order_of(specs)
        self.local = frozenset(
            number for number in self.others if isinstance(specs[number], SinkWindowSpec)
        )
        self._pool, self._managers, self._specs, self._block_size = (
            block_pool,
            managers,
            specs,
            block_size,
        )

    @classmethod
    def of(cls, kv_cache_manager: Any, block_size: int) -> "CacheGroups":
        """Return the groups of vLLM's KV cache manager."""
        specs = [group.kv_cache_spec for group in kv_cache_manager.kv_cache_config.kv_cache_groups]
        return cls(
            kv_cache_manager.block_pool,
            kv_cache_manager.coordinator.single_type_managers,
            specs,
            block_size,
        )

    def counterparts(self, page: int) -> tuple[int, ...] | None:
        """Return the counterparts of a page of the main group, one per other group.

        `NULL_PAGE` stands where local heads have lost theirs. None: another counterpart is gone.
        """
        block_hash = self._pool.blocks[page].block_hash
        if not self.others:
            return ()
        if block_hash is None:
            return None
        found = {
            group: self._pool.get_cached_block(get_block_hash(block_hash), [group])
            for group in self.others
        }
        if any(not blocks and group not in self.local for group, blocks in found.items()):
            return None
        return tuple(blocks[0].block_id if blocks else NULL_PAGE for blocks in found.values())

    def num_loaded(self, num_tokens: int) -> int:
        """Return how many tokens of a prompt count as loaded by its recovery.

        vLLM computes the last token again. If that token counted as loaded, the table of a window
        could leave out the block in which the window of this token begins. But it has to count if
        it is the first of its block, because otherwise it would have none.
        """
        is_first = num_tokens % self._block_size == 1
        return num_tokens if is_first or not self.others else num_tokens - 1

    def num_pages(self, num_prefix: int, num_tokens: int) -> int:
        """Return the pages that a recovery needs in the other groups together.

        Args:
            num_prefix: tokens of the prompt that are exact prefix hits.
            num_tokens: tokens of the prompt.
        """
        blocks, first = -(-num_tokens // self._block_size), num_prefix // self._block_size
        hits, num_loaded = range(first), self.num_loaded(num_tokens)
        return sum(
            blocks - len(_both(hits, self._left_out(group, num_loaded))) for group in self.others
        )

    def reserve(self, prefix_hashes: Sequence[Any], num_tokens: int) -> Reserved:
        """Hold the pages that a recovery of a prompt needs in the other groups.

        Raises:
            ValueError: there are not enough free pages.
        """
        reserved, first = Reserved(), len(prefix_hashes)

        for group in self.others:
            left_out = self._left_out(group, first * self._block_size)
            seen = [block for block in range(first) if block not in left_out]
            found = {
                block: self._pool.get_cached_block(prefix_hashes[block], [group]) for block in seen
            }
            before = {block: pages[0].block_id for block, pages in found.items() if pages}
            self._pool.touch([self._pool.blocks[page] for page in before.values()])
            reserved.before.append(before)

        for group in self.others:
            left_out = self._left_out(group, self.num_loaded(num_tokens))
            new = _both(range(first, left_out.stop), left_out)
            pages = self._pool.get_new_blocks(len(new)) if new else []
            reserved.scratch.append(
                {block: page.block_id for block, page in zip(new, pages, strict=True)}
            )

        return reserved

    def keep(self, reserved: Reserved, request: Any) -> None:
        """Let vLLM find recovered blocks that the request's tables leave out.

        They get the request's block hashes, as blocks that vLLM itself computes and drops do.
        """
        for group, scratch in zip(self.others, reserved.scratch, strict=True):
            first = min(scratch, default=0)
            self._pool.cache_full_blocks(
                request=request,
                blocks=[self._pool.null_block] * first
                + [self._pool.blocks[page] for page in scratch.values()],
                num_cached_blocks=first,
                num_full_blocks=min(first + len(scratch), len(request.block_hashes)),
                block_size=self._block_size,
                kv_cache_group_id=group,
            )

    def release(self, reserved: Reserved) -> None:
        """Release the reserved pages."""
        pages = [page for part in (*reserved.before, *reserved.scratch) for page in part.values()]
        self._pool.free_blocks([self._pool.blocks[page] for page in pages])
        reserved.before, reserved.scratch = [], []

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Free the last blocks of a request that `num_tokens` tokens do not need.

        These blocks have no block hash yet.
        """
        needed = -(-num_tokens // self._block_size)
        for manager in self._managers:
            blocks = manager.req_to_blocks[request_id]
            self._pool.free_blocks(reversed(blocks[needed:]))
            del blocks[needed:]

    def tables(
        self, block_ids: Sequence[Sequence[int]], reserved: Reserved
    ) -> tuple[np.ndarray, ...]:
        """Return the block tables of a prompt, int64 [b] by group, the main one first.

        Reserved pages fill the places that vLLM's tables leave out.
        """
        tables = [np.array(block_ids[self.main], np.int64)]
        for group, before, scratch in zip(
            self.others, reserved.before, reserved.scratch, strict=True
        ):
            table = np.array(block_ids[group], np.int64)
            for block, page in (before | scratch).items():
                if table[block] == NULL_PAGE:
                    table[block] = page
            tables.append(table)
        return tuple(tables)

    def pages_of(self, block_ids: Iterable[Iterable[int]]) -> set[int]:
        """Return the pages of a request in all groups."""
        return {page for table in block_ids for page in table}

    def _left_out(self, group: int, num_tokens: int) -> range:
        """Return the blocks that a table leaves out once `num_tokens` tokens are computed."""
        skipped, spec = (
            int(self._managers[group].get_num_skipped_tokens(num_tokens)),
            self._specs[group],
        )
        return (
            spec.left_out(skipped)
            if isinstance(spec, SinkWindowSpec)
            else range(skipped // self._block_size)
        )


def _both(some: range, others: range) -> range:
    """Return the intersection of two ranges."""
    return range(max(some.start, others.start), min(some.stop, others.stop))
