"""A request router of Ray Serve: a prompt goes to the replica from which its first token is
expected soonest."""

import logging
import random
import time
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

# not what is in it: Ray copies this class, with all that it names
from kvgraft.fleet import figures
from kvgraft.fleet.ranking import IMBALANCE, ROUTINGS, Ranking, ReplicaReport
from kvgraft.fleet.requests import FleetRequest

logger = logging.getLogger("ray.serve")


class SegmentRouter(LocalityMixin, RequestRouter):
    """Ranks replicas by the text that they hold and by what waits for them; by load alone (the
    better of two drawn at random, on the same machine first) where nothing is known.

    It does not take Ray's `FIFOMixin`: with that a replica that was chosen for one request is given
    to the one that has waited longest."""

    def initialize_state(
        self, imbalance: float = IMBALANCE, routing: str = ROUTINGS[0], **_: Any
    ) -> None:
        """Take the options of the deployment (`request_router_kwargs`): of `Ranking`, and one of
        `ROUTINGS`."""
        self._routing = routing
        self._ranking: Ranking[ReplicaID] = Ranking(
            imbalance=imbalance, grafts=routing == "segments"
        )
        self._heard: dict[ReplicaID, Any] = {}  # the last that each has said

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
                try:
                    self._ranking.hear(replica.replica_id, ReplicaReport.of(said))
                except Exception:  # Ray would never tell of replicas again
                    logger.exception("what %s says is not understood", replica.replica_id)
                    self._ranking.forget(replica.replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank for each replica, the best first."""
        request = (
            pending_request.args[0]
            if pending_request is not None and pending_request.args
            else None
        )
        if isinstance(request, FleetRequest) and request.avoids:
            others = [
                replica
                for replica in candidate_replicas
                if replica.replica_id.unique_id not in request.avoids
            ]
            candidate_replicas = others or candidate_replicas
        if self._routing == "random":
            _count("random", pending_request)
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            return [random.sample(candidate_replicas, 1)]
        if pending_request is None or not isinstance(request, FleetRequest) or request.text is None:
            return self._by_load(candidate_replicas, pending_request)
        if self._routing == "load":
            return self._by_load(candidate_replicas, pending_request)
        started = time.perf_counter()
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        try:
            ranked = self._ranking.rank(request.text, queues)
        except Exception:  # Ray would let the request wait forever
            logger.exception("a request is routed by load")
            return self._by_load(candidate_replicas, pending_request, "error")
        figures.FIGURES.routing.labels("ranking").observe(time.perf_counter() - started)
        if not ranked.informed:
            return self._by_load(candidate_replicas, pending_request)
        _count("text", pending_request, ranked.known_tokens)
        pending_request.routing_context.should_backoff = True  # before it is ranked again
        return [[by_id[name]] for name in ranked.servers]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It is on its way, and will be known there."""
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, FleetRequest) and request.text is not None:
            try:
                self._ranking.sent(replica_id, request.text)
            except Exception:  # Ray would fail the request, which has begun
                logger.exception("what was sent to %s is not noted", replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing is sent there any more."""
        super().on_replica_actor_died(replica_id)
        self._heard.pop(replica_id, None)
        self._ranking.forget(replica_id)

    def _by_load(
        self,
        replicas: list[RunningReplica],
        pending_request: PendingRequest | None,
        reason: str = "load",
    ) -> list[list[RunningReplica]]:
        """Ray asks both how much they have to do, and takes the one with less."""
        _count(reason, pending_request)
        near = self.apply_locality_routing(pending_request)
        found = [replica for replica in replicas if replica.replica_id in near]
        return [random.sample(found, min(2, len(found)))]


def _count(by: str, pending_request: PendingRequest | None, known_tokens: float = 0.0) -> None:
    """Count a request once, however often it is ranked before a replica takes it."""
    tried = pending_request.routing_context if pending_request is not None else None
    if tried is None or not (tried.tried_same_node or tried.tried_same_az or tried.should_backoff):
        figures.FIGURES.routed.labels(by).inc()
        figures.FIGURES.known.inc(known_tokens)
