"""Prometheus metrics of the API server: time to first token, engine silence, quality guard.

All metrics carry vLLM's label `model_name` and cover all tenants together.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from kvgraft.core.matches import depth_name
from kvgraft.core.report import Outcome
from kvgraft.guard.breaker import REASONS, Level
from kvgraft.server.request_log import ABORTED, Entry

FIRST_TOKEN = "kvgraft:time_to_first_token_seconds"  # noqa: S105
SILENT = "kvgraft:engine_silent_seconds"
GUARD = "kvgraft:guard_"

# seconds
TTFT_BUCKETS = (
    0.01,
    0.03,
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    1.0,
    2.0,
    3.0,
    5.0,
    7.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
)
# nats
KL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FLIP_BUCKETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# nats
LOGLIK_BUCKETS = (-3.0, -1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
OUTCOMES = ("scored", "dropped", "failed", "empty")


class _Metrics:
    """Metrics of one model in this process's registry, with names that begin with `prefix`."""

    def __init__(self, prefix: str, model_name: str) -> None:
        for collector in {
            one for name, one in REGISTRY._names_to_collectors.items() if name.startswith(prefix)
        }:
            # an earlier engine of this process registered the same names
            REGISTRY.unregister(collector)
        self._prefix, self._model_name = prefix, model_name

    def _add(
        self,
        kind: type[MetricWrapperBase],
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        **more: Any,
    ) -> Any:
        """Register a metric with the label `model_name` and these labels.

        Returns:
            An `_OfModel`; without labels, the metric of this model itself.
        """
        metric = kind(self._prefix + name, text, ("model_name", *labels), **more)
        return (
            _OfModel(metric, self._model_name)
            if labels
            else metric.labels(model_name=self._model_name)
        )


class _OfModel:
    """A metric with its model name set and its other labels open."""

    def __init__(self, metric: Any, model_name: str) -> None:
        self.metric, self._model_name = metric, model_name

    def labels(self, *values: str) -> Any:
        """Return the series with these label values."""
        return self.metric.labels(self._model_name, *values)


class FirstTokens(_Metrics):
    """Time to first token by outcome, in seconds, without the network time to the client."""

    def __init__(self, model_name: str) -> None:
        super().__init__(FIRST_TOKEN, model_name)
        text = "Seconds from a request's arrival to its first token, by outcome."
        self.seconds = self._add(Histogram, "", text, ("outcome",), buckets=TTFT_BUCKETS)
        for outcome in (*Outcome, ABORTED):
            self.seconds.labels(outcome)

    def observe(self, entry: Entry) -> None:
        """Count a request that ended, if it has a first token."""
        if entry.ttft_s is not None:
            self.seconds.labels(entry.outcome).observe(entry.ttft_s)


class EngineSilence(_Metrics):
    """Seconds since the engine last answered the API server.

    Args:
        silent_s: called whenever the metric is read.
    """

    def __init__(self, model_name: str, silent_s: Callable[[], float]) -> None:
        super().__init__(SILENT, model_name)
        self.seconds = self._add(
            Gauge, "", "Seconds since the engine last answered the API server."
        )
        self.seconds.set_function(silent_s)


class GuardMetrics(_Metrics):
    """Distances of scored answers, and the state of the guard."""

    def __init__(self, model_name: str) -> None:
        super().__init__(GUARD, model_name)
        add, by_depth = self._add, ("policy", "depth")
        self.approximate = add(
            Counter, "approximate_total", "Answers on approximate KV.", ("policy",)
        )
        text = f"Answers chosen to be scored, by what became of it: {', '.join(OUTCOMES)}."
        self.answers = add(Counter, "answers_total", text, ("outcome",))
        for outcome in OUTCOMES:
            self.answers.labels(outcome)
        self.waiting = add(Gauge, "waiting", "Answers that wait to be scored, or are being scored.")
        self.tokens = add(Counter, "tokens_total", "Tokens computed to score answers.")

        text = "KL from exact KV along an answer, nats."
        self.kl = add(Histogram, "kl", text, by_depth, buckets=KL_BUCKETS)
        text = "Share of an answer's tokens of which exact KV would have preferred another."
        self.flips = add(Histogram, "flips", text, by_depth, buckets=FLIP_BUCKETS)
        text = "How much likelier the answer's tokens were than on exact KV, mean, nats."
        self.loglik = add(Histogram, "loglik", text, by_depth, buckets=LOGLIK_BUCKETS)

        self.noise = add(
            Gauge, "order_noise", "KL of the profile's order noise, nats; 0: not known."
        )
        text = "Bounds at 95 % of the mean of flips, and of KL in nats."
        self.bounds = add(Gauge, "bound", text, ("policy", "measure", "side"))
        text = "0: as asked, 1: with a larger budget, 2: exact."
        self.level = add(Gauge, "level", text, ("policy",))
        text = "Changes of that level, and trials that failed."
        self.transitions = add(Counter, "transitions_total", text, ("policy", "level", "reason"))

    def observe(self, policy: str, depth: int, distances: Mapping[str, float]) -> None:
        """Count a scored answer; `distances` are those of `along_logprobs`."""
        # from the first answer on, so that an increase over time sees the first alarm
        for level, reason in product(Level, REASONS):
            self.transitions.labels(policy, level.name.lower(), reason)
        labels = policy, depth_name(depth)
        self.kl.labels(*labels).observe(distances["answer_kl"])
        self.flips.labels(*labels).observe(distances["flips"])
        self.loglik.labels(*labels).observe(distances["loglik"])

    def bound(self, policy: str, known: Mapping[str, Any]) -> None:
        """Export the bounds of a policy; `known` is its entry in `Guard.view`."""
        for measure, found in known.get("as_asked", {}).items():
            if measure != "answers":
                for side in ("low", "high"):
                    self.bounds.labels(policy, measure, side).set(found[side])
