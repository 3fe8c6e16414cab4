"""Request router for Ray Serve: it picks the replica from which the first token is expected
soonest."""

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

# Import the module, not the objects in it: Ray copies this class with all that it names.
from kvgraft.fleet import figures
from kvgraft.fleet.ranking import IMBALANCE, ROUTINGS, Ranking, ReplicaReport
from kvgraft.fleet.requests import FleetRequest

logger = logging.getLogger("ray.serve")


class SegmentRouter(LocalityMixin, RequestRouter):
    """Router that ranks replicas by the text that they hold and by their queues.

    If nothing is known, it routes by load: of two random replicas, those on the same machine first,
    the one with fewer requests.

    Ray's `FIFOMixin` is not used. With it a replica that was chosen for one request goes to the
    request that has waited longest.
    """

    def initialize_state(
        self, imbalance: float = IMBALANCE, routing: str = ROUTINGS[0], **_: Any
    ) -> None:
        """Store the deployment's options (`request_router_kwargs`).

        Args:
            imbalance: see `Ranking`.
            routing: one of `ROUTINGS`.
        """
        self._routing = routing
        self._ranking: Ranking[ReplicaID] = Ranking(
            imbalance=imbalance, grafts=routing == "segments"
        )
        # the last report of each replica
        self._heard: dict[ReplicaID, Any] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas and their reports; called by Ray Serve."""
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
                # an error here would stop Ray's updates for good
                except Exception:
                    logger.exception("what %s says is not understood", replica.replica_id)
                    self._ranking.forget(replica.replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one rank per replica, the best first; by load, one rank of up to two replicas."""
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
        # an error here would make the request wait forever
        except Exception:
            logger.exception("a request is routed by load")
            return self._by_load(candidate_replicas, pending_request, "error")

        figures.FIGURES.routing.labels("ranking").observe(time.perf_counter() - started)
        if not ranked.informed:
            return self._by_load(candidate_replicas, pending_request)
        _count("text", pending_request, ranked.known_tokens)
        # make Ray wait before it ranks the request again
        pending_request.routing_context.should_backoff = True
        return [[by_id[name]] for name in ranked.servers]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note that the prompt's text is on its way to a replica, and will be known there."""
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, FleetRequest) and request.text is not None:
            try:
                self._ranking.sent(replica_id, request.text)
            # an error here would fail a request that has begun
            except Exception:
                logger.exception("what was sent to %s is not noted", replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that died."""
        super().on_replica_actor_died(replica_id)
        self._heard.pop(replica_id, None)
        self._ranking.forget(replica_id)

    def _by_load(
        self,
        replicas: list[RunningReplica],
        pending_request: PendingRequest | None,
        reason: str = "load",
    ) -> list[list[RunningReplica]]:
        """Return two random replicas, those on the same machine first; Ray picks the less loaded
        one."""
        _count(reason, pending_request)
        near = self.apply_locality_routing(pending_request)
        found = [replica for replica in replicas if replica.replica_id in near]
        return [random.sample(found, min(2, len(found)))]


def _count(by: str, pending_request: PendingRequest | None, known_tokens: float = 0.0) -> None:
    """Count a request once, even if it is ranked several times before a replica accepts it."""
    tried = pending_request.routing_context if pending_request is not None else None
    if tried is None or not (tried.tried_same_node or tried.tried_same_az or tried.should_backoff):
        figures.FIGURES.routed.labels(by).inc()
        figures.FIGURES.known.inc(known_tokens)
