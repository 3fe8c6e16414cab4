"""Prometheus metrics under `kvgraft:`, sent with vLLM's own statistics once per scheduler step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvgraft.core.report import FALLBACKS, KINDS, MISSES, REFUSALS, Outcome
from kvgraft.store.events import EVENTS


@dataclass(frozen=True)
class Metric:
    """A metric with at most one label of its own, besides vLLM's `model_name` and `engine`.

    Attributes:
        values: label values that are exported as 0 from the start, since `increase()` would miss
            the first event otherwise.
    """

    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


METRICS = {
    "kvgraft:requests_total": Metric(
        Counter,
        "Admitted requests by outcome: grafted, continued, prefix_only, miss, off, fallback.",
        "outcome",
        tuple(Outcome),
    ),
    "kvgraft:tokens_total": Metric(
        Counter,
        "Prompt tokens by kind: prefix, continued, grafted, recomputed, fresh.",
        "kind",
        (*KINDS, "recomputed"),
    ),
    "kvgraft:misses_total": Metric(
        Counter,
        "Requests that reused nothing or were not to be grafted, by reason.",
        "reason",
        (*MISSES, *REFUSALS),
    ),
    "kvgraft:fallbacks_total": Metric(
        Counter,
        "Requests whose grafts were given up, all or in part, by reason.",
        "reason",
        (*FALLBACKS, "aborted", "probe"),
    ),
    "kvgraft:too_deep_tokens_total": Metric(
        Counter,
        "Known prompt tokens that were computed, since they are known beyond --kvgraft-max-depth "
        "only.",
    ),
    "kvgraft:store_total": Metric(
        Counter,
        "Segment store: blocks by ram_hits, disk_hits; chunks by stored, evicted, damaged, ...",
        "event",
        tuple(EVENTS),
    ),
    "kvgraft:idle_refresh_tokens_total": Metric(
        Counter, "Tokens of popular text that were computed exactly while no request ran."
    ),
    "kvgraft:shadow_graftable_tokens_total": Metric(
        Counter, "Tokens that a server in shadow mode would have grafted."
    ),
    "kvgraft:shadow_saved_seconds_total": Metric(
        Counter, "Seconds of prefill that this would have saved, by what is expected of the costs."
    ),
    "kvgraft:stage_seconds": Metric(
        Histogram, "Time of a request in match, align, dense, select, sparse.", "stage"
    ),
    "kvgraft:pool_blocks": Metric(
        Gauge, "Blocks of the KV pool by state: used, free, pinned.", "state"
    ),
    "kvgraft:pinned_documents": Metric(Gauge, "Pinned documents."),
    "kvgraft:index_entries": Metric(Gauge, "Virtual blocks in the index, live and stale."),
    "kvgraft:cost_seconds": Metric(
        Gauge,
        "Seconds of prefill as measured at the start, of one pass, token, pair and copy.",
        "of",
    ),
    "kvgraft:documents": Metric(
        Gauge, "Documents in host memory, read on their own for prompts that keep a part."
    ),
    "kvgraft:document_bytes": Metric(Gauge, "Host memory that these documents take."),
}
BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


class Stats(KVConnectorStats):
    """Metrics since the last payload.

    `data[metric][label value]` is a count, a level or a list of seconds.
    """

    def add(self, metric: str, label: str = "", amount: float = 1) -> None:
        """Add to a counter."""
        counts = self.data.setdefault(metric, {})
        counts[label] = counts.get(label, 0) + amount

    def observe(self, metric: str, label: str, seconds: float) -> None:
        """Add one observation to a histogram."""
        self.data.setdefault(metric, {}).setdefault(label, []).append(seconds)

    def level(self, metric: str, label: str, value: float) -> None:
        """Set a gauge."""
        self.data.setdefault(metric, {})[label] = value

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """Add another payload. For gauges the newer value counts."""
        for metric, values in other.data.items():
            for label, value in values.items():
                mine = self.data.setdefault(metric, {})
                mine[label] = (
                    value
                    if METRICS[metric].kind is Gauge or label not in mine
                    else mine[label] + value
                )
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number per metric and label for vLLM's log line; histograms as their mean."""
        return {
            f"{metric.removeprefix('kvgraft:')}{f'[{label}]' if label else ''}": (
                sum(value) / len(value) if isinstance(value, list) else value
            )
            for metric, label, value in _items(self.data)
        }


class PromMetrics(KVConnectorPromMetrics):
    """Register the metrics with Prometheus and update them from payloads."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._metrics = {}
        for name, metric in METRICS.items():
            extra: dict[str, Any] = {"buckets": BUCKETS} if metric.kind is Histogram else {}
            labels = [*labelnames, *filter(None, [metric.label])]
            made = self._metrics[name] = metric_types[metric.kind](
                name=name, documentation=metric.help, labelnames=labels, **extra
            )
            for engine, value in product(per_engine_labelvalues.values(), metric.values):
                made.labels(*engine, value)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record one payload of one engine."""
        for name, label, value in _items(transfer_stats_data):
            own = [label] if METRICS[name].label else []
            metric = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *own)
            kind = METRICS[name].kind
            if kind is Counter:
                metric.inc(value)
            elif kind is Gauge:
                metric.set(value)
            else:
                for seconds in value:
                    metric.observe(seconds)


def _unregister() -> None:
    """Unregister the metrics of an earlier engine in this process, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("kvgraft:"):
            REGISTRY.unregister(collector)


def _items(data: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for metric, values in data.items():
        for label, value in values.items():
            yield metric, label, value
