"""Scheduler side of the connector: follows each request from arrival until its blocks are freed.

vLLM's scheduler calls these methods of `SchedulerSide` in this order:

1. `on_new_request`: read the request's options and decide if it may reuse KV.
2. `match` (from `get_num_new_matched_tokens`): make a plan of grafts and pin their sources.
3. `admit` (from `update_state_after_alloc`): hand the plan to the workers as a recovery.
4. `end_of_schedule` (from `build_connector_meta`): send the step's jobs to the workers.
5. `on_outcomes` (from `update_connector_output`): end the recoveries that workers report.
6. `finish` (from `request_finished`): register the request's blocks and return its report.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import NEVER, BlockProvenance
from kvgraft.core.segmentation import ANCHORS
from kvgraft.engine.text import anchor_ids
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.compat import before_prefix_lookup, hide_answer, on_cache_reset
from kvgraft.vllm.compat.events import ExactEvents
from kvgraft.vllm.compat.head_maps import find_head_map
from kvgraft.vllm.compat.support import model_identity
from kvgraft.vllm.connector.controls import PinControls, RefreshControls
from kvgraft.vllm.connector.eligibility import RequestAdapters, ReuseEligibility
from kvgraft.vllm.connector.metadata import Metadata, WorkerMetadata
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.prefix_lookup import (
    HashMasking,
    PrefixContinuation,
    PromptTruncation,
    ShadowMode,
)
from kvgraft.vllm.connector.recoveries import Recoveries
from kvgraft.vllm.connector.reporting import Reporting, StopStringReports
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.connector.store_scheduler import StoreScheduler
from kvgraft.vllm.options import KEY, SCORE, TRIAL_OF, Control, RequestOptions
from kvgraft.vllm.recovery import RecoveryResult
from kvgraft.vllm.setting_fields import SHADOW
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.sparse.program import program_of
from kvgraft.vllm.stats import Stats

logger = logging.getLogger("kvgraft")
RUNNING = RequestStatus.RUNNING
# blocks that vLLM may allocate in addition to those of the request
SPARE_BLOCKS = 2


class SchedulerSide:
    """Scheduler-side state of all requests of one engine.

    `known` plans grafts and registers what requests have computed. `stored` is the view of the
    segment store, or None without one. Both exist after `bind`.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.settings = KVGraftSettings.of(config)
        self.known: Planner
        self.stored: StoreScheduler | None
        self._flow = program_of(config)
        self._adapters = RequestAdapters(config)
        self._model = model_identity(config, lasting=self.settings.store is not None)
        self._block_size = int(config.cache_config.block_size)
        self._longest_prompt = config.model_config.max_model_len - 1

        # in blocks
        self._longest = -(-config.model_config.max_model_len // self._block_size)
        num_layers = config.model_config.get_num_layers(config.parallel_config)
        self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._num_ranks = int(config.parallel_config.tensor_parallel_size)
        similar = (
            self.settings.default.match_similar and not config.model_config.skip_tokenizer_init
        )
        self._anchors = (
            anchor_ids(cached_tokenizer_from_config(config.model_config), ANCHORS)
            if similar
            else []
        )

        self._requests: dict[str, RequestState] = {}

        # plans whose sources are pinned in this step, before admission
        self._tentative: dict[str, Candidate] = {}

        # True after `_offer_running` has run in this scheduling step
        self._offered = False

        # True if the next message tells the workers to forget documents
        self._forgets = False

        self.reporting = Reporting(self._block_size)
        residual_layers = self.settings.kept_residual_layers(num_layers)
        self._eligibility = ReuseEligibility(
            self.settings.default,
            config,
            residual_layers,
            has_head_map=find_head_map(config) is not None,
        )

    def bind(self, kv_cache_manager: Any) -> None:
        """Create what needs vLLM's KV cache manager. vLLM calls this once, before any request."""
        self._manager = kv_cache_manager
        share = self._pinned_share(kv_cache_manager.block_pool.num_gpu_blocks - 1)
        capacity = min(self.settings.pin_capacity, share)
        self.known = Planner(
            kv_cache_manager, self._block_size, self.settings, capacity, self._anchors
        )
        is_shared = self.settings.store_shared is not None
        has_store = self.settings.store is not None
        self.stored = (
            StoreScheduler(self.known, self._num_ranks, is_shared=is_shared) if has_store else None
        )

        self._early_reports = StopStringReports(self.known)
        self._masking = HashMasking(kv_cache_manager, self.known.pool, self._block_size)
        self._shadow = ShadowMode(self._masking)
        self._shorter_prompts = PromptTruncation(self.known, self._masking)
        self._recoveries = Recoveries(
            self.known, self._masking, self._shorter_prompts, self.reporting
        )
        self._controls = PinControls(self.known.pool, self.known.pins, self._block_size)
        self._refresh = RefreshControls(
            self.known, self.reporting, self.settings.idle_refresh, self._longest_prompt
        )
        ExactEvents(kv_cache_manager.block_pool, self._first_hidden)
        self._continuation = PrefixContinuation(self.known, self._masking)
        before_prefix_lookup(kv_cache_manager, self._before_lookup)
        on_cache_reset(kv_cache_manager, self.forget)

    def forget(self) -> bool:
        """Forget pinned text and documents, because they may come from old weights.

        Returns:
            False while requests run or are recovered. Then nothing is forgotten.
        """
        if not self.known.clear():
            return False

        self._forgets = True
        self._continuation.clear()
        self._shadow.clear()
        self._refresh.forget()

        # A new model identity hides everything stored so far. `NEVER` keeps running requests from
        # storing blocks of the old weights.
        if self.stored is not None:
            self.stored.forget()
            self._model += f"/{os.urandom(8).hex()}"
            for state in self._requests.values():
                state.offer.num_stored = NEVER

        return True

    def _before_lookup(self, request: Any) -> None:
        """Prepare a request's block hashes just before vLLM looks up its prefix."""
        if (state := self._requests.get(request.request_id)) is not None:
            self._offer_running()
            self._continuation.inject_approximate_prefix(state)

    def _first_hidden(self, request: Any) -> int:
        """Return the number of the request's first masked block."""
        return self._masking.first_block(self._requests[request.request_id])

    def _pinned_share(self, num_blocks: int) -> float:
        """Return the largest share of the pool to pin that leaves room for the longest request."""
        return max(num_blocks - self._longest, 1) / num_blocks

    def on_new_request(self, request: Any) -> None:
        """Create the state of a request.

        A request with invalid parameters is served without reuse.
        """
        adapter = self._adapters.of(request)
        model = self._adapters.scoped(self._model, adapter)
        scope = scope_digest(model, request.cache_salt or "")
        options, refusal, salts = self._eligibility.of(
            request, weights_known=adapter is None or bool(adapter.digest)
        )
        shared = tuple(scope_digest(model, salt) for salt in salts)
        trial_of = (request.kv_transfer_params or {}).get(TRIAL_OF)

        state = RequestState(
            request,
            options,
            BlockProvenance(scope),
            adapter,
            refusal,
            shared,
            is_trial=trial_of is not None,
        )
        self._requests[request.request_id] = state
        self._refresh.arrived(state)

        most = request.num_prompt_tokens + request.max_tokens
        follows = self._flow is not None and self._flow.reaches(most)

        if self.settings.continuation and refusal is None and isinstance(options, RequestOptions):
            state.recovery_key = str(options.policy), options.match_similar, follows, shared

        if follows:
            # A flow makes the KV of generated tokens approximate.
            state.offer.num_exact = request.num_prompt_tokens
            state.offer.reset()
            hide_answer(request, self._block_size)

        if (
            refusal is None
            and isinstance(options, RequestOptions)
            and isinstance(options.policy, KeepsDocuments)
        ):
            if self.settings.mode == SHADOW:
                state.refusal = SHADOW
            else:
                self._offer_running()
                self._shorter_prompts.shorten(state, options.policy)

        if trial_of is not None:
            self._shadow.try_out(state, str(trial_of))

    def match(self, request: Any, num_prefix: int) -> tuple[int | None, bool]:
        """Plan the grafts of a request and pin their sources.

        vLLM may call this in every step while the request waits. `end_of_schedule` unpins the
        sources if the step does not admit the request.

        Args:
            num_prefix: tokens that vLLM's own prefix cache provides.

        Returns:
            Number of tokens behind these that the connector provides (all or 0), and True if it
            loads them asynchronously. None instead of a number means that vLLM must ask again in
            the next step.
        """
        started = time.perf_counter()
        state = self._requests[request.request_id]
        self._offer_running()
        self._continuation.after_lookup(state, num_prefix)
        num_missing = -(-request.num_tokens // self._block_size) - num_prefix // self._block_size

        if self._is_coming(state, num_prefix, num_missing):
            return None, False

        state.prefix = self.known.pool.find(request.block_hashes[: num_prefix // self._block_size])
        if self._recoveries.rewrites(state.prefix):
            return None, False

        state.reason, state.candidate = self._choose(state, num_prefix, num_missing)
        state.report.stages["match"] = time.perf_counter() - started
        if state.candidate is None:
            return 0, False

        if self._recoveries.rewrites(state.candidate.sources) or not self._reserve(
            state, state.candidate, num_prefix
        ):
            self.known.pool.release(state.candidate.sources)
            return None, False

        self._tentative[state.id] = state.candidate
        return request.num_tokens - num_prefix, True

    def admit(self, request: Any, block_ids: Sequence[list[int]], num_external: int) -> None:
        """Start the planned recovery, now that vLLM has allocated the request's blocks.

        vLLM calls this again after the recovery, with nothing to load.

        Args:
            block_ids: the request's blocks, by KV cache group.
            num_external: tokens that this connector is to load.
        """
        state = self._requests[request.request_id]
        candidate = self._tentative.pop(state.id, None)
        if num_external and candidate is not None:
            if not state.is_trial:
                self._refresh.grafted(state, candidate.sources)
            self._recoveries.start(state, candidate, block_ids)
        elif candidate is not None:
            self.known.release(candidate)

        if not (state.admitted or state.is_trial) and isinstance(state.options, RequestOptions):
            self.known.pool.hit_counts[state.prefix] += 1

        if not state.recovering and not state.admitted:
            self.reporting.admitted(state, None)
            self._early_reports.add(state)

        state.admitted, state.candidate = True, None
        state.offer.restart()

    def end_of_schedule(self, output: SchedulerOutput) -> Metadata:
        """Return the step's message to the workers; unpin sources of requests not admitted."""
        for candidate in self._tentative.values():
            self.known.release(candidate)

        self._tentative.clear()
        self._offered = False
        self._early_reports.send(
            output.num_scheduled_tokens,
            lambda request_id: self._main(self._manager.get_block_ids(request_id)),
        )

        spare = max(self._step_tokens - output.total_num_scheduled_tokens, self._step_tokens // 8)
        costs = self.known.cost_model.costs
        metadata = Metadata(*self._recoveries.take_orders(), spare, costs, self._forgets)
        metadata.prompts = self._shorter_prompts.take_restored()

        if self.stored is not None:
            metadata.store = self.stored.take_orders()

        self._forgets = False
        return metadata

    def on_outcomes(self, output: KVConnectorOutput) -> None:
        """End the recoveries that workers report as done, and record what else they report.

        The sources are unpinned. A request whose recovery failed becomes an ordinary request again.
        """
        reported = output.kv_connector_worker_meta
        if not isinstance(reported, WorkerMetadata):
            reported = WorkerMetadata()

        if reported.documents is not None:
            self.reporting.documents = reported.documents

        if reported.adapters:
            self._adapters.learn(reported.adapters, self._requests.values())

        if reported.costs is not None:
            self.known.cost_model.costs = reported.costs

        if self.stored is not None:
            for rank, report in reported.stores.items():
                self.stored.on_report(rank, report)
                self.reporting.stored(report.counts)

        ended = output.finished_recving or set()
        for state in [
            state for state in self._requests.values() if state.id in ended and state.recovering
        ]:
            self._recoveries.end(state, reported.outcomes.get(state.id, RecoveryResult("error")))
            if state.finished:
                del self._requests[state.id]
            else:
                self._early_reports.add(state)

    def finish(self, request: Any, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Register the blocks of a request that has ended, and return its report.

        Returns:
            `kv_transfer_params` of the response; None if there is nothing to report.
        """
        state, blocks = self._requests[request.request_id], self._main(block_ids)
        state.finished = True
        self._early_reports.drop(state)
        if state.recovering:
            self._recoveries.cancel(state)
            return None

        del self._requests[state.id]
        if not state.whole:
            self._offer(state, blocks, request.num_computed_tokens, ended=True)
            self._continuation.leave(state, blocks)

        self._masking.release(state)
        if isinstance(state.options, Control) and state.options.is_idle_refresh:
            return {KEY: self._refresh.ended(state)}
        if isinstance(state.options, Control) and state.options.op == SCORE:
            return None
        if isinstance(state.options, Control):
            return {KEY: self._controls.apply(state, blocks)} if request.num_output_tokens else None

        state.report.registered_blocks = state.offer.num_entries
        return state.report.as_params()

    def take_stats(self) -> Stats | None:
        """Return the metrics since the last call; vLLM asks after each step's outputs."""
        self._early_reports.end_of_step()
        return self.reporting.take(self.known)

    def _choose(
        self, state: RequestState, num_prefix: int, num_missing: int
    ) -> tuple[str | None, Candidate | None]:
        """Return a pinned plan, or the reason why there is none.

        Either way, shed pinned blocks that the plan does not use if the request needs their room.
        """
        reason, candidate = state.refusal, None
        if reason is None:
            reason, candidate = self.known.plan(state, num_prefix)

        if candidate is not None and self.settings.mode == SHADOW and not state.is_trial:
            self._shadow.note(state, candidate)
            reason, candidate = SHADOW, None

        if candidate is not None:
            self.known.make_room(state, num_missing, {*state.prefix, *candidate.sources})
            if self._pin(state, candidate, num_missing):
                return None, candidate
            reason = "pool_pressure"

        self.known.make_room(state, num_missing, set(state.prefix))
        return reason, None

    def _pin(self, state: RequestState, candidate: Candidate, num_missing: int) -> bool:
        """Pin the sources of a plan; return False if they and the new blocks can never fit.

        A request that keeps a part of documents has no sources. If it was preempted, the part has
        fitted before, so the request waits for that room again.
        """
        pool = self.known.pool
        self.known.pin(candidate)
        if state.whole and state.request.num_preemptions:
            return True

        others = self.known.groups.num_pages(candidate.num_prefix, state.request.num_tokens)
        num_needed = (
            num_missing
            + others
            + sum(pool.ref_count(page) == 0 for page in state.prefix)
            + SPARE_BLOCKS
        )
        if num_needed <= pool.num_free or self._is_busy():
            return True

        pool.release(candidate.sources)
        if state.whole:
            self._shorter_prompts.restore(state, "pool_pressure")

        return False

    def _reserve(self, state: RequestState, candidate: Candidate, num_prefix: int) -> bool:
        """Reserve pages in groups with windows for a recovery; return False if it must wait."""
        groups, num_tokens = self.known.groups, state.request.num_tokens
        if groups.others and groups.num_pages(num_prefix, num_tokens) > self.known.pool.num_free:
            return False
        candidate.reserved = groups.reserve(
            state.request.block_hashes[: num_prefix // self._block_size], num_tokens
        )
        return True

    def _main(self, block_ids: Sequence[list[int]]) -> list[int]:
        """Return the request's blocks in the main KV cache group, whose hashes identify content."""
        return block_ids[self.known.groups.main]

    def _is_busy(self) -> bool:
        """Return True if other requests or the store will free blocks later."""
        if self.stored is not None and self.stored.num_held:
            return True
        return any(
            other.recovering or other.request.status == RUNNING for other in self._requests.values()
        )

    def _offer_running(self) -> None:
        """Register what running requests have computed of their prompts, once per step."""
        if self._offered:
            return
        self._offered = True
        for state in self._requests.values():
            if state.admitted and not (state.recovering or state.finished or state.whole):
                num_tokens = min(state.request.num_computed_tokens, state.request.num_prompt_tokens)
                if num_tokens // self._block_size > state.offer.num_registered:
                    self._offer(
                        state, self._main(self._manager.get_block_ids(state.id)), num_tokens
                    )

    def _offer(
        self, state: RequestState, blocks: list[int], num_computed: int, *, ended: bool = False
    ) -> None:
        """Register a request's first `num_computed` tokens for reuse and in the store."""
        if not state.has_known_weights:
            return
        num_computed = min(num_computed, state.request.num_tokens)
        self.known.offer(state, blocks, num_computed)
        self._continuation.remember(state, blocks, num_computed)
        if self.stored is not None:
            self.stored.keep(state, blocks, ended=ended)

    def _is_coming(self, state: RequestState, num_prefix: int, num_missing: int) -> bool:
        """Return True if the request should wait for blocks that the store is loading."""
        if self.stored is None or state.refusal not in (None, "off", "policy_full"):
            return False
        spare = self.known.pool.num_free - num_missing - SPARE_BLOCKS
        return self.stored.is_coming(state, num_prefix, spare, grafts=state.refusal is None)
