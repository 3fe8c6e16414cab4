"""A request router of Ray Serve: a prompt goes to the replica from which its first token is expected soonest."""

import random
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvgraft.fleet.asks import Ask
from kvgraft.fleet.ranking import IMBALANCE, Ranking, Report


class SegmentRouter(LocalityMixin, RequestRouter):
    """Ranks replicas by the text that they hold and by what waits for them; by load alone (the better of two drawn at
    random) where nothing is known.

    It does not take Ray's `FIFOMixin`: with that a replica that was chosen for one request is given to the one that has
    waited longest.
    """

    def initialize_state(self, imbalance: float = IMBALANCE, **_: Any) -> None:
        """Take the options of the deployment (`request_router_kwargs`)."""
        self._ranking = Ranking(imbalance=imbalance)
        self._heard: dict[ReplicaID, Any] = {}  # the last that each has said
        self._expected: dict[str, float] = {}  # seconds of prefill of requests that are on their way

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray Serve tells which replicas there are, and what they say of themselves."""
        super().update_replicas(replicas)
        for gone in self._heard.keys() - {replica.replica_id for replica in replicas}:
            self._ranking.forget(gone)
            del self._heard[gone]
        for replica in replicas:
            said = replica.routing_stats
            if said and self._heard.get(replica.replica_id) != said:
                self._heard[replica.replica_id] = said
                self._ranking.hear(replica.replica_id, Report.of(said))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank for each replica, the best first."""
        ask = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not isinstance(ask, Ask) or ask.text is None:
            return [_two_of(candidate_replicas)]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        ranked = self._ranking.rank(ask.text, queues)
        if not ranked.informed:
            return [_two_of(candidate_replicas)]
        self._expected[pending_request.metadata.internal_request_id] = ranked.prefill_s
        return [[by_id[name]] for name in ranked.servers]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It is on its way, and will be known there."""
        ask = pending_request.args[0] if pending_request.args else None
        seconds = self._expected.pop(pending_request.metadata.internal_request_id, 0.0)
        if isinstance(ask, Ask) and ask.text is not None:
            self._ranking.sent(replica_id, ask.text, seconds)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing is sent there any more."""
        super().on_replica_actor_died(replica_id)
        self._heard.pop(replica_id, None)
        self._ranking.forget(replica_id)


def _two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Ray asks both how much they have to do, and takes the one with less."""
    return random.sample(replicas, min(2, len(replicas)))
