"""Worker's part of the segment store: reads and writes in the background of vLLM's steps."""

import logging
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvgraft.kv.cache import slots_of
from kvgraft.store import StoredBlock, StoreOptions
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.connector.metadata import CHUNK_BLOCKS, Keep, Load, StoreOrders, StoreReport

# loads that may wait for the shared tier at the same time; the disk is read by one at a time
NUM_READERS = 4
logger = logging.getLogger("kvgraft")
Fetched = list[StoredBlock | None]


class StoreWorker:
    """Store of one rank.

    Args:
        host: the loaded model and its cache.
        options: location and sizes. With several ranks each one gets its own part.
        rank: rank of this worker.
        num_ranks: number of ranks.
    """

    def __init__(self, host: ModelHost, options: StoreOptions, rank: int, num_ranks: int) -> None:
        self._host = host
        if num_ranks > 1:
            options = replace(options, rank=rank)
        self._store = options.open(host.block_size, chunk_blocks=CHUNK_BLOCKS)
        self._reader = ThreadPoolExecutor(NUM_READERS, "kvgraft-store")
        self._loads: list[tuple[Load, Future[Fetched]]] = []
        self._last_counts: Counter[str] = Counter()
        self._report: StoreReport | None = StoreReport(
            records=self._store.take_appeared(), ready=True
        )

    def step(self, orders: StoreOrders) -> None:
        """Carry out the scheduler's orders.

        Copies computed blocks to host memory, starts loads, and writes finished loads into their
        blocks. Reports chunks that other servers have stored.
        """
        if appeared := self._store.take_appeared():
            self._reported.records += appeared

        if orders.look:
            self._reported.looked = True

        for keep in orders.keeps:
            self._keep(keep)

        for load in orders.loads:
            self._loads.append(
                (load, self._reader.submit(self._store.fetch_from, load.places, time.monotonic()))
            )

        for load, future in [pair for pair in self._loads if pair[1].done()]:
            if (error := future.exception()) is not None:
                logger.warning("segment store: a load failed, and is a miss: %r", error)
            fetched: Fetched = [None] * len(load.places) if error is not None else future.result()
            self._reported.loaded.append((load.number, self._take_in(load, fetched)))
            self._loads.remove((load, future))

    def take_report(self) -> StoreReport | None:
        """Return what has happened since the last call, or None if nothing has."""
        counts = Counter(self._store.counts)
        if counts != self._last_counts:
            self._reported.counts, self._last_counts = counts - self._last_counts, counts
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Write everything, and close the directory and the shared place."""
        self._reader.shutdown()
        self._store.close()

    @property
    def _reported(self) -> StoreReport:
        """The next report, created when first needed."""
        if self._report is None:
            self._report = StoreReport()
        return self._report

    def _keep(self, keep: Keep) -> None:
        """Store one chunk, and report it as read and recorded."""
        self._store.put(keep.chunk, self._read(keep.blocks))
        self._reported.read.append(keep.chunk.key)
        if (record := self._store.record(keep.chunk.key)) is not None:
            self._reported.records.append(record)

    def _read(self, blocks: np.ndarray) -> dict[str, Tensor]:
        """Return the content of blocks int64 [groups, n] on this rank in host memory, [streams, n *
        block_size, d] by name."""
        host, slots = self._host, self._slots_of(blocks)
        read = [host.read_codes(at, slots[host.group_of[at]]) for at in self._attentions]
        kv = {
            name: torch.cat([pair[which].transpose(0, 1) for pair in read]).cpu()
            for which, name in enumerate(self._kv)
        }
        residuals = {
            _residual(layer): states[slots[0]][None].cpu()
            for layer, states in host.residuals.states.items()
        }
        return kv | residuals

    @property
    def _attentions(self) -> range:
        """Numbers of the attention layers whose KV is stored: those of the model, not of drafts."""
        return range(self._host.draft_attentions.start)

    @property
    def _kv(self) -> tuple[str, ...]:
        """Names of what the cache holds of a token. Latents (MLA) have no values."""
        return ("keys",) if self._host.is_latent else ("keys", "values")

    def _slots_of(self, blocks: np.ndarray) -> Tensor:
        """Return the slots int64 [groups, n * block_size] of blocks int64 [groups, n]."""
        host = self._host
        tables = blocks.tolist()
        return torch.stack([slots_of(own, host.block_size) for own in tables]).to(host.device)

    def _take_in(self, load: Load, fetched: Fetched) -> list[bool]:
        """Write loaded blocks into the cache; return for each block if it arrived."""
        arrived = [block is not None and self._fits(block) for block in fetched]
        host, loaded = (
            self._host,
            [block for block, ok in zip(fetched, arrived, strict=True) if block and ok],
        )
        if not loaded:
            return arrived

        blocks = load.blocks[:, arrived]
        slots = self._slots_of(blocks)
        payload = {
            name: torch.cat([block.payload[name] for block in loaded], dim=1)
            for name in loaded[0].payload
        }

        # of each attention layer: [heads, n * block_size, d]
        shape = (len(self._attentions), -1, slots.shape[1], host.head_dim)
        keys, *values = (
            payload[name].view(shape).transpose(1, 2).to(host.device) for name in self._kv
        )

        for at in self._attentions:
            own = values[0][at] if values else keys[at, ..., :0]
            host.write_codes(at, keys[at], own, slots[host.group_of[at]])

        host.clear_drafts(torch.from_numpy(blocks[0]))
        for layer, states in host.residuals.states.items():
            states[slots[0]] = payload[_residual(layer)][0].to(states)

        return arrived

    def _fits(self, block: StoredBlock) -> bool:
        """Return True if a block holds everything that this rank keeps of a token."""
        host, size = self._host, self._host.block_size
        kv = (host.num_layers * host.num_kv_heads, size, host.head_dim), host.code_dtype
        wanted = dict.fromkeys(self._kv, kv) | {
            _residual(layer): ((1, size, states.shape[1]), states.dtype)
            for layer, states in host.residuals.states.items()
        }
        return all(
            name in block.payload and (block.payload[name].shape, block.payload[name].dtype) == kind
            for name, kind in wanted.items()
        )


def _residual(layer: int) -> str:
    return f"residual.{layer}"
