"""Reports in responses, and metrics of the requests."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.costs import TOKENS
from kvgraft.core.report import KINDS, Outcome
from kvgraft.vllm.connector.admission import register_blocks
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.patches.reports import may_stop_early, send_ahead, stop_sending
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.recovery import RecoveryResult
from kvgraft.vllm.stats import Stats

logger = logging.getLogger("kvgraft")
# most spans in a report
MAX_SPANS = 64


class Reporting:
    """Fill the reports of requests and count for the metrics.

    `early` sends reports ahead of the last output.

    Args:
        engine: index of this engine, see `ServedReport`.
    """

    def __init__(self, admission: Admission[SharedPool], engine: int) -> None:
        self._admission, self._engine = admission, engine
        self.early = StopStringReports(admission)
        self._stats = Stats()
        # gauge values of the last payload
        self._last_levels: dict[tuple[str, str], float] = {}
        # documents that the workers hold in host memory: bytes and number
        self.documents = (0, 0)

    def admitted(self, state: RequestState, reuse: Reuse | None) -> None:
        """Fill the report of an admitted request, and count its first admission.

        Args:
            reuse: decision of a recovery that has succeeded; None for a request without grafts.
        """
        report, options, request = state.report, state.options, state.request
        report.engine = self._engine
        num_prompt = state.prompt_tokens
        num_prefix = request.prefill_stats.num_local_cached_tokens if request.prefill_stats else 0
        if reuse is not None:
            num_prefix = reuse.num_known

        spans = _spans(reuse, num_prompt, num_prefix)
        if state.continued is not None:
            size = self._admission.pool.block_size
            spans = list(_continued(spans, state.continued.first_block * size))

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
        report.depth = state.provenance.depth
        report.conclude(state.reason)

        chosen = None if reuse is None else state.recovers_by
        report.recovered_by = None if chosen is None else str(chosen)
        if reuse is None:
            report.computed_share, report.recomputed_tokens, report.counts = (
                report.fresh_tokens / num_prompt,
                0,
                {},
            )

        # Control operations are not requests of clients, so they are not counted.
        if not state.is_counted and isinstance(options, RequestOptions):
            self._count(state)

        state.is_counted = True

    def recovered(self, state: RequestState, reuse: Reuse | None, outcome: RecoveryResult) -> None:
        """Report and count a successful recovery."""
        self.admitted(state, reuse)
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
        """Report and count a recovery that failed for `state.reason`.

        A preempted request may be counted already; then only the fallback is added.
        """
        if state.is_counted:
            logger.warning("request %s goes on computed in full: %s", state.id, state.reason)
            self._stats.add("kvgraft:fallbacks_total", state.reason or "unknown")
        state.report.kept_tokens = None
        self.admitted(state, None)

    def aborted(self) -> None:
        """Count a graft whose client left before the recovery was done."""
        self._stats.add("kvgraft:fallbacks_total", "aborted")

    def idle_refresh(self, num_tokens: int) -> None:
        """Count tokens that the idle refresh has computed."""
        self._stats.add("kvgraft:idle_refresh_tokens_total", "", num_tokens)

    def stored(self, counts: Mapping[str, int]) -> None:
        """Count events of the workers' stores."""
        for event, count in counts.items():
            self._stats.add("kvgraft:store_total", event, count)

    def take(self) -> Stats | None:
        """Return the metrics since the last call, or None if nothing has changed."""
        self.early.end_of_step()
        stats, self._stats = self._stats, Stats()
        levels = self._levels()
        if stats.is_empty() and levels == self._last_levels:
            return None
        for (metric, label), value in levels.items():
            stats.level(metric, label, value)
        self._last_levels = levels
        return stats

    def _levels(self) -> dict[tuple[str, str], float]:
        """Return the current values of the gauges, by metric and label."""
        admission, (num_bytes, num_documents) = self._admission, self.documents
        pool, pins, model = admission.pool, admission.pins, admission.cost_model

        # `TOKENS` counts tokens instead of seconds, so it does not fit the gauge.
        costs = {} if model is None or model.costs == TOKENS else asdict(model.costs)
        return {
            ("kvgraft:pool_blocks", "used"): pool.num_used,
            ("kvgraft:pool_blocks", "free"): pool.num_free,
            ("kvgraft:pool_blocks", "pinned"): len(pins.pages),
            ("kvgraft:pinned_documents", ""): len(pins),
            ("kvgraft:index_entries", ""): len(admission.index),
            ("kvgraft:documents", ""): num_documents,
            ("kvgraft:document_bytes", ""): num_bytes,
            **{
                ("kvgraft:cost_seconds", name.removesuffix("_s")): seconds
                for name, seconds in costs.items()
            },
        }

    def _count(self, state: RequestState) -> None:
        """Count a request, its tokens and its outcome."""
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
    """Split the prefix spans at the first approximate token.

    Behind it they are of kind `continued`.
    """
    for start, stop, kind in spans:
        if kind == "prefix" and stop > first:
            yield from ((start, first, kind), (max(start, first), stop, "continued"))[
                start >= first :
            ]
        else:
            yield start, stop, kind


def _spans(reuse: Reuse | None, num_prompt: int, num_prefix: int) -> list[tuple[int, int, str]]:
    """Return the (start, stop, kind) spans of a prompt.

    A plan may reach beyond the prompt, to tokens that were generated before a preemption.
    """
    found = [(0, num_prefix, "prefix")]
    if reuse is not None:
        [spans] = reuse.plan.spans
        found += [
            (max(s.start, num_prefix), min(s.stop, num_prompt), s.kind.name.lower()) for s in spans
        ]
    else:
        found += [(num_prefix, num_prompt, "fresh")]
    return [span for span in found if span[0] < span[1]]


class StopStringReports:
    """Send the reports of requests with stop strings early, with the first generated token.

    vLLM's front end ends such answers itself, so the engine's final report would be lost (see
    `patches.reports`).

    Args:
        admission: registers the prompt's blocks before the report counts them.
    """

    def __init__(self, admission: Admission[SharedPool]) -> None:
        self._admission = admission
        # by request id: the state, and the number of tokens generated before
        self._due: dict[str, tuple[RequestState, int]] = {}

    def add(self, state: RequestState) -> None:
        """Queue the request's report for its next output if a stop string may end its answer."""
        if may_stop_early(state.request):
            self._due[state.id] = state, state.request.num_output_tokens

    def send(
        self,
        num_scheduled: Mapping[str, int],
        blocks_of: Callable[[RequestState], list[int]],
    ) -> None:
        """Attach reports to requests whose prompt this step completes: they output a token now."""
        for state, _ in self._due.values():
            request = state.request
            computed = request.num_computed_tokens + num_scheduled.get(state.id, 0)
            if computed < request.num_prompt_tokens:
                continue
            if not state.whole:
                blocks = blocks_of(state)
                register_blocks(self._admission, state, blocks, request.num_prompt_tokens)
            state.report.registered_blocks = state.provenance.num_entries
            send_ahead(request, state.report.as_params())

    def end_of_step(self) -> None:
        """Drop the reports that went out with the outputs of this step."""
        for state, before in list(self._due.values()):
            if state.request.num_output_tokens > before:
                self.drop(state)

    def drop(self, state: RequestState) -> None:
        """Stop sending the report of a request: it has been sent, or no client waits for it."""
        if self._due.pop(state.id, None) is not None:
            stop_sending(state.request)
