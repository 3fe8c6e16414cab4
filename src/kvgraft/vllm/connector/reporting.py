"""What responses and metrics say of the requests."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict

from kvgraft.prefill.costs import TOKENS
from kvgraft.prefill.report import KINDS, Outcome
from kvgraft.vllm.compat.reports import may_stop_early, send_ahead, stop_sending
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.recovery import RecoveryResult
from kvgraft.vllm.stats import Stats

logger = logging.getLogger("kvgraft")
MAX_SPANS = 64  # of a report


class Reporting:
    """Fills the requests' reports and counts for the metrics."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stats = Stats()
        self._told: dict[tuple[str, str], float] = {}  # levels
        self.documents = (0, 0)  # that the workers hold in host memory: bytes, how many

    def admitted(self, state: RequestState, candidate: Candidate | None) -> None:
        """Report an admission (a graft: once it has succeeded), and count the first one."""
        report, options, request = state.report, state.options, state.request
        num_prompt = state.prompt_tokens
        num_prefix = request.prefill_stats.num_local_cached_tokens if request.prefill_stats else 0
        if candidate is not None:
            num_prefix = candidate.num_prefix
        spans = _spans(candidate, num_prompt, num_prefix)
        if state.continued is not None:
            spans = list(_continued(spans, state.continued.first_block * self._block_size))
        if isinstance(options, RequestOptions):
            report.policy, report.profile = str(options.policy), options.profile
        else:
            report.policy = options.op
        report.prompt_tokens = num_prompt
        (
            report.prefix_tokens,
            report.continued_tokens,
            report.grafted_tokens,
            report.fresh_tokens,
        ) = (sum(stop - start for start, stop, kind in spans if kind == wanted) for wanted in KINDS)
        report.spans = [list(span) for span in spans[:MAX_SPANS]]
        report.depth = state.offer.depth
        report.conclude(state.reason)
        if candidate is None:
            report.computed_share, report.recomputed_tokens, report.counts = (
                report.fresh_tokens / num_prompt,
                0,
                {},
            )
        # others are our own operations
        if not state.is_counted and isinstance(options, RequestOptions):
            self._count(state)
        state.is_counted = True

    def recovered(
        self, state: RequestState, candidate: Candidate | None, outcome: RecoveryResult
    ) -> None:
        """A graft has succeeded."""
        self.admitted(state, candidate)
        report = state.report
        report.recomputed_tokens, report.computed_share = (
            outcome.recomputed_tokens,
            outcome.computed_share,
        )
        report.stages |= outcome.stages
        report.kept_tokens = state.request.num_prompt_tokens if state.whole else None
        report.counts = outcome.counts
        if state.is_trial:
            return
        if outcome.counts.get("rejected_tokens"):
            self._stats.add("kvgraft:fallbacks_total", "probe")
        self._stats.add("kvgraft:tokens_total", "recomputed", outcome.recomputed_tokens)
        for stage, seconds in report.stages.items():
            self._stats.observe("kvgraft:stage_seconds", stage, seconds)

    def failed(self, state: RequestState) -> None:
        """A recovery has failed for `state.reason`: that of a request which was preempted fails
        beside what it has been counted as."""
        if state.is_counted:
            logger.warning("request %s goes on computed in full: %s", state.id, state.reason)
            self._stats.add("kvgraft:fallbacks_total", state.reason or "unknown")
        state.report.kept_tokens = None
        self.admitted(state, None)

    def aborted(self) -> None:
        """The client of a graft has left before it was done."""
        self._stats.add("kvgraft:fallbacks_total", "aborted")

    def idle_refresh(self, num_tokens: int) -> None:
        """So many tokens were computed while no request ran."""
        self._stats.add("kvgraft:idle_refresh_tokens_total", "", num_tokens)

    def stored(self, counts: Mapping[str, int]) -> None:
        """What the workers' stores have done."""
        for event, count in counts.items():
            self._stats.add("kvgraft:store_total", event, count)

    def take(self, known: Planner) -> Stats | None:
        """What happened since the last call."""
        stats, self._stats = self._stats, Stats()
        levels = self._levels(known)
        if stats.is_empty() and levels == self._told:
            return None
        for (metric, label), value in levels.items():
            stats.level(metric, label, value)
        self._told = levels
        return stats

    def _levels(self, known: Planner) -> dict[tuple[str, str], float]:
        """What the gauges show now, by metric and label."""
        pool, (num_bytes, num_documents) = known.pool, self.documents
        # which is in no seconds
        costs = {} if known.cost_model.costs == TOKENS else asdict(known.cost_model.costs)
        return {
            ("kvgraft:pool_blocks", "used"): pool.num_used,
            ("kvgraft:pool_blocks", "free"): pool.num_free,
            ("kvgraft:pool_blocks", "pinned"): len(known.pins.pages),
            ("kvgraft:pinned_documents", ""): len(known.pins),
            ("kvgraft:index_entries", ""): len(known.index),
            ("kvgraft:documents", ""): num_documents,
            ("kvgraft:document_bytes", ""): num_bytes,
            **{
                ("kvgraft:cost_seconds", name.removesuffix("_s")): seconds
                for name, seconds in costs.items()
            },
        }

    def _count(self, state: RequestState) -> None:
        report = state.report
        if report.outcome == Outcome.FALLBACK:
            logger.warning("request %s is computed in full: %s", state.id, report.reason)
            self._stats.add("kvgraft:fallbacks_total", report.reason or "unknown")
        elif report.outcome in (Outcome.MISS, Outcome.OFF):
            self._stats.add("kvgraft:misses_total", report.reason or "unknown")
        self._stats.add("kvgraft:requests_total", report.outcome)
        if (
            report.shadow_graftable_tokens
            and report.estimated_full_s is not None
            and report.estimated_reuse_s is not None
        ):
            saved = report.estimated_full_s - report.estimated_reuse_s
            self._stats.add(
                "kvgraft:shadow_graftable_tokens_total", "", report.shadow_graftable_tokens
            )
            self._stats.add("kvgraft:shadow_saved_seconds_total", "", saved)
        if report.too_deep_tokens:
            self._stats.add("kvgraft:too_deep_tokens_total", "", report.too_deep_tokens)
        for kind in KINDS:
            self._stats.add("kvgraft:tokens_total", kind, getattr(report, f"{kind}_tokens"))


