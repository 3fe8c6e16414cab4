"""Ranking of replicas for a prompt, used for live routing and in the simulation."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Generic

import numpy as np

from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import TOKENS, Costs
from kvgraft.core.expected_prefill import (
    BYTES_PER_TOKEN,
    IMBALANCE,
    Expected,
    expect,
    is_overloaded,
    with_delays,
)
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.fleet.router_view import RouterView, Server

# seconds after which a replica's last report no longer counts
SILENCE = 30.0
# seconds after which a replica sends a new report, even if nothing has changed
HEARTBEAT = 10.0
# by all text, by beginnings only, by load, or at random
ROUTINGS = ("segments", "prefixes", "load", "random")


@dataclass(frozen=True)
class ReplicaReport:
    """Report of one replica on its contents, queue and speed.

    Attributes:
        text: sketch (`router_view.pack`) of its fingerprints.
        beginnings: sketch of the chains of its fingerprints, for text at the beginning of prompts.
        waiting_s: expected seconds of prefill of its waiting prompts.
        costs: costs of its model on its machine.
        work: share of grafted tokens that its policy recomputes.
        bytes_per_token: mean over the text that it reads.
        pace: real seconds per expected second, see `LatencyCalibration`.
        beat: a number that changes every `HEARTBEAT` seconds, so that equal reports still differ.
    """

    text: bytes
    beginnings: bytes
    waiting_s: float = 0.0
    costs: Costs = TOKENS
    work: float = WORK
    bytes_per_token: float = BYTES_PER_TOKEN
    pace: float = 1.0
    beat: int = 0

    def as_stats(self) -> dict[str, Any]:
        """Return the report as a dictionary of numbers, strings and bytes."""
        return asdict(self)

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "ReplicaReport":
        """Return the report in a dictionary made by `as_stats`."""
        return cls(**{**stats, "costs": Costs(**stats["costs"])})


@dataclass
class _State:
    """State of one replica, as the router knows it.

    Attributes:
        report: its last report.
        heard: time of that report.
        free_at: estimated time at which all prompts that were sent there are prefilled.
        others_free_at: the same for the prompts that other routers sent.
        sent_s: expected seconds of prompts that this router sent and that may still run.
        answered_s: expected seconds of prompts answered since `heard`; the next report may be
            older.
    """

    report: ReplicaReport
    heard: float
    free_at: float
    others_free_at: float
    sent_s: float
    answered_s: float = 0.0


@dataclass(frozen=True)
class Ranked(Generic[Server]):
    """Replicas for one prompt, the best first.

    Attributes:
        servers: the replicas in order.
        known_tokens: prompt tokens that the best replica is expected to hold.
        informed: whether any replica has reported; if not, the order is that of the load.
    """

    servers: list[Server]
    known_tokens: float
    informed: bool


class Ranking(Generic[Server]):
    """Ranking of a fleet's replicas, one prompt after the other; for one thread.

    The best replica is the one with the earliest expected first token. Delays of other prompts
    count, too (`with_delays`).

    A replica without a report for `SILENCE` seconds counts as empty. A replica above the load cap
    (`imbalance` times the mean of running requests, plus one) comes last.

    Args:
        imbalance: see `IMBALANCE`.
        grafts: whether text away from the beginning of a prompt counts. Without it, this is a
            prefix-aware router.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        imbalance: float = IMBALANCE,
        grafts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not imbalance >= 1.0:
            raise ValueError(f"imbalance is {imbalance}, must be at least 1")
        self._imbalance, self._grafts, self._clock = imbalance, grafts, clock
        self._text: RouterView[Server] = RouterView(clock)
        self._beginnings: RouterView[Server] = RouterView(clock)
        self._servers: dict[Server, _State] = {}
        self._random = np.random.default_rng(0)

    def hear(self, server: Server, report: ReplicaReport) -> None:
        """Record a replica's report.

        Raises:
            ValueError: its sketches cannot be decoded.
        """
        self._text.update(server, report.text)
        self._beginnings.update(server, report.beginnings)

        now, before = self._clock(), self._servers.get(server)
        sent_s, answered_s = (
            (before.sent_s, before.answered_s) if before is not None else (0.0, 0.0)
        )
        others_s = max(report.waiting_s - sent_s - answered_s, 0.0)
        free_at, others_free_at = (
            now + seconds * report.pace for seconds in (report.waiting_s, others_s)
        )
        self._servers[server] = _State(report, now, free_at, others_free_at, sent_s)

    def forget(self, server: Server) -> None:
        """Remove a replica."""
        self._servers.pop(server, None)
        self._text.remove_server(server)
        self._beginnings.remove_server(server)

    def rank(self, text: Fingerprints, in_flight: Mapping[Server, int]) -> Ranked[Server]:
        """Return the replicas in the order in which the prompt should be offered to them.

        Args:
            text: fingerprints of the prompt.
            in_flight: running requests of each replica; its keys are the present replicas.
        """
        servers, now = list(in_flight), self._clock()
        loads = np.fromiter(in_flight.values(), np.int64, len(servers))
        states = [self._servers.get(server) for server in servers]
        is_heard = np.array(
            [state is not None and now - state.heard <= SILENCE for state in states], bool
        )

        free_at = np.zeros(len(servers))
        for number, (state, load) in enumerate(zip(states, loads.tolist(), strict=True)):
            if state is not None:
                free_at[number] = state.free_at if load else state.others_free_at
                if not load:
                    state.answered_s, state.sent_s = state.answered_s + state.sent_s, 0.0

        seconds = np.maximum(free_at - now, 0.0)
        known, informed = np.zeros(len(servers)), bool(is_heard.any())
        if informed:
            expected = self._expect(
                text, [servers[number] for number in np.flatnonzero(is_heard).tolist()]
            )
            known[is_heard] = expected.prefix_tokens + expected.grafted_tokens
            # use one pace for all replicas: otherwise a replica that was slow once gets no prompts,
            # so its pace never improves
            prefill_s = expected.prefill_s * median(
                state.report.pace for state in states if state is not None
            )
            prefill_s = with_delays(prefill_s, seconds[is_heard])
            seconds[is_heard] += prefill_s
            # without a report, expect as much as the replica that holds least
            seconds[~is_heard] += prefill_s.max()

        over = is_overloaded(loads, self._imbalance)
        # break ties at random
        turns = self._random.random(len(servers))
        order = np.lexsort((turns, loads, seconds, over) if informed else (turns, loads)).tolist()
        return Ranked(
            [servers[number] for number in order], float(known[order[0]]), informed=informed
        )

    def sent(self, server: Server, text: Fingerprints) -> None:
        """Record that a prompt was sent to a replica."""
        if (state := self._servers.get(server)) is not None:
            seconds = float(self._expect(text, [server]).prefill_s[0])
            now = self._clock()
            state.free_at = max(state.free_at, now) + seconds * state.report.pace
            state.sent_s += seconds
            # These notes expire only with a replica's next report, so a silent one gets none.
            if now - state.heard <= SILENCE:
                self._text.sent(server, text.values)
                self._beginnings.sent(server, text.chain())

    def _expect(self, text: Fingerprints, heard: list[Server]) -> Expected:
        """Return the expected prefill of a prompt on these replicas.

        Costs are those of the first replica, because all replicas of a fleet have the same model
        and flags.
        """
        report = self._servers[heard[0]].report
        known, begun = (
            self._text.where(text.values, heard),
            self._beginnings.where(text.chain(), heard),
        )
        if not self._grafts:
            known = known & begun

        return expect(
            text,
            known,
            begun,
            report.costs,
            work=report.work,
            bytes_per_token=report.bytes_per_token,
        )
