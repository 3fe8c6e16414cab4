"""What the two sides of the connector tell each other in every step."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvgraft.prefill.costs import TOKENS, Costs
from kvgraft.segments.store import Chunk, ChunkRecord
from kvgraft.vllm.recovery import Job, RecoveryResult

CHUNK_BLOCKS = 8  # of vLLM's size: what is stored as a unit


@dataclass(frozen=True, eq=False)
class Keep:
    """Store what these blocks int [n] hold now; they are held until it has been read."""

    chunk: Chunk
    blocks: np.ndarray


@dataclass(frozen=True, eq=False)
class Load:
    """Bring stored blocks back: `places` are (key of the chunk, block in it), `blocks` where each
    one goes."""

    number: int
    places: list[tuple[bytes, int]]
    blocks: list[int]


@dataclass
class StoreOrders:
    """Scheduler to the workers' stores; `look`: it waits for what other servers have put into
    them."""

    keeps: list[Keep] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    look: bool = False


@dataclass
class StoreReport:
    """The store of one rank to the scheduler; ranks may come to the same thing in different steps.

    Attributes:
        records: chunks that it can find from now on.
        read: keys of chunks whose blocks it does not need any more.
        loaded: number of a load, and which of its blocks have come back.
        ready: it has said all that it held when it was opened.
        looked: it was asked to look what others have put there, and has said it.
        counts: what `SegmentStore.counts` has grown by.
    """

    records: list[ChunkRecord] = field(default_factory=list)
    read: list[bytes] = field(default_factory=list)
    loaded: list[tuple[int, list[bool]]] = field(default_factory=list)
    ready: bool = False
    looked: bool = False
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Metadata(KVConnectorMetadata):
    """Scheduler to workers.

    Attributes:
        jobs, cancelled: new recoveries, and the requests that were aborted.
        spare_tokens: how many more tokens this step might compute; it recovers for as long as that
            takes.
        costs: by which this is so, the same on every rank.
        forget: whether documents that were read are to be forgotten.
        store: orders.
        prompts: of preempted requests that have another one than before.
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
    """Worker to scheduler: how the recoveries that ended in this step went, by request id; what the
    stores did, by rank; if that has changed, bytes and number of the documents in host memory; once
    what things cost; and the digests of adapters that were loaded, by vLLM's ids."""

    outcomes: dict[str, RecoveryResult] = field(default_factory=dict)
    stores: dict[int, StoreReport] = field(default_factory=dict)
    documents: tuple[int, int] | None = None
    costs: Costs | None = None
    adapters: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks compute the same tokens: one report stands for all, a failure on any rank
        counts."""
        if isinstance(other, WorkerMetadata):
            failed = {key: outcome for key, outcome in other.outcomes.items() if outcome.failure}
            self.outcomes |= failed
            self.documents = self.documents or other.documents
            self.stores |= other.stores
            self.costs = self.costs or other.costs
            self.adapters |= other.adapters
        return self
