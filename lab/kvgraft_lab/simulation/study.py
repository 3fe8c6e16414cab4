"""Routers side by side, by number of servers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvgraft.cli.progress import OnProgress
from kvgraft.core.costs import Costs
from kvgraft.core.expected_prefill import BYTES_PER_TOKEN
from kvgraft_lab.simulation.run import Arrival, FleetShape, Simulated, check_router, simulate
from kvgraft_lab.simulation.traffic import Traffic

ONE_SERVER = "one server"  # with the pools of all: the bound


@dataclass(frozen=True)
class Quantiles:
    """Of what was measured of each request."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Quantiles | None":
        """None if there is no number among them."""
        known = values[~np.isnan(values)]
        return cls(*np.percentile(known, [50, 95, 99]).tolist()) if len(known) else None


@dataclass(frozen=True)
class FleetRow:
    """One router and one number of servers. What one server with all pools does not have is None.

    Attributes:
        rate: requests a second.
        prefix, grafted: shares of the prompt tokens.
        of_bound: what is reused, as a share of what `ONE_SERVER` reuses.
        ttft_s: seconds to the first token.
        imbalance: computed tokens of the busiest server, over the mean.
        sketch_bytes_s: of all servers, a second.
        staleness_s: age of what the chosen server had said.
        routing_ms: of a decision, on this machine.
    """

    servers: int
    router: str
    rate: float
    prefix: float
    grafted: float
    of_bound: float
    ttft_s: Quantiles | None = None
    imbalance: float | None = None
    sketch_bytes_s: float | None = None
    staleness_s: Quantiles | None = None
    routing_ms: Quantiles | None = None

    @property
    def reused(self) -> float:
        """Share of the prompt tokens."""
        return self.prefix + self.grafted


@dataclass(frozen=True)
class StudySettings:
    """What is simulated.

    Attributes:
        servers: numbers of them.
        routers: of `ROUTERS`.
        pool_tokens: of each server.
        period_s, delay_s, imbalance: see `FleetShape`.
        warm_up: share of the requests, the first ones, that are not counted.

    Raises:
        ValueError: a number out of its range.
    """

    servers: tuple[int, ...]
    routers: tuple[str, ...]
    pool_tokens: int
    costs: Costs
    period_s: float = 2.0
    delay_s: float = 0.2
    imbalance: float = 1.5
    warm_up: float = 0.2

    def __post_init__(self) -> None:
        if not self.servers or not self.routers:
            raise ValueError("no servers, or no routers")
        for router in self.routers:
            check_router(router)
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up is {self.warm_up}, must be at least 0 and less than 1")
        for servers in self.servers:
            self.shape(servers)

    def shape(self, servers: int) -> FleetShape:
        """A fleet of so many."""
        return FleetShape(
            servers,
            self.pool_tokens,
            self.costs,
            period_s=self.period_s,
            delay_s=self.delay_s,
            imbalance=self.imbalance,
        )


@dataclass(frozen=True)
class FleetStudy:
    """What came out.

    Attributes:
        traffic: what it was, in words.
        how_rated: where its rate comes from, in words.
        requests: of which the first `warm_up` are not counted, and `prompt_tokens` of each on
            average: of the last row.
    """

    traffic: str
    how_rated: str
    requests: int
    prompt_tokens: float
    settings: StudySettings
    rows: tuple[FleetRow, ...]


def compare(
    settings: StudySettings, traffic: Traffic, *, on_progress: OnProgress = lambda done, total: None
) -> FleetStudy:
    """Simulate every router with every number of servers.

    Raises:
        ValueError: a pool that is smaller than a prompt.
    """
    done, rows = 0, list[FleetRow]()
    for number, servers in enumerate(settings.servers):
        arrivals = traffic.arrivals(servers)
        lengths = [arrival.text.num_bytes / BYTES_PER_TOKEN for arrival in arrivals]
        _check_pool(settings.pool_tokens, max(lengths))
        steps, ahead = count(done + 1), len(settings.servers) - number
        done += (len(settings.routers) + 1) * len(arrivals)
        total = done + (ahead - 1) * (len(settings.routers) + 1) * len(arrivals)

        def on_step(steps: Iterator[int] = steps, total: int = total) -> None:
            on_progress(next(steps), total)

        rows += _compare(settings, servers, arrivals, on_step)
    return FleetStudy(
        traffic.name,
        traffic.how_rated,
        len(arrivals),
        float(np.mean(lengths)),
        settings,
        tuple(rows),
    )


def _check_pool(pool_tokens: int, longest: float) -> None:
    if pool_tokens < longest:
        raise ValueError(f"a pool of {pool_tokens} tokens: the longest prompt needs {longest:.0f}")


def _compare(
    settings: StudySettings, servers: int, arrivals: Sequence[Arrival], on_step: Callable[[], None]
) -> list[FleetRow]:
    """The routers, then the bound."""
    shape, first = settings.shape(servers), int(settings.warm_up * len(arrivals))
    alone = FleetShape(1, servers * settings.pool_tokens, settings.costs)
    rate = len(arrivals) / max(arrivals[-1].at - arrivals[0].at, 1e-9)
    bound = _shares(simulate(arrivals, alone, "random", on_step=on_step), first)
    rows = []
    for router in settings.routers:
        found = simulate(arrivals, shape, router, on_step=on_step)
        prefix, grafted = _shares(found, first)
        rows.append(
            FleetRow(
                servers,
                router,
                rate,
                prefix,
                grafted,
                of_bound=(prefix + grafted) / sum(bound) if sum(bound) else 1.0,
                ttft_s=Quantiles.of(found.ttft_s[first:]),
                imbalance=_imbalance(found, first, servers),
                sketch_bytes_s=found.sketch_bytes / max(found.duration_s, 1e-9),
                staleness_s=Quantiles.of(found.staleness_s[first:]),
                routing_ms=Quantiles.of(1000 * found.routing_s[first:]),
            )
        )
    return [*rows, FleetRow(servers, ONE_SERVER, rate, *bound, of_bound=1.0)]


def _shares(found: Simulated, first: int) -> tuple[float, float]:
    """Prefix and grafted tokens of prompt tokens."""
    tokens = found.prompt_tokens[first:].sum()
    return float(found.prefix_tokens[first:].sum() / tokens), float(
        found.grafted_tokens[first:].sum() / tokens
    )


def _imbalance(found: Simulated, first: int, servers: int) -> float:
    computed = (found.prompt_tokens - found.prefix_tokens - found.grafted_tokens)[first:]
    by_server = np.bincount(found.server[first:], computed, minlength=servers)
    return float(by_server.max() / max(by_server.mean(), 1e-9))
