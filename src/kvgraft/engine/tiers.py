"""Tiers below the page pool: exact blocks go to host memory and to disk, and come back when a prompt wants them."""

import os
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.known import Known, Reuse
from kvgraft.engine.sequence import Sequence
from kvgraft.kv.cache import KVCache, slots_of
from kvgraft.kv.pages import PagePool
from kvgraft.segments.keys import chain_hashes
from kvgraft.segments.segmentation import Similarity
from kvgraft.segments.store import Chunk, SegmentStore, StoredBlock, StoreOptions, consecutive


class Tiers:
    """A segment store beside a page pool.

    Args:
        known: what prompts are matched with; what comes back becomes known there.
    """

    def __init__(self, store: SegmentStore, pool: PagePool, cache: KVCache, known: Known) -> None:
        self.store = store
        self.pool = pool
        self.cache = cache
        self.known = known
        self._first_source = int.from_bytes(os.urandom(7))  # so that sources of two processes differ

    @classmethod
    def open(
        cls,
        options: StoreOptions,
        pool: PagePool,
        cache: KVCache,
        known: Known,
        similarity: Similarity | None,
        anchors: Iterable[Items[int]],
    ) -> "Tiers":
        """A store with these options, that finds what the engine finds.

        Raises:
            ValueError, OSError: it cannot be used; the message says why.
        """
        if cache.layout.num_local_lists:
            raise ValueError("a store keeps what all heads hold, and with head_paging local heads give it back")
        return cls(options.open(pool.block_size, similarity, anchors), pool, cache, known)

    def keep(self, sequence: Sequence, *, ended: bool) -> None:
        """Store the exact blocks that the sequence has offered: chunk by chunk, the last one when it has ended."""
        size, length = self.pool.block_size, self.store.chunk_blocks
        first, stop = sequence.num_stored, sequence.num_offered if ended else sequence.num_offered // length * length
        if stop <= first:
            return
        tokens = np.array(sequence.tokens[: stop * size], np.int64)
        chains = chain_hashes(tokens, size, sequence.scope)
        is_exact = self.known.exact_blocks(sequence, stop)
        source, namespace = self._first_source + sequence.source, sequence.request.namespace
        for begin in range(first, stop, length):
            exact = is_exact[begin : begin + length]
            end = begin + (len(exact) if exact.all() else int(exact.argmin()))
            if end > begin:
                where, named = slice(begin * size, end * size), tuple(chains[begin:end])
                chunk = Chunk(sequence.scope, namespace, named, tokens[where], source, where.start)
                if not self.store.touch(chunk.key):
                    self.store.put(chunk, self._read(sequence.pages.slots[0, where]))
        sequence.num_stored = stop

    def restore(self, sequence: Sequence, reuse: Reuse, num_spare: int) -> bool:
        """Bring stored blocks that a prompt wants beside `reuse` into `num_spare` free pages at most; whether any."""
        held = [*reuse.hits.values(), *{int(page) for match in reuse.matches for page in match.pages}]
        wanted = self._wanted(sequence, reuse)[: max(num_spare - len(held), 0)]
        fetched = self.store.fetch(wanted, sequence.scope)
        blocks = sorted((b for b in fetched if b and self._fits(b)), key=lambda b: (b.source, b.source_start))
        if not blocks:
            return False
        self.pool.acquire(held)  # nothing of it may be reclaimed for what comes
        pages = self.pool.allocate(len(blocks))
        self.pool.release(held)
        self._write(pages, blocks)
        self.pool.keep(pages)
        for run in consecutive([(block.source, block.source_start) for block in blocks], self.pool.block_size):
            for block, page in zip(blocks[run], pages[run], strict=True):
                if block.exact:
                    self.pool.publish(page, block.chain)
            first, tokens = blocks[run.start], np.concatenate([block.tokens for block in blocks[run]])
            self.known.name(tokens, pages[run], first.source, first.source_start, sequence.scope)
        self.pool.release(pages)
        sequence.report.counts["restored_blocks"] += len(blocks)
        return True

    def _wanted(self, sequence: Sequence, reuse: Reuse) -> list[int]:
        """Numbers of stored blocks: exact ones of the prompt, then those that can be grafted, longest run first."""
        size, prompt = self.pool.block_size, sequence.prompt
        free = np.ones(len(prompt), bool)
        for block in reuse.hits:
            free[block * size : (block + 1) * size] = False
        exact: list[int] = []
        if sequence.shares_prefix:
            chains = chain_hashes(prompt[:-1], size, sequence.scope)
            missing = [block for block in range(len(chains)) if block not in reuse.hits]
            stored = self.store.prefix([chains[block] for block in missing], sequence.scope)
            for block, number in zip(missing, stored, strict=True):
                if number >= 0:
                    exact.append(number)
                    free[block * size : (block + 1) * size] = False
        if not sequence.policy.uses_grafts:
            return exact
        for match in reuse.matches:
            free[match.start : match.start + match.length] = False
        clean, similar = self.known.require_clean_context, sequence.matches_similar
        matches = self.store.match(prompt, sequence.scope, free=free, require_clean_context=clean, similar=similar)
        grafted = [page for match in sorted(matches, key=lambda m: -m.length) for page in match.pages.tolist()]
        return list(dict.fromkeys([*exact, *grafted]))

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        """What the pool holds in these slots int64 [n], by the name of the tensor: [streams, n, d]."""
        return {name: tensor[:, slots].cpu() for name, tensor in self._tensors().items()}

    def _write(self, pages: Items[int], blocks: Items[StoredBlock]) -> None:
        slots = slots_of(pages, self.pool.block_size).to(self.cache.keys.device)
        for name, tensor in self._tensors().items():
            tensor[:, slots] = torch.cat([block.payload[name] for block in blocks], dim=1).to(tensor.device)

    def _fits(self, block: StoredBlock) -> bool:
        """Whether a block has all that this pool keeps of a token."""
        size = self.pool.block_size
        return all(
            name in block.payload
            and block.payload[name].shape == (tensor.shape[0], size, tensor.shape[2])
            and block.payload[name].dtype == tensor.dtype
            for name, tensor in self._tensors().items()
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The pool's tensors [streams, slots, d]."""
        named = dict(zip(("keys", "values"), self.cache.pools, strict=False))
        return named | {f"residual.{layer}": states[None] for layer, states in self.cache.residuals.items()}
