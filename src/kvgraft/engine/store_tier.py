"""Tiers below the page pool: exact blocks are written to host memory and disk, and restored when a
prompt needs them."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.core.admission import Reuse
from kvgraft.core.restore import register_restored, wanted_blocks
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kv.cache import KVCache, slots_of
from kvgraft.kv.pages import PagePool
from kvgraft.store import SegmentStore, StoredBlock, StoreOptions


class StoreTier:
    """A segment store below a page pool.

    Args:
        index: index that matches prompts. Restored blocks are registered there.
    """

    def __init__(
        self, store: SegmentStore, pool: PagePool, cache: KVCache, index: ReuseIndex
    ) -> None:
        self.store = store
        self.pool = pool
        self.cache = cache
        self.index = index
        # Source numbers of two processes must differ.
        self._first_source = int.from_bytes(os.urandom(7))

    @classmethod
    def open(
        cls, options: StoreOptions, pool: PagePool, cache: KVCache, index: ReuseIndex
    ) -> "StoreTier":
        """Open a store with these options that matches text as the engine does.

        Raises:
            ValueError, OSError: it cannot be used; the message says why.
        """
        if cache.layout.num_local_lists:
            raise ValueError(
                "a store keeps what all heads hold, and with head_paging local heads give it back"
            )
        return cls(options.open(pool.block_size, *index.cuts), pool, cache, index)

    def keep(self, sequence: SequenceState, *, ended: bool) -> None:
        """Store the exact blocks that the sequence has registered, chunk by chunk. A last partial
        chunk is stored when it has ended."""
        provenance = sequence.provenance
        size, length = self.pool.block_size, self.store.chunk_blocks
        stop = provenance.num_registered if ended else provenance.num_registered // length * length
        if stop <= provenance.num_stored:
            return
        tokens = sequence.first_tokens(stop * size)
        is_exact, namespace = sequence.depths(stop) == 0, sequence.request.namespace
        for chunk, blocks in provenance.chunks(
            tokens, is_exact, namespace, self._first_source, length
        ):
            if not self.store.touch(chunk.key):
                slots = sequence.pages.slots[0, blocks.start * size : blocks.stop * size]
                self.store.put(chunk, self._read(slots))

    def restore(self, sequence: SequenceState, reuse: Reuse, num_spare: int) -> bool:
        """Restore stored blocks that a prompt needs in addition to `reuse`. Return whether any was
        restored.

        Args:
            num_spare: number of free pages that may be used.
        """
        held = [*reuse.hits.values(), *reuse.sources]
        wanted = self._wanted(sequence, reuse)[: max(num_spare - len(held), 0)]
        fetched = self.store.fetch(wanted, *sequence.scopes)
        blocks = [block for block in fetched if block and self._fits(block)]
        if not blocks:
            return False

        # Allocation must not reclaim pages that the prompt reuses.
        self.pool.acquire(held)
        pages = self.pool.allocate(len(blocks))
        self.pool.release(held)
        self._write(pages, blocks)
        self.pool.keep(pages)
        for block, page in zip(blocks, pages, strict=True):
            if block.exact:
                self.pool.publish(page, block.chain)

        register_restored(self.index, blocks, pages)
        self.pool.release(pages)
        sequence.report.counts["restored_blocks"] += len(blocks)
        return True

    def _wanted(self, sequence: SequenceState, reuse: Reuse) -> list[int]:
        """Numbers of stored blocks to restore: exact blocks of the prompt, then blocks to graft
        from, longest run first."""
        chains = []
        if sequence.shares_prefix:
            chains = sequence.provenance.chains(sequence.prompt[:-1], self.pool.block_size)
        _, wanted = wanted_blocks(
            self.store,
            self.index,
            sequence,
            chains,
            reuse.hits,
            reuse.matches,
            contiguous=False,
            grafts=sequence.refusal is None,
        )
        return wanted

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        """Copy of the pool's tensors at these slots int64 [n], by name: [streams, n, d]."""
        return {name: tensor[:, slots].cpu() for name, tensor in self._tensors().items()}

    def _write(self, pages: Sequence[int], blocks: Sequence[StoredBlock]) -> None:
        slots = slots_of(pages, self.pool.block_size).to(self.cache.keys.device)
        for name, tensor in self._tensors().items():
            tensor[:, slots] = torch.cat([block.payload[name] for block in blocks], dim=1).to(
                tensor.device
            )

    def _fits(self, block: StoredBlock) -> bool:
        """Return whether a block has every tensor that this pool caches, in its shape and dtype."""
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
        return named | {
            f"residual.{layer}": states[None] for layer, states in self.cache.residuals.items()
        }
