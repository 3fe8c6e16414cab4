"""What responses and metrics say of the requests."""

import logging
from collections.abc import Mapping

from kvgraft.vllm.connector.known import KnownText
from kvgraft.vllm.connector.tracked import Candidate, Tracked
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.recovery import Outcome
from kvgraft.vllm.stats import Stats

logger = logging.getLogger("kvgraft")
MAX_SPANS = 64  # of a report
KINDS = ("prefix", "grafted", "fresh")
FALLBACKS = ("pool_pressure", "non_finite", "error")  # reasons why grafts that were found were given up


class Accounts:
    """Fills the requests' reports and counts for the metrics."""

    def __init__(self) -> None:
        self._stats = Stats()
        self._told: dict[tuple[str, str], int] = {}  # levels
        self.documents = (0, 0)  # that the workers hold in host memory: bytes, how many

    def admitted(self, tracked: Tracked, candidate: Candidate | None) -> None:
        """Report an admission (a graft: once it has succeeded), and count the first one."""
        report, options, request = tracked.report, tracked.options, tracked.request
        num_prompt = tracked.prompt_tokens
        num_prefix = request.prefill_stats.num_local_cached_tokens if request.prefill_stats else 0
        spans = _spans(candidate, num_prompt, num_prefix)
        report.policy = str(options.policy) if isinstance(options, RequestOptions) else options.op
        report.prompt_tokens, report.reason = num_prompt, tracked.reason
        report.prefix_tokens, report.grafted_tokens, report.fresh_tokens = (
            sum(stop - start for start, stop, kind in spans if kind == wanted) for wanted in KINDS
        )
        report.spans = [list(span) for span in spans[:MAX_SPANS]]
        if candidate is None:
            report.computed_share, report.recomputed_tokens = report.fresh_tokens / num_prompt, 0
        if not tracked.accounted and isinstance(options, RequestOptions):  # others are our own operations
            self._count(tracked, candidate is not None)
        tracked.accounted = True

    def recovered(self, tracked: Tracked, candidate: Candidate | None, outcome: Outcome) -> None:
        """A graft has succeeded."""
        self.admitted(tracked, candidate)
        report = tracked.report
        report.recomputed_tokens, report.computed_share = outcome.recomputed_tokens, outcome.computed_share
        report.stages |= outcome.stages
        report.kept_tokens = outcome.kept_tokens
        self._stats.add("kvgraft:tokens_total", "recomputed", outcome.recomputed_tokens)
        for stage, seconds in report.stages.items():
            self._stats.observe("kvgraft:stage_seconds", stage, seconds)

    def aborted(self) -> None:
        """The client of a graft has left before it was done."""
        self._stats.add("kvgraft:fallbacks_total", "aborted")

    def stored(self, counts: Mapping[str, int]) -> None:
        """What the workers' stores have done."""
        for event, count in counts.items():
            self._stats.add("kvgraft:store_total", event, count)

    def take(self, known: KnownText) -> Stats | None:
        """What happened since the last call."""
        stats, self._stats = self._stats, Stats()
        levels = self._levels(known)
        if stats.is_empty() and levels == self._told:
            return None
        for (metric, label), value in levels.items():
            stats.level(metric, label, value)
        self._told = levels
        return stats

    def _levels(self, known: KnownText) -> dict[tuple[str, str], int]:
        """What the gauges show now, by metric and label."""
        pool, (num_bytes, num_documents) = known.pool, self.documents
        return {
            ("kvgraft:pool_blocks", "used"): pool.num_used,
            ("kvgraft:pool_blocks", "free"): pool.num_free,
            ("kvgraft:pool_blocks", "frozen"): len(known.frozen.pages),
            ("kvgraft:frozen_segments", ""): len(known.frozen),
            ("kvgraft:index_entries", ""): len(known.index),
            ("kvgraft:documents", ""): num_documents,
            ("kvgraft:document_bytes", ""): num_bytes,
        }

    def _count(self, tracked: Tracked, grafted: bool) -> None:
        report, reason = tracked.report, tracked.reason or "unknown"
        if not grafted:
            if reason in FALLBACKS:
                logger.warning("request %s is computed in full: %s", tracked.id, reason)
                self._stats.add("kvgraft:fallbacks_total", reason)
            else:
                self._stats.add("kvgraft:misses_total", reason)
        off = tracked.refusal is not None and reason not in FALLBACKS
        outcome = "grafted" if grafted else "off" if off else "prefix_only" if report.prefix_tokens else "miss"
        self._stats.add("kvgraft:requests_total", outcome)
        for kind in KINDS:
            self._stats.add("kvgraft:tokens_total", kind, getattr(report, f"{kind}_tokens"))


def _spans(candidate: Candidate | None, num_prompt: int, num_prefix: int) -> list[tuple[int, int, str]]:
    """(start, stop, kind) of the prompt; a plan may go on to tokens that were generated before a preemption."""
    if candidate is not None:
        [spans] = candidate.plan.spans
        found = [(span.start, min(span.stop, num_prompt), span.kind.name.lower()) for span in spans]
    else:
        found = [(0, num_prefix, "prefix"), (num_prefix, num_prompt, "fresh")]
    return [span for span in found if span[0] < span[1]]
