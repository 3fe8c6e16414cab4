"""What the two sides of the connector tell each other in every step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvgraft.vllm.recovery import Job, Outcome


@dataclass
class Metadata(KVConnectorMetadata):
    """Scheduler to workers: new jobs, requests that were aborted, the token-layers that this step may spend, and
    whether documents that were read are to be forgotten."""

    jobs: list[Job] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    budget: int = 0
    forget: bool = False


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: how the recoveries that ended in this step went, by request id."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks compute the same tokens: one report stands for all, a failure on any rank counts."""
        if isinstance(other, WorkerMetadata):
            failed = {key: outcome for key, outcome in other.outcomes.items() if outcome.failure}
            self.outcomes |= failed
        return self
