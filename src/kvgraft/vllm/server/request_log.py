"""What became of recent requests, per tenant: figures only, never text."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvgraft.prefill.report import Outcome
from kvgraft.vllm.options import KEY, ServedReport
from kvgraft.vllm.server.tenancy import Principal, Tenant

RECENT = 50  # requests kept per tenant
ABORTED = "aborted"  # the outcome of a request that its client left, or in which the engine failed
KINDS = ("prefix", "continued", "grafted", "recomputed", "fresh")


@dataclass(frozen=True)
class Entry:
    """One request that ended.

    Attributes:
        ended_at: Unix time in seconds.
        outcome: as in the report (`Outcome`), or `ABORTED`.
        ttft_s: seconds from the arrival at the engine client to the first token, if there was one.
        tokens: of the prompt, by kind; `recomputed` are among `grafted`.
        spans: [start, stop, kind] of the prompt.
        reason: why nothing was grafted.
        guard: as in the report. `scored`: its distances from exact KV (`along_logprobs`), once they
            are known.
    """

    ended_at: float
    tenant: str
    route: str
    outcome: str
    policy: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    spans: Sequence[Sequence[int | str]] = ()
    reason: str | None = None
    guard: str | None = None
    scored: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tenant: Tenant, route: str, output: Any, scored: Mapping[str, float] | None = None
    ) -> "Entry":
        """From the engine's last `RequestOutput`, or None if the request was aborted before it."""
        if output is None:
            return cls(time.time(), tenant.label, route, ABORTED)
        given = (output.kv_transfer_params or {}).get(KEY)
        report, metrics = ServedReport(**given) if given else _bare_report(output), output.metrics
        return cls(
            time.time(),
            tenant.label,
            route,
            report.outcome,
            report.policy,
            report.prompt_tokens,
            metrics.num_generation_tokens if metrics else 0,
            metrics.first_token_latency if metrics else None,
            {kind: getattr(report, f"{kind}_tokens") for kind in KINDS},
            report.spans,
            report.reason,
            report.guard,
            {} if scored is None else scored,
        )


class RequestLog:
    """The last requests of every tenant, and sums over all of its requests.

    Attributes:
        on_entry: called with each request that ended.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self.on_entry: Callable[[Entry], None] = lambda _: None
        self._recent: dict[str, deque[Entry]] = {}
        self._sums: dict[str, Counter[tuple[str, str]]] = {}
        for tenant in tenants:
            self._open(tenant.label)

    def add(self, entry: Entry) -> None:
        """Enter a request that ended."""
        self.on_entry(entry)
        self._open(entry.tenant)
        self._recent[entry.tenant].append(entry)
        sums = self._sums[entry.tenant]
        sums["requests", entry.outcome] += 1
        for kind, count in entry.tokens.items():
            sums["tokens", kind] += count
        if entry.reason and entry.outcome != Outcome.PREFIX_ONLY:  # a prefix hit is no miss
            sums["misses", entry.reason] += 1

    def view(self, principal: Principal) -> dict[str, Any]:
        """What this caller may see: its own requests, or those of all for the admin; the latest
        first."""
        labels = list(self._recent) if principal.is_admin else [principal.tenant.label]
        recent = sorted(
            (e for label in labels for e in self._recent.get(label, ())), key=lambda e: -e.ended_at
        )
        sums: Counter[tuple[str, str]] = sum(
            (self._sums.get(label, Counter()) for label in labels), Counter()
        )
        totals: dict[str, dict[str, int]] = {
            "requests": {},
            "tokens": dict.fromkeys(KINDS, 0),
            "misses": {},
        }
        for (group, name), count in sums.items():
            totals[group][name] = count
        return {"recent": [asdict(entry) for entry in recent[:RECENT]], "totals": totals}

    def _open(self, label: str) -> None:
        self._recent.setdefault(label, deque(maxlen=RECENT))
        self._sums.setdefault(label, Counter())


def _bare_report(output: Any) -> ServedReport:
    """What vLLM itself knows of a request about which the engine reported nothing, as when it
    failed."""
    total, prefix = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
    spans: list[list[int | str]] = [[0, prefix, "prefix"]] if prefix else []
    spans.append([prefix, total, "fresh"])
    report = ServedReport(
        prompt_tokens=total, prefix_tokens=prefix, fresh_tokens=total - prefix, spans=spans
    )
    report.conclude(None)
    return report
