"""A fleet in one process: its router, and servers that only take time, as long as a cost model
says.

The router is the real one (`Ranking`, `ReplicaContents`, sketches). A server reads one prompt after
the other, holds the last that it has read, and says from time to time what that is. Decoding takes
a request's place on the server, and no time from prompts. Answers are not held."""

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.core.costs import Costs
from kvgraft.core.expected_prefill import BYTES_PER_TOKEN, expect
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.fleet.ranking import Ranking, ReplicaReport
from kvgraft.fleet.replica_contents import ReplicaContents

ROUTERS = ("random", "least-loaded", "prefix-aware", "segment-aware")


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request: when it comes, in seconds, its prompt, and how many tokens are decoded."""

    at: float
    text: Fingerprints
    decoded: int


@dataclass(frozen=True)
class FleetShape:
    """What is simulated.

    Attributes:
        servers: how many.
        pool_tokens: of each one's KV.
        costs: of a prompt.
        work: share of what is grafted that is computed.
        decode_s: of one token.
        period_s: between two sketches of a server.
        delay_s: until a sketch has reached the router.
        imbalance: of `Ranking`.

    Raises:
        ValueError: a number out of its range.
    """

    servers: int
    pool_tokens: int
    costs: Costs
    work: float = 0.15
    decode_s: float = 0.02
    period_s: float = 2.0
    delay_s: float = 0.2
    imbalance: float = 1.5

    def __post_init__(self) -> None:
        for name in ("servers", "pool_tokens", "period_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, must be more than 0")
        if not 0 <= self.delay_s < float("inf"):
            raise ValueError(f"delay_s is {self.delay_s}, must be at least 0")


@dataclass(frozen=True, eq=False)
class Simulated:
    """What became of all requests, in their order.

    Attributes:
        ttft_s: seconds to the first token.
        prompt_tokens, prefix_tokens, grafted_tokens: of each prompt.
        server: which one had it.
        routing_s: that the router took, of this machine.
        staleness_s: age of what the chosen server had said, at the time of the choice; not a number
            if it had not spoken, or is not listened to.
        sketch_bytes: of all sketches that differed from the one before.
        duration_s: until the last arrival.
    """

    ttft_s: np.ndarray
    prompt_tokens: np.ndarray
    prefix_tokens: np.ndarray
    grafted_tokens: np.ndarray
    server: np.ndarray
    routing_s: np.ndarray
    staleness_s: np.ndarray
    sketch_bytes: int
    duration_s: float


class _Server:
    """One server, and what it holds: fingerprints, and chains of the prompts that it has read."""

    def __init__(self, shape: FleetShape) -> None:
        self._shape = shape
        self._text = ReplicaContents(shape.pool_tokens * BYTES_PER_TOKEN)
        self.free_at = 0.0

    def read(self, arrival: Arrival) -> tuple[float, float, float]:
        """Take a prompt: when it has its first token; prefix and grafted tokens."""
        held, begun = self._text.holds(arrival.text)
        expected = expect(
            arrival.text, held[None], begun[None], self._shape.costs, work=self._shape.work
        )
        started = max(arrival.at, self.free_at)
        self.free_at = started + float(expected.prefill_s[0])
        self._text.add(arrival.text)
        return self.free_at, float(expected.prefix_tokens[0]), float(expected.grafted_tokens[0])

    def report(self, now: float) -> ReplicaReport:
        """What it says of itself."""
        text, begun = self._text.sketches()
        return ReplicaReport(
            text, begun, max(self.free_at - now, 0.0), self._shape.costs, self._shape.work
        )


def simulate(
    arrivals: Sequence[Arrival],
    shape: FleetShape,
    router: str,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Simulated:
    """Send all requests, in the order in which they come.

    Args:
        on_step: called after each of them.

    Raises:
        ValueError: there is no such router.
    """
    check_router(router)
    run = _Run(shape, router)
    for arrival in arrivals:
        run.send(arrival)
        on_step()
    return run.result()


def check_router(router: str) -> None:
    """ValueError unless there is such a router."""
    if router not in ROUTERS:
        raise ValueError(f"no router {router!r}: there are {', '.join(ROUTERS)}")


class _Run:
    def __init__(self, shape: FleetShape, router: str) -> None:
        self._shape, self._router, self._now = shape, router, 0.0
        self._servers = [_Server(shape) for _ in range(shape.servers)]
        self._ranking: Ranking[int] = Ranking(
            imbalance=shape.imbalance, grafts=router == "segment-aware", clock=lambda: self._now
        )
        self._in_flight = dict.fromkeys(range(shape.servers), 0)
        self._ends: list[tuple[float, int]] = []
        self._random = random.Random(0)  # noqa: S311  # a simulation
        step = shape.period_s / shape.servers
        self._due = [(step * number, number) for number in range(shape.servers)]  # of sketches
        self._on_the_way: deque[tuple[float, int, ReplicaReport]] = deque()
        self._said: dict[int, float] = {}
        self._rows: list[tuple[float, ...]] = []
        self._sketches: dict[int, tuple[bytes, bytes]] = {}
        self._sketch_bytes = 0

    def send(self, arrival: Arrival) -> None:
        """One request, when it comes."""
        self._pass(arrival.at)
        before = time.perf_counter()
        server = self._choose(arrival.text)
        took = time.perf_counter() - before
        first_token, prefix, grafted = self._servers[server].read(arrival)
        self._in_flight[server] += 1
        heapq.heappush(self._ends, (first_token + arrival.decoded * self._shape.decode_s, server))
        self._ranking.sent(server, arrival.text)
        tokens = arrival.text.num_bytes / BYTES_PER_TOKEN
        stale = arrival.at - self._said.get(server, float("nan"))
        self._rows.append((first_token - arrival.at, tokens, prefix, grafted, server, took, stale))

    def result(self) -> Simulated:
        """What became of all of them."""
        ttft, tokens, prefix, grafted, server, took, stale = np.array(self._rows).reshape(-1, 7).T
        return Simulated(
            ttft,
            tokens,
            prefix,
            grafted,
            server.astype(int),
            took,
            stale,
            self._sketch_bytes,
            self._now,
        )

    def _choose(self, text: Fingerprints) -> int:
        if self._router == "random":
            return self._random.randrange(self._shape.servers)
        if self._router == "least-loaded":
            least = min(self._in_flight.values())
            return self._random.choice(
                [s for s, count in self._in_flight.items() if count == least]
            )
        ranked = self._ranking.rank(text, self._in_flight)
        return ranked.servers[0]

    def _pass(self, now: float) -> None:
        """Let the time until then pass."""
        while self._ends and self._ends[0][0] <= now:
            self._in_flight[heapq.heappop(self._ends)[1]] -= 1
        if self._router not in ("random", "least-loaded"):
            while self._due[0][0] <= now:
                due, server = heapq.heappop(self._due)
                report = self._servers[server].report(due)
                sketches = report.text, report.beginnings
                if self._sketches.get(server) != sketches:
                    self._sketches[server] = sketches
                    self._sketch_bytes += sum(map(len, sketches))
                self._on_the_way.append((due + self._shape.delay_s, server, report))
                heapq.heappush(self._due, (due + self._shape.period_s, server))
            while self._on_the_way and self._on_the_way[0][0] <= now:
                self._now, server, report = self._on_the_way.popleft()
                self._ranking.hear(server, report)
                self._said[server] = self._now - self._shape.delay_s
        self._now = now
