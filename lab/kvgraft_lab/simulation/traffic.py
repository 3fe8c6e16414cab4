"""Traffic for fleets of any size: the same requests, at a rate that fits the number of servers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvgraft.core.costs import Costs
from kvgraft.core.expected_prefill import BYTES_PER_TOKEN
from kvgraft.core.fingerprints import Fingerprints
from kvgraft_lab.simulation.generated import TrafficShape, generate
from kvgraft_lab.simulation.recorded import replayed, texts_of
from kvgraft_lab.simulation.run import Arrival
from kvgraft_lab.traffic.trace import RequestTrace

LOAD = 0.7  # of a server, by which the rate is chosen where none is given
A_SERVER, AT_LEAST, AT_MOST = 100, 4000, 100_000  # generated requests, where no number is given
SAMPLE = 2000  # requests by which the rate is chosen


class Traffic(Protocol):
    """What is sent to fleets.

    Attributes:
        name: what it is, in words; `how_rated`: where its rate comes from.
    """

    name: str
    how_rated: str

    def arrivals(self, servers: int) -> Sequence[Arrival]:
        """For a fleet of so many, in the order in which they come."""


@dataclass
class GeneratedTraffic:
    """Requests of a shape.

    Args:
        requests: None is `A_SERVER` for each server, and at least and at most so many.
        rate: requests a second; None is one that makes a load of `LOAD`.
        costs: by which load is counted.
    """

    name: str
    shape: TrafficShape
    requests: int | None
    rate: float | None
    costs: Costs
    seed: int = 0

    def __post_init__(self) -> None:
        self.how_rated = rated(self.rate)
        if self.rate is None:
            sample = generate(replace(self.shape, requests=SAMPLE, rate=1.0), self.seed)
            self._rate_a_server = rate_of_load([arrival.text for arrival in sample], self.costs)

    def arrivals(self, servers: int) -> Sequence[Arrival]:
        """See `Traffic`."""
        requests = self.requests or min(max(A_SERVER * servers, AT_LEAST), AT_MOST)
        rate = self.rate or servers * self._rate_a_server
        return generate(replace(self.shape, requests=requests, rate=rate), self.seed)


@dataclass
class RecordedTraffic:
    """The requests of a trace, the first `requests` of them; at their own times, if they have such
    and there is no rate. For the rest see `GeneratedTraffic` and `texts_of`."""

    trace: RequestTrace
    requests: int | None
    rate: float | None
    costs: Costs
    seed: int = 0
    per_session: bool = False

    def __post_init__(self) -> None:
        self.trace = replace(self.trace, requests=self.trace.requests[: self.requests])
        self._texts = texts_of(self.trace, per_session=self.per_session)
        self.name = f"recorded, {len(self.trace.by_session()):,} sessions"
        self._has_times = self.rate is None and self.trace.by_time
        self.how_rated = "at their own times" if self._has_times else rated(self.rate)

    def arrivals(self, servers: int) -> Sequence[Arrival]:
        """See `Traffic`."""
        rate = (
            self.rate
            if self._has_times or self.rate
            else servers * rate_of_load(self._texts, self.costs)
        )
        return replayed(self.trace, self._texts, rate, self.seed)


def rated(rate: float | None) -> str:
    """Where a rate comes from, in words."""
    return (
        f"a load of {LOAD} if nothing were reused"
        if rate is None
        else f"{rate:g} requests a second"
    )


def rate_of_load(texts: Sequence[Fingerprints], costs: Costs, load: float = LOAD) -> float:
    """Requests a second for one server, of which it would compute all without reuse for this share
    of its time."""
    tokens = np.array([text.num_bytes / BYTES_PER_TOKEN for text in texts])
    return load / float(np.mean(costs.computing(tokens, tokens**2 / 2)))
