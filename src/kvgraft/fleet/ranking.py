"""Which server a prompt should go to. The same code routes requests and simulated ones."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Generic

import numpy as np

from kvgraft.fleet.expected import BYTES_PER_TOKEN, Expected, expect
from kvgraft.fleet.router_view import RouterView, Server
from kvgraft.prefill.costs import TOKENS, Costs
from kvgraft.reuse.cost import WORK
from kvgraft.segments.fingerprints import Fingerprints

SILENCE = 30.0  # seconds after which what a server said counts no longer
HEARTBEAT = 10.0  # seconds after which a server says something new, even if nothing has changed
TINY = 1e-12  # seconds that a prompt takes at least: costs may be nothing
ROUTINGS = ("segments", "prefixes", "load", "random")  # by all text, by beginnings only, or by none
IMBALANCE = 1.5  # times the mean of what is in flight that a server may have, and one request more


@dataclass(frozen=True)
class ReplicaReport:
    """What a server says of itself.

    Attributes:
        text, beginnings: sketches (`known_text.pack`) of its fingerprints and of their chains.
        waiting_s: seconds of prefill that wait there, as they are expected.
        costs: of its model on its machine; `work`: share of what is grafted that its policy
            computes.
        bytes_per_token: of the text that it reads.
        pace: seconds that really pass for an expected one, see `Pace`.
        beat: another number every `HEARTBEAT` seconds, so that it is heard.
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
        """As numbers, texts and bytes."""
        return asdict(self)

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "ReplicaReport":
        """What `as_stats` has given."""
        return cls(**{**stats, "costs": Costs(**stats["costs"])})


@dataclass
class _State:
    report: ReplicaReport
    heard: float  # when
    # when all prompts that were sent there will have been read, as far as can be told
    free_at: float
    others_free_at: float  # when those will that others have sent
    sent_s: float  # expected seconds of those that were sent from here, and may be in flight
    # of those answered since `heard`: the next report may have been made before
    answered_s: float = 0.0


@dataclass(frozen=True)
class Ranked(Generic[Server]):
    """Servers for a prompt, the best first.

    Attributes:
        known_tokens: of the prompt, expected to be at the best.
        informed: whether anything was known of the servers; else they are in no order but that of
            their load.
    """

    servers: list[Server]
    known_tokens: float
    informed: bool


class Ranking(Generic[Server]):
    """Ranks the servers of a fleet for one prompt after the other. For one thread.

    The best is where the first token is expected soonest, as long as some server has nothing to do.
    When all have, others wait for what this prompt computes, too, and its seconds count as often:
    what is computed less then is the fleet's throughput.

    A server that says nothing for `SILENCE` seconds is taken to hold nothing; one that has
    `imbalance` times as much in flight as the mean, and one request more, comes last, whatever it
    holds.

    Args:
        imbalance: see `IMBALANCE`.
        grafts: whether text counts that is no beginning; without, this is a prefix-aware router.
        clock: seconds.
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
        """A server has said what it holds. ValueError if its sketches are none."""
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
        """A server is gone."""
        self._servers.pop(server, None)
        self._text.remove_server(server)
        self._beginnings.remove_server(server)

    def rank(self, text: Fingerprints, in_flight: Mapping[Server, int]) -> Ranked[Server]:
        """The servers in the order in which a prompt should be offered to them.

        Args:
            in_flight: requests by server; these are the servers that there are.
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
            # one pace for all: a server that was slow once, and gets nothing since, would stay slow
            prefill_s = expected.prefill_s * median(
                state.report.pace for state in states if state is not None
            )
            # prompts that wait even where least does: they have to wait for this one's seconds, too
            prefill_s *= 1.0 + seconds[is_heard].min() / max(prefill_s.mean(), TINY)
            seconds[is_heard] += prefill_s
            seconds[~is_heard] += prefill_s.max()  # as long as on the one that holds least
        over = loads > self._imbalance * loads.mean() + 1
        turns = self._random.random(len(servers))  # of equal ones
        order = np.lexsort((turns, loads, seconds, over) if informed else (turns, loads)).tolist()
        return Ranked(
            [servers[number] for number in order], float(known[order[0]]), informed=informed
        )

    def sent(self, server: Server, text: Fingerprints) -> None:
        """A prompt went to a server."""
        if (state := self._servers.get(server)) is not None:
            seconds = float(self._expect(text, [server]).prefill_s[0])
            now = self._clock()
            state.free_at = max(state.free_at, now) + seconds * state.report.pace
            state.sent_s += seconds
            # what is noted is let go when the server is heard next
            if now - state.heard <= SILENCE:
                self._text.sent(server, text.values)
                self._beginnings.sent(server, text.chain())

    def _expect(self, text: Fingerprints, heard: list[Server]) -> Expected:
        """Of these servers, by what the first one takes: those of a fleet are alike."""
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