def _continued(spans: Iterable[tuple[int, int, str]], first: int) -> Iterator[tuple[int, int, str]]:
    """What the spans say is prefix, from the first token on that is not exact: an earlier
    prompt's."""
    for start, stop, kind in spans:
        if kind == "prefix" and stop > first:
            yield from ((start, first, kind), (max(start, first), stop, "continued"))[
                start >= first :
            ]
        else:
            yield start, stop, kind


def _spans(
    candidate: Candidate | None, num_prompt: int, num_prefix: int
) -> list[tuple[int, int, str]]:
    """(start, stop, kind) of the prompt; a plan may go on to tokens that were generated before a
    preemption."""
    found = [(0, num_prefix, "prefix")]
    if candidate is not None:
        [spans] = candidate.plan.spans
        found += [
            (max(s.start, num_prefix), min(s.stop, num_prompt), s.kind.name.lower()) for s in spans
        ]
    else:
        found += [(num_prefix, num_prompt, "fresh")]
    return [span for span in found if span[0] < span[1]]


class StopStringReports:
    """Sends each of them with the first tokens behind the prompt.

    Args:
        known: where the prompt's blocks are named, so that the report can count them.
    """

    def __init__(self, known: Planner) -> None:
        self._known = known
        self._due: dict[str, tuple[RequestState, int]] = {}  # with the tokens generated before

    def add(self, state: RequestState) -> None:
        """A request's report says from now on how it was admitted."""
        if may_stop_early(state.request):
            self._due[state.id] = state, state.request.num_output_tokens

    def send(self, num_scheduled: Mapping[str, int], blocks_of: Callable[[str], list[int]]) -> None:
        """A step was scheduled: what completes a prompt gives a token."""
        for state, _ in self._due.values():
            request = state.request
            computed = request.num_computed_tokens + num_scheduled.get(state.id, 0)
            if computed < request.num_prompt_tokens:
                continue
            if not state.whole:
                self._known.offer(state, blocks_of(state.id), request.num_prompt_tokens)
            state.report.registered_blocks = state.offer.num_entries
            send_ahead(request, state.report.as_params())

    def end_of_step(self) -> None:
        """The outputs of a step have been made: those that had a token had the report."""
        for state, before in list(self._due.values()):
            if state.request.num_output_tokens > before:
                self.drop(state)

    def drop(self, state: RequestState) -> None:
        """It has been sent, or nobody waits for it."""
        if self._due.pop(state.id, None) is not None:
            stop_sending(state.request)
