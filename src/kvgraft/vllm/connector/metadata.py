"""Messages between the scheduler side and the workers, once per step."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvgraft.core.costs import TOKENS, Costs
from kvgraft.store import Chunk, ChunkRecord
from kvgraft.vllm.recovery import Job, RecoveryResult

# vLLM blocks per stored chunk
CHUNK_BLOCKS = 8


@dataclass(frozen=True, eq=False)
class Keep:
    """Order to store the content of blocks.

    The scheduler holds them until it has been read.

    Attributes:
        chunk: tokens of the blocks, and their place in their source.
        blocks: vLLM's blocks, int64 [groups, n], the main group first.
    """

    chunk: Chunk
    blocks: np.ndarray


@dataclass(frozen=True, eq=False)
class Load:
    """Order to load stored blocks.

    Attributes:
        number: number of the load.
        places: (key of the chunk, block within it) of each stored block.
        blocks: vLLM's blocks that they are written to, int64 [groups, n], the main group first.
    """

    number: int
    places: list[tuple[bytes, int]]
    blocks: np.ndarray


@dataclass
class StoreOrders:
    """Orders of the scheduler to the workers' stores.

    Attributes:
        look: True if the scheduler waits to learn what other servers have stored.
    """

    keeps: list[Keep] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    look: bool = False


@dataclass
class StoreReport:
    """Report of one rank's store to the scheduler.

    Ranks may reach the same point in different steps.

    Attributes:
        records: chunks that the store can find from now on.
        read: keys of chunks whose blocks the store no longer needs.
        loaded: number of each ended load, and which of its blocks were read.
        ready: True once the store has reported all that it held when it was opened.
        looked: True if the store has looked for chunks of other servers and reported them.
        counts: increments of `SegmentStore.counts`.
    """

    records: list[ChunkRecord] = field(default_factory=list)
    read: list[bytes] = field(default_factory=list)
    loaded: list[tuple[int, list[bool]]] = field(default_factory=list)
    ready: bool = False
    looked: bool = False
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Metadata(KVConnectorMetadata):
    """Message from the scheduler to the workers.

    Attributes:
        jobs, cancelled: new recoveries, and requests that were aborted.
        spare_tokens: tokens that this step could still compute. Recoveries may use their time.
        costs: costs that convert tokens to time, the same on every rank.
        forget: True if workers must forget the documents that were read.
        store: orders to the store.
        prompts: new prompts of preempted requests, by request id.
    """

    jobs: list[Job] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    spare_tokens: int = 0
    costs: Costs = TOKENS
    forget: bool = False
    store: StoreOrders = field(default_factory=StoreOrders)
    prompts: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Message from a worker to the scheduler.

    Attributes:
        outcomes: results of the recoveries that ended in this step, by request id.
        stores: reports of the stores, by rank.
        documents: bytes and number of documents in host memory, if that has changed.
        costs: measured costs, sent once.
        adapters: digests of the adapters that were loaded, by vLLM's ids.
    """

    outcomes: dict[str, RecoveryResult] = field(default_factory=dict)
    stores: dict[int, StoreReport] = field(default_factory=dict)
    documents: tuple[int, int] | None = None
    costs: Costs | None = None
    adapters: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the message of another rank.

        A recovery counts as failed if it failed on any rank.

        All ranks compute the same tokens, so one report of a success is enough.
        """
        if isinstance(other, WorkerMetadata):
            failed = {key: outcome for key, outcome in other.outcomes.items() if outcome.failure}
            self.outcomes |= failed
            self.documents = self.documents or other.documents
            self.stores |= other.stores
            self.costs = self.costs or other.costs
            self.adapters |= other.adapters
        return self
