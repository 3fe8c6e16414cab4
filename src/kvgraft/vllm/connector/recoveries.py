"""Recoveries that the workers do for requests: start, cancel and end."""

from collections.abc import Collection, Sequence

import torch

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.costs import TOKENS
from kvgraft.vllm.connector.metadata import Metadata
from kvgraft.vllm.connector.prefix_lookup import HashMasking, PromptTruncation
from kvgraft.vllm.connector.reporting import Reporting
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.recovery import Job, RecoveryResult


class Recoveries:
    """Recoveries under way, as the scheduler side sees them.

    While a recovery runs, the blocks that it grafts from are pinned. Only its own request uses the
    blocks that it recovers in place.
    """

    def __init__(
        self,
        admission: Admission[SharedPool],
        masking: HashMasking,
        shorter_prompts: PromptTruncation,
        reporting: Reporting,
    ) -> None:
        self._admission, self._masking = admission, masking
        self._shorter_prompts, self._reporting = shorter_prompts, reporting
        # requests whose sources are pinned in this step, before their admission
        self._tentative: list[RequestState] = []
        # pages that a recovery rewrites in place
        self._rewritten: set[int] = set()
        self._jobs: list[Job] = []
        self._cancelled: set[str] = set()
        # True if the next orders tell the workers to forget documents
        self._forgets = False

    def rewrites(self, pages: Collection[int]) -> bool:
        """Return True if a page is being recovered in place, so that other requests must wait."""
        return not self._rewritten.isdisjoint(pages)

    def reserve(self, state: RequestState, reuse: Reuse) -> bool:
        """Reserve pages in groups with windows for a decision with pinned sources.

        Until the end of the step the request may be admitted with it.

        Returns:
            False if the request must wait; then its sources are unpinned.
        """
        pool, num_tokens = self._admission.pool, state.request.num_tokens
        groups = pool.groups
        if self.rewrites(reuse.sources) or (
            groups.others and groups.num_pages(reuse.num_known, num_tokens) > pool.num_free
        ):
            pool.release(reuse.sources)
            return False

        prefix = state.request.block_hashes[: len(reuse.hits)]
        state.reserved = groups.reserve(prefix, num_tokens)
        self._tentative.append(state)
        return True

    def take_reserved(self, state: RequestState) -> Reuse | None:
        """Return the decision that `reserve` has prepared in this step, or None."""
        if state not in self._tentative:
            return None
        self._tentative.remove(state)
        return state.candidate

    def release_unused(self) -> None:
        """Release what was prepared for requests that this step has not admitted."""
        for state in self._tentative:
            self.release(state, state.candidate)
        self._tentative.clear()

    def release(self, state: RequestState, reuse: Reuse | None) -> None:
        """Unpin the sources of a request, and release its reserved pages."""
        self._admission.pool.release([] if reuse is None else reuse.sources)
        self._admission.pool.groups.release(state.reserved)

    def start(self, state: RequestState, reuse: Reuse, block_ids: Sequence[list[int]]) -> None:
        """Queue a recovery for the workers, and mask its approximate blocks.

        Args:
            reuse: the admitted decision, whose sources are pinned.
            block_ids: blocks of the request, by KV cache group.
        """
        request, options, pool = state.request, state.options, self._admission.pool
        if not isinstance(options, RequestOptions):
            raise TypeError("a control request never grafts")

        state.recovery, state.plan, sources = reuse, reuse.plan, reuse.sources

        # vLLM's own statistics would count the whole prompt as loaded.
        if request.prefill_stats is not None and not request.num_preemptions:
            num_grafted = int((reuse.plan.grafted & ~reuse.plan.in_place).sum())
            request.prefill_stats.set(state.prompt_tokens, reuse.num_known, num_grafted)

        if not state.is_trial:
            pool.hit_counts[sources] += 1

        self._rewritten.update(reuse.in_place)
        if reuse.steps:
            self._masking.mask(state, reuse.steps[0][0])
            state.provenance.mark_approximate(reuse.steps, reuse.spans)

        tables = pool.groups.tables(block_ids, state.reserved)
        pages = pool.tables_of(sources).T
        token_ids = state.input_ids
        policy = options.policy.chosen_for(reuse.plan, torch.from_numpy(token_ids))
        state.recovers_by = None if policy is options.policy else policy
        rest = state.documents, state.provenance.scope, state.adapter, state.kept
        self._jobs.append(Job(state.id, policy, reuse.plan, token_ids, tables, pages, *rest))

    def cancel(self, state: RequestState) -> None:
        """Cancel the recovery of an aborted request.

        Its blocks and sources stay until the workers end it.
        """
        self._cancelled.add(state.id)

    def forget_documents(self) -> None:
        """Let the workers forget the documents that they hold."""
        self._forgets = True

    def take_orders(self, spare_tokens: int) -> Metadata:
        """Return the message to the workers, with what they do not know yet.

        Args:
            spare_tokens: tokens that the step has room for, beside those that vLLM has scheduled.
        """
        model = self._admission.cost_model
        costs = TOKENS if model is None else model.costs
        orders = Metadata(self._jobs, self._cancelled, spare_tokens, costs, self._forgets)
        orders.prompts = self._shorter_prompts.take_restored()
        self._jobs, self._cancelled, self._forgets = [], set(), False
        return orders

    def end(self, state: RequestState, outcome: RecoveryResult) -> None:
        """End a recovery and unpin its sources.

        If it failed, the request becomes an ordinary one again.
        """
        reuse, state.recovery = state.recovery, None
        if reuse is not None and outcome.failure is None and not state.finished:
            self._admission.pool.groups.keep(state.reserved, state.request)

        self.release(state, reuse)
        in_place = () if reuse is None else reuse.in_place
        self._rewritten.difference_update(in_place)
        if outcome.failure is not None and in_place:
            self._admission.pool.forget(in_place)
            state.continued = None

        if state.finished:
            self._masking.release(state)
            self._reporting.aborted()
        elif outcome.failure is not None:
            self._failed(state, outcome.failure)
        else:
            if outcome.kept is not None:
                self._shorter_prompts.settle(state, outcome.kept)
            self._reporting.recovered(state, reuse, outcome)
            if reuse is not None:
                self._admission.learn(state, outcome.computed_share * reuse.plan.num_tokens)

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
