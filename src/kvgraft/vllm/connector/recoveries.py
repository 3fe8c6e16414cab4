"""Recoveries that the workers do for requests: start, cancel and end."""

from collections.abc import Collection, Sequence

import numpy as np

from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.prefix_lookup import HashMasking, PromptTruncation
from kvgraft.vllm.connector.reporting import Reporting
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.recovery import Job, RecoveryResult


class Recoveries:
    """Recoveries under way, as the scheduler side sees them.

    While a recovery runs, the blocks that it grafts from are pinned. Only its own request uses the
    blocks that it recovers in place.
    """

    def __init__(
        self,
        known: Planner,
        masking: HashMasking,
        shorter_prompts: PromptTruncation,
        reporting: Reporting,
    ) -> None:
        self._known, self._masking = known, masking
        self._shorter_prompts, self._reporting = shorter_prompts, reporting
        # pages that a recovery rewrites in place
        self._rewritten: set[int] = set()
        self._jobs: list[Job] = []
        self._cancelled: set[str] = set()

    def rewrites(self, pages: Collection[int]) -> bool:
        """Return True if a page is being recovered in place, so that other requests must wait."""
        return not self._rewritten.isdisjoint(pages)

    def start(
        self, state: RequestState, candidate: Candidate, block_ids: Sequence[list[int]]
    ) -> None:
        """Queue a recovery for the workers, and mask its approximate blocks.

        Args:
            candidate: the admitted plan, whose sources are pinned.
            block_ids: blocks of the request, by KV cache group.
        """
        request, options = state.request, state.options
        if not isinstance(options, RequestOptions):
            raise TypeError("a control request never grafts")

        state.recovery, state.plan, sources = candidate, candidate.plan, candidate.sources

        # vLLM's own statistics would count the whole prompt as loaded.
        if request.prefill_stats is not None and not request.num_preemptions:
            num_grafted = int((candidate.plan.grafted & ~candidate.plan.in_place).sum())
            request.prefill_stats.set(state.prompt_tokens, candidate.num_prefix, num_grafted)

        if not state.is_trial:
            self._known.pool.hit_counts[sources] += 1

        self._rewritten.update(candidate.in_place)
        if candidate.steps:
            self._masking.mask(state, candidate.steps[0][0])
            state.offer.mark_approximate(candidate.steps, candidate.spans)

        tokens = np.array(state.token_ids, np.int64)
        tables = self._known.groups.tables(block_ids, candidate.reserved)
        pages = np.array([self._known.pool.by_group(page) for page in sources], np.int64).reshape(
            -1, len(tables)
        )
        rest = state.documents, state.offer.scope, state.adapter, state.kept
        self._jobs.append(
            Job(state.id, options.policy, candidate.plan, tokens, tables, pages, *rest)
        )

    def cancel(self, state: RequestState) -> None:
        """Cancel the recovery of an aborted request.

        Its blocks and sources stay until the workers end it.
        """
        self._cancelled.add(state.id)

    def take_orders(self) -> tuple[list[Job], set[str]]:
        """Return what the workers do not have yet: new jobs, and ids of requests to cancel."""
        orders = self._jobs, self._cancelled
        self._jobs, self._cancelled = [], set()
        return orders

    def end(self, state: RequestState, outcome: RecoveryResult) -> None:
        """End a recovery and unpin its sources.

        If it failed, the request becomes an ordinary one again.
        """
        candidate, state.recovery = state.recovery, None
        if candidate is not None:
            if outcome.failure is None and not state.finished:
                self._known.groups.keep(candidate.reserved, state.request)
            self._known.release(candidate)

        in_place = () if candidate is None else candidate.in_place
        self._rewritten.difference_update(in_place)
        if outcome.failure is not None and in_place:
            self._known.pool.forget(in_place)
            state.continued = None

        if state.finished:
            self._masking.release(state)
            self._reporting.aborted()
        elif outcome.failure is not None:
            self._failed(state, outcome.failure)
        else:
            if outcome.kept is not None:
                self._shorter_prompts.settle(state, outcome.kept)
            self._reporting.recovered(state, candidate, outcome)
            if candidate is not None and not state.whole:
                self._learn(state, candidate, outcome)

    def _failed(self, state: RequestState, reason: str) -> None:
        """Fall back to computing the whole prompt.

        This includes the prompt of a preempted request whose first recovery succeeded.
        """
        state.refusal = state.reason = reason
        state.plan = None
        if state.whole:
            self._shorter_prompts.restore(state, reason)
        else:
            self._masking.unmask(state)
        self._reporting.failed(state)

    def _learn(self, state: RequestState, candidate: Candidate, outcome: RecoveryResult) -> None:
        """Update the cost model with the share of tokens that the policy has recomputed."""
        plan, num_new = candidate.plan, int(candidate.plan.fresh.sum())
        num_recovered = outcome.computed_share * plan.num_tokens - num_new
        self._known.cost_model.learn(
            state.policy_name, num_recovered, int(plan.grafted.sum()), num_new
        )
