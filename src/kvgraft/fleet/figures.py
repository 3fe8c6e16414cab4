"""Metrics of a fleet: those of its router, and those of all servers with a label per replica."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

_MS = (
    0.1,
    0.25,
    0.375,
    0.5,
    0.625,
    0.75,
    1,
    1.25,
    1.5,
    1.75,
    2,
    2.5,
    3,
    4,
    5,
    7.5,
    10,
    25,
    50,
    250,
)
SECONDS = tuple(ms / 1000 for ms in _MS)


def _show(counter: Counter, *values: str) -> None:
    """Create the series of these label values at 0; `increase()` would miss their first event
    otherwise."""
    for value in values:
        counter.labels(value)


class Figures:
    """Metrics of one ingress process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        self.routed = Counter(
            "kvgraft:fleet_routed",
            "Requests by what they were routed by: text, load, error (by load, too).",
            ["by"],
            registry=self.registry,
        )
        self.routing = Histogram(
            "kvgraft:fleet_routing_seconds",
            "Time to find the fingerprints of a prompt, and to rank the servers: fingerprints, "
            "ranking.",
            ["part"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.known = Counter(
            "kvgraft:fleet_known_tokens",
            "Prompt tokens expected to be there.",
            registry=self.registry,
        )
        self.failed = Counter(
            "kvgraft:fleet_failed",
            "Requests whose server failed: at attempt 1 (it was tried again), 2, or within a "
            "stream.",
            ["at"],
            registry=self.registry,
        )

        _show(self.routed, "text", "load", "error")
        _show(self.failed, "1", "2", "stream")


# the metrics of this process, shared by its ingress and its router
FIGURES = Figures()


class ReplicaFigures:
    """Metrics of one replica, in addition to those of its server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.taken_over = Counter(
            "kvgraft:fleet_taken_over",
            "Changes of state repeated by a server that has started, by outcome "
            "here: done, failed.",
            ["outcome"],
            registry=self.registry,
        )
        _show(self.taken_over, "done", "failed")


def shown(name: str) -> bytes:
    """Return the metrics of this process with the label of the ingress that it is."""
    return _text(_with_label(FIGURES.registry.collect(), "ingress", name))


def labelled(texts: Iterable[tuple[str, str]]) -> bytes:
    """Merge the metrics of several servers into one text, with a replica label on each sample.

    Args:
        texts: name and metrics text of each replica.
    """
    families: dict[str, Metric] = {}
    for name, text in texts:
        for family in _with_label(text_string_to_metric_families(text), "replica", name):
            families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            ).samples += family.samples
    return _text(families.values())


def _with_label(families: Iterable[Metric], label: str, value: str) -> Iterable[Metric]:
    """Yield metric families with one label added to each sample."""
    for family in families:
        found = Metric(family.name, family.documentation, family.type)
        found.samples = [
            sample._replace(labels={**sample.labels, label: value}) for sample in family.samples
        ]
        yield found


class _Collected:
    """Prometheus collector that returns the given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metric families."""
        return self._families


def _text(families: Iterable[Metric]) -> bytes:
    """Return metric families in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(families)))
    return generate_latest(registry)
