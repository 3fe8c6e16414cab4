"""vLLM's KV cache groups: layers with windows may have block tables of their own, which forget what
no window sees.

A page of the *main* group, one of full attention, names content. Its *counterparts* are the pages
of the other groups that hold the KV of the same text: found by the same hash, as long as nobody has
reclaimed them. Local heads lose theirs early, and a policy may compute what they have lost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvgraft.vllm.heads.spec import SinkWindowSpec

NULL_PAGE = 0  # what a block table has in the place of a block that is given back


def is_full(spec: Any) -> bool:
    """Whether all layers of a group with this cache spec are of full attention (their sizes may
    differ)."""
    layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(layer, FullAttentionSpec) for layer in layers)


def order_of(specs: Sequence[Any]) -> list[int]:
    """Numbers of the groups with these cache specs, the main one first; ValueError if none is of
    full attention."""
    full = [number for number, spec in enumerate(specs) if is_full(spec)]
    if not full:
        raise ValueError("no KV cache group is of full attention")
    return [full[0], *(number for number in range(len(specs)) if number != full[0])]


@dataclass
class Reserved:
    """What one recovery holds beside its request's own pages: by group but the main one, in order.

    Attributes:
        before: pages of its prefix that windows reach back to, by number of block.
        scratch: pages for those blocks of the prompt that its own tables leave out.
    """

    before: list[dict[int, int]] = field(default_factory=list)
    scratch: list[dict[int, int]] = field(default_factory=list)


class CacheGroups:
    """The groups of one server.

    Args:
        block_pool: vLLM's, which all groups share.
        managers: of each group, vLLM's.
        specs: of each group, what its pages hold.

    Attributes:
        main: number of the main group.
        others: numbers of the other groups.
        local: those of them that are of local heads.
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
        """Those of vLLM's KV cache manager."""
        specs = [group.kv_cache_spec for group in kv_cache_manager.kv_cache_config.kv_cache_groups]
        return cls(
            kv_cache_manager.block_pool,
            kv_cache_manager.coordinator.single_type_managers,
            specs,
            block_size,
        )

    def counterparts(self, page: int) -> tuple[int, ...] | None:
        """Of a page of the main group, one in each other group: `NULL_PAGE` where local heads have
        lost theirs; None if any other is gone."""
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

    def num_pages(self, num_prefix: int, num_tokens: int) -> int:
        """Pages that a prompt of so many tokens, of which so many are hits, needs in the other
        groups together while it is recovered."""
        blocks, first = -(-num_tokens // self._block_size), num_prefix // self._block_size
        hits = range(first)
        return sum(
            blocks - len(_both(hits, self._left_out(group, num_tokens))) for group in self.others
        )

    def reserve(self, prefix_hashes: Sequence[Any], num_tokens: int) -> Reserved:
        """Hold what a recovery of a prompt needs; ValueError if there are not so many free
        pages."""
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
            left_out = self._left_out(group, num_tokens)
            new = _both(range(first, left_out.stop), left_out)
            pages = self._pool.get_new_blocks(len(new)) if new else []
            reserved.scratch.append(
                {block: page.block_id for block, page in zip(new, pages, strict=True)}
            )
        return reserved

    def keep(self, reserved: Reserved, request: Any) -> None:
        """Let what was recovered into blocks that the request's tables leave out be found by its
        hashes, as what vLLM computes and leaves behind is."""
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
        """Give it back."""
        pages = [page for part in (*reserved.before, *reserved.scratch) for page in part.values()]
        self._pool.free_blocks([self._pool.blocks[page] for page in pages])
        reserved.before, reserved.scratch = [], []

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the last blocks of a request, that so many tokens do not need and nobody knows
        by a hash yet."""
        needed = -(-num_tokens // self._block_size)
        for manager in self._managers:
            blocks = manager.req_to_blocks[request_id]
            self._pool.free_blocks(reversed(blocks[needed:]))
            del blocks[needed:]

    def tables(
        self, block_ids: Sequence[Sequence[int]], reserved: Reserved
    ) -> tuple[np.ndarray, ...]:
        """Block tables of a prompt, int64 [b] by group, the main one first: vLLM's, completed by
        what is reserved."""
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
        """All pages of a request, whatever the group."""
        return {page for table in block_ids for page in table}

    def _left_out(self, group: int, num_tokens: int) -> range:
        """Blocks that the table of a request leaves out when so many tokens are computed."""
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
    """What is in both."""
    return range(max(some.start, others.start), min(some.stop, others.stop))
