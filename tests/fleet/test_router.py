"""The router as Ray calls it: nothing that a replica says stops it."""

import asyncio
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from kvgraft.core.fingerprints import Fingerprints
from kvgraft.core.keys import scope_digest
from kvgraft.fleet.figures import FIGURES
from kvgraft.fleet.ranking import ReplicaReport
from kvgraft.fleet.requests import FleetRequest
from kvgraft.fleet.router import SegmentRouter
from kvgraft.fleet.router_view import pack

TEXT = Fingerprints.of(np.random.default_rng(1).bytes(8000), scope_digest("", ""))
GOOD = ReplicaReport(pack(TEXT.values), pack(TEXT.chain())).as_stats()
NAMES = [ReplicaID(unique_id=name, deployment_id=DeploymentID("Replica")) for name in "ab"]
BAD = [
    {"text": b""},
    {**GOOD, "newer": 1},
    {**GOOD, "costs": {"pass_s": 1.0, "newer": 1}},
    {**GOOD, "costs": None},
    {**GOOD, "text": "text"},
    {**GOOD, "beginnings": b"no sketch"},
]


def router() -> SegmentRouter:
    made = SegmentRouter(
        deployment_id=DeploymentID("Replica"),
        handle_source=DeploymentHandleSource.REPLICA,
        self_actor_id="x",
    )
    made.initialize_state()
    return made


def replicas(*said: object) -> list[SimpleNamespace]:
    """What Ray hands to a router of each replica, as far as it is read."""
    return [
        SimpleNamespace(
            replica_id=name,
            routing_stats=stats,
            node_id="n",
            availability_zone="z",
            multiplexed_model_ids=set(),
        )
        for name, stats in zip(NAMES, said, strict=True)
    ]


def asked(*avoids: str) -> PendingRequest:
    request = FleetRequest("POST", "/v1/completions", (), b"", TEXT, frozenset(avoids))
    return PendingRequest([request], {}, RequestMetadata(request_id="1", internal_request_id="1"))


@pytest.mark.parametrize("bad", BAD)
def test_a_report_that_nobody_understands_is_left_out(
    bad: dict[str, object], caplog: pytest.LogCaptureFixture
):
    async def first() -> ReplicaID:
        found = router()
        given = replicas(bad, GOOD)
        with caplog.at_level(logging.ERROR, "ray.serve"):
            found.update_replicas(given)
        ranked = await found.choose_replicas(given, asked())
        for name in NAMES:
            found.on_request_routed(asked(), name, None)
        found.update_replicas(replicas(GOOD, GOOD))
        assert len(await found.choose_replicas(given, asked())) == 2
        found.update_replicas([])
        assert not found._ranking._text._columns, "a place in the table is kept of who is gone"
        return ranked[0][0].replica_id

    assert asyncio.run(first()) == NAMES[1]


def counted() -> dict[tuple[str, str], float]:
    """What was counted of routed requests, and of known tokens."""
    samples = [sample for family in FIGURES.registry.collect() for sample in family.samples]
    return {
        (one.name, one.labels.get("by", "")): one.value
        for one in samples
        if one.name.endswith("_total")
    }


@pytest.mark.parametrize("said", [GOOD, None])
def test_a_request_that_waits_for_a_place_is_counted_once(said: dict[str, object] | None):
    async def ranked() -> None:
        found = router()
        given = replicas(said, said)
        found.update_replicas(given)
        waits = asked()
        for _ in range(5):
            await found.choose_replicas(given, waits)
        await found.choose_replicas(given, asked())

    before = counted()
    asyncio.run(ranked())
    by = "text" if said else "load"
    assert (
        counted()["kvgraft:fleet_routed_total", by]
        - before.get(("kvgraft:fleet_routed_total", by), 0.0)
        == 2
    )
    known = (
        counted()["kvgraft:fleet_known_tokens_total", ""]
        - before["kvgraft:fleet_known_tokens_total", ""]
    )
    assert known == pytest.approx(2 * 2000 * bool(said), rel=0.1)


@pytest.mark.parametrize("said", [GOOD, None])
def test_a_request_does_not_go_again_to_who_has_failed_it(said: dict[str, object] | None):
    async def places(*avoids: str) -> set[ReplicaID]:
        found = router()
        given = replicas(said, None)
        found.update_replicas(given)
        return {
            one.replica_id
            for rank in await found.choose_replicas(given, asked(*avoids))
            for one in rank
        }

    assert asyncio.run(places()) == {*NAMES}
    assert asyncio.run(places("a")) == {NAMES[1]}
    assert asyncio.run(places("a", "b")) == {*NAMES}, "if there is no other one"
