"""The guard's Prometheus metrics."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvgraft.segments.matches import depth_name

GUARD = "kvgraft:guard_"
KL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # nats
FLIP_BUCKETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LOGLIK_BUCKETS = (-3.0, -1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0)  # nats
OUTCOMES = ("scored", "dropped", "failed", "empty")


class GuardMetrics:
    """Under `kvgraft:guard_`, in the registry of the API server; of all tenants together."""

    def __init__(self) -> None:
        for collector in {one for name, one in REGISTRY._names_to_collectors.items() if name.startswith(GUARD)}:
            REGISTRY.unregister(collector)  # of an earlier engine of this process
        self.approximate = Counter(f"{GUARD}approximate_total", "Answers on approximate KV.", ["policy"])
        self.answers = Counter(
            f"{GUARD}answers_total",
            f"Answers chosen to be scored, by what became of it: {', '.join(OUTCOMES)}.",
            ["outcome"],
        )
        for outcome in OUTCOMES:
            self.answers.labels(outcome)
        self.waiting = Gauge(f"{GUARD}waiting", "Answers that wait to be scored, or are being scored.")
        self.tokens = Counter(f"{GUARD}tokens_total", "Tokens computed to score answers.")
        self.kl = Histogram(
            f"{GUARD}kl", "KL from exact KV along an answer, nats.", ["policy", "depth"], buckets=KL_BUCKETS
        )
        self.flips = Histogram(
            f"{GUARD}flips", "Share of an answer's tokens of which exact KV would have preferred another.",
            ["policy", "depth"], buckets=FLIP_BUCKETS,
        )  # fmt: skip
        self.loglik = Histogram(
            f"{GUARD}loglik", "How much likelier the answer's tokens were than on exact KV, mean, nats.",
            ["policy", "depth"], buckets=LOGLIK_BUCKETS,
        )  # fmt: skip
        self.noise = Gauge(f"{GUARD}order_noise", "KL of the profile's order noise, nats; 0: not known.")
        self.bounds = Gauge(
            f"{GUARD}bound", "Bounds at 95 % of the mean of flips, and of KL in nats.", ["policy", "measure", "side"]
        )
        self.level = Gauge(f"{GUARD}level", "0: as asked, 1: with a larger budget, 2: exact.", ["policy"])
        self.transitions = Counter(
            f"{GUARD}transitions_total", "Changes of that level, and trials that failed.", ["policy", "level", "reason"]
        )

    def observe(self, policy: str, depth: int, distances: Mapping[str, float]) -> None:
        """An answer has been scored; `distances` as `distances.along`."""
        labels = policy, depth_name(depth)
        self.kl.labels(*labels).observe(distances["answer_kl"])
        self.flips.labels(*labels).observe(distances["flips"])
        self.loglik.labels(*labels).observe(distances["loglik"])

    def bound(self, policy: str, known: Mapping[str, Any]) -> None:
        """What is known of a policy, see `Guard.view`."""
        for measure, found in known.get("as_asked", {}).items():
            if measure != "answers":
                for side in ("low", "high"):
                    self.bounds.labels(policy, measure, side).set(found[side])
