"""Log of recent requests per tenant. It holds figures only, never text."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvgraft.core.report import Outcome
from kvgraft.server.tenancy import Principal, Tenant
from kvgraft.vllm.options import KEY, ServedReport

# requests kept per tenant
RECENT = 50
# outcome if the client disconnected or the engine failed
ABORTED = "aborted"
KINDS = ("prefix", "continued", "grafted", "recomputed", "fresh")


@dataclass(frozen=True)
class Entry:
    """Log entry of one request that ended.

    Attributes:
        ended_at: Unix time in seconds.
        tenant: name of the tenant.
        route: path of the HTTP request.
        outcome: the report's outcome (`Outcome`), or `ABORTED`.
        ttft_s: seconds from arrival at the engine client to the first token; None without a token.
        tokens: prompt tokens by kind; `recomputed` tokens are also counted as `grafted`.
        spans: [start, stop, kind] of the prompt.
        reason: why nothing was grafted, or None.
        guard: the guard's field in the report.
        scored: the answer's distances from exact KV (`along_logprobs`), once they are known.
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
        """Return the entry of a request from the engine's last `RequestOutput`.

        Args:
            output: None if the request was aborted before its last output.
            scored: dictionary that receives the guard's distances later.
        """
        if output is None:
            return cls(time.time(), tenant.name, route, ABORTED)

        given = (output.kv_transfer_params or {}).get(KEY)
        report, metrics = ServedReport(**given) if given else _bare_report(output), output.metrics
        return cls(
            time.time(),
            tenant.name,
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
    """The last requests of every tenant, and sums over all requests.

    Attributes:
        on_entry: called with the entry of each request that ended.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self.on_entry: Callable[[Entry], None] = lambda _: None
        self._recent: dict[str, deque[Entry]] = {}
        self._sums: dict[str, Counter[tuple[str, str]]] = {}
        for tenant in tenants:
            self._open(tenant.name)

    def add(self, entry: Entry) -> None:
        """Add the entry of a request that ended."""
        self.on_entry(entry)
        self._open(entry.tenant)
        self._recent[entry.tenant].append(entry)

        sums = self._sums[entry.tenant]
        sums["requests", entry.outcome] += 1
        for kind, count in entry.tokens.items():
            sums["tokens", kind] += count
        # a request served from the prefix cache is not a miss
        if entry.reason and entry.outcome != Outcome.PREFIX_ONLY:
            sums["misses", entry.reason] += 1

    def view(self, principal: Principal) -> dict[str, Any]:
        """Return what the caller may see, latest first: its own requests, or those of all for the
        admin."""
        names = list(self._recent) if principal.is_admin else [principal.tenant.name]

        recent = sorted(
            (e for name in names for e in self._recent.get(name, ())), key=lambda e: -e.ended_at
        )

        sums: Counter[tuple[str, str]] = sum(
            (self._sums.get(name, Counter()) for name in names), Counter()
        )
        totals: dict[str, dict[str, int]] = {
            "requests": {},
            "tokens": dict.fromkeys(KINDS, 0),
            "misses": {},
        }
        for (group, name), count in sums.items():
            totals[group][name] = count

        return {"recent": [asdict(entry) for entry in recent[:RECENT]], "totals": totals}

    def _open(self, name: str) -> None:
        """Create the log of a tenant if it does not exist."""
        self._recent.setdefault(name, deque(maxlen=RECENT))
        self._sums.setdefault(name, Counter())


def _bare_report(output: Any) -> ServedReport:
    """Return a report from vLLM's own counts, for a request on which the engine reported nothing.

    This happens, for example, if the request failed.
    """
    total, prefix = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
    spans: list[list[int | str]] = [[0, prefix, "prefix"]] if prefix else []
    spans.append([prefix, total, "fresh"])
    report = ServedReport(
        prompt_tokens=total, prefix_tokens=prefix, fresh_tokens=total - prefix, spans=spans
    )
    report.conclude(None)
    return report
