"""Scheduler side of the connector: follows each request from arrival until its blocks are freed.

vLLM's scheduler calls these methods of `SchedulerSide` in this order:

1. `on_new_request`: read the request's options and decide if it may reuse KV.
2. `match` (from `get_num_new_matched_tokens`): make a plan of grafts and pin their sources.
3. `admit` (from `update_state_after_alloc`): hand the plan to the workers as a recovery.
4. `end_of_schedule` (from `build_connector_meta`): send the step's jobs to the workers.
5. `on_outcomes` (from `update_connector_output`): end the recoveries that workers report.
6. `finish` (from `request_finished`): register the request's blocks and return its report.
"""

import time
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.provenance import NEVER
from kvgraft.core.segmentation import ANCHORS
from kvgraft.engine.text import anchor_ids
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.connector.admission import make_admission, register_blocks
from kvgraft.vllm.connector.controls import Controls
from kvgraft.vllm.connector.eligibility import RequestIntake
from kvgraft.vllm.connector.metadata import Metadata, WorkerMetadata
from kvgraft.vllm.connector.prefix_lookup import HashMasking, PromptTruncation, ShadowMode
from kvgraft.vllm.connector.recoveries import Recoveries
from kvgraft.vllm.connector.reporting import Reporting
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.connector.store_scheduler import StoreScheduler
from kvgraft.vllm.options import Control, RequestOptions
from kvgraft.vllm.patches.events import ExactEvents
from kvgraft.vllm.patches.prefix_cache import before_prefix_lookup, on_cache_reset
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.recovery import RecoveryResult
from kvgraft.vllm.setting_fields import SHADOW
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.stats import Stats

RUNNING = RequestStatus.RUNNING
# blocks that vLLM may allocate in addition to those of the request
SPARE_BLOCKS = 2


class SchedulerSide:
    """Scheduler-side state of all requests of one engine.

    `admission` decides what requests reuse. `stored` is the view of the segment store, or None
    without one. Both exist after `bind`.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.settings = KVGraftSettings.of(config)
        self.intake = RequestIntake(config, self.settings)
        self._requests: dict[str, RequestState] = {}

        # True after `_register_running` has run in this scheduling step
        self._has_registered = False

    def bind(self, kv_cache_manager: Any) -> None:
        """Create what needs vLLM's KV cache manager. vLLM calls this once, before any request."""
        settings, config = self.settings, self.intake.config
        model, block_size = config.model_config, int(config.cache_config.block_size)

        # Pinned blocks leave room for the longest request.
        num_blocks = kv_cache_manager.block_pool.num_gpu_blocks - 1
        longest = -(-model.max_model_len // block_size)
        capacity = min(settings.pin_capacity, max(num_blocks - longest, 1) / num_blocks)

        anchors = []
        if settings.default.match_similar and not model.skip_tokenizer_init:
            anchors = anchor_ids(cached_tokenizer_from_config(model), ANCHORS)

        admission = make_admission(kv_cache_manager, block_size, settings, capacity, anchors)
        self.admission: Admission[SharedPool] = admission
        self.stored: StoreScheduler | None = None
        if settings.store is not None:
            num_ranks = int(config.parallel_config.tensor_parallel_size)
            is_shared = settings.store_shared is not None
            self.stored = StoreScheduler(admission, num_ranks, is_shared=is_shared)

        self.reporting = Reporting(admission, int(config.parallel_config.data_parallel_index))
        self._masking = HashMasking(kv_cache_manager, admission)
        self._shadow = ShadowMode(self._masking)
        self._shorter_prompts = PromptTruncation(admission, self._masking)
        self._recoveries = Recoveries(
            admission, self._masking, self._shorter_prompts, self.reporting
        )
        self._controls = Controls(
            admission, self.reporting, settings.idle_refresh, model.max_model_len - 1
        )
        ExactEvents(kv_cache_manager.block_pool, self._first_hidden)
        before_prefix_lookup(kv_cache_manager, self._before_lookup)
        on_cache_reset(kv_cache_manager, self.forget)

    def forget(self) -> bool:
        """Forget pinned text and documents, because they may come from old weights.

        Returns:
            False while requests run or are recovered. Then nothing is forgotten.
        """
        pool, pins = self.admission.pool, self.admission.pins
        if pool.num_used > len({held for page in pins.pages for held in pool.held(page)}):
            return False

        self.admission.clear()
        self._recoveries.forget_documents()
        self._shadow.clear()
        self._controls.refresh.forget()

        # A new model identity hides everything stored so far. `NEVER` keeps running requests from
        # storing blocks of the old weights.
        if self.stored is not None:
            self.stored.forget()
            self.intake.change_model()
            for state in self._requests.values():
                state.provenance.num_stored = NEVER

        return True

    def _before_lookup(self, request: Any) -> None:
        """Prepare a request's block hashes just before vLLM looks up its prefix."""
        if (state := self._requests.get(request.request_id)) is not None:
            self._register_running()
            self._masking.inject_approximate_prefix(state)

    def _first_hidden(self, request: Any) -> int:
        """Return the number of the request's first masked block."""
        return self._masking.first_block(self._requests[request.request_id])

    def on_new_request(self, request: Any) -> None:
        """Create the state of a request, and shorten its prompt if its policy keeps a part."""
        state = self._requests[request.request_id] = self.intake.make_state(request)
        self._controls.refresh.arrived(state)

        options = state.options
        policy = options.policy if isinstance(options, RequestOptions) else None
        if state.refusal is None and isinstance(policy, KeepsDocuments):
            if self.settings.mode == SHADOW:
                state.refusal = SHADOW
            else:
                self._register_running()
                self._shorter_prompts.shorten(state, policy)

        if state.is_trial:
            self._shadow.try_out(state)

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
        self._register_running()
        self._masking.after_lookup(state, num_prefix)
        pool = self.admission.pool
        num_hits = num_prefix // pool.block_size
        num_missing = -(-request.num_tokens // pool.block_size) - num_hits

        if self._is_coming(state, num_prefix, num_missing):
            return None, False

        state.prefix = pool.find(request.block_hashes[:num_hits])
        if self._recoveries.rewrites(state.prefix):
            return None, False

        reuse = self.admission.decide(state, dict(enumerate(state.prefix)), state.candidate)
        state.reason, state.candidate = self._choose(state, reuse, num_missing)
        state.report.stages["match"] = time.perf_counter() - started
        if state.candidate is None:
            return 0, False
        if not self._recoveries.reserve(state, state.candidate):
            return None, False
        return pool.groups.num_loaded(request.num_tokens) - num_prefix, True

    def admit(self, request: Any, block_ids: Sequence[list[int]], num_external: int) -> None:
        """Start the planned recovery, now that vLLM has allocated the request's blocks.

        vLLM calls this again after the recovery, with nothing to load.

        Args:
            block_ids: the request's blocks, by KV cache group.
            num_external: tokens that this connector is to load.
        """
        state = self._requests[request.request_id]
        reuse = self._recoveries.take_reserved(state)
        if num_external and reuse is not None:
            if not state.is_trial:
                self._controls.refresh.grafted(state, reuse.sources)
            self._recoveries.start(state, reuse, block_ids)
        elif reuse is not None:
            self._recoveries.release(state, reuse)

        if not (state.admitted or state.is_trial) and isinstance(state.options, RequestOptions):
            self.admission.pool.hit_counts[state.prefix] += 1

        if not state.recovering and not state.admitted:
            self.reporting.admitted(state, None)
            self.reporting.early.add(state)

        state.admitted, state.candidate = True, None
        state.provenance.restart()

    def end_of_schedule(self, output: SchedulerOutput) -> Metadata:
        """Return the step's message to the workers; unpin sources of requests not admitted."""
        self._recoveries.release_unused()
        self._has_registered = False
        self.reporting.early.send(output.num_scheduled_tokens, self._masking.blocks_of)

        most = int(self.intake.config.scheduler_config.max_num_batched_tokens)
        metadata = self._recoveries.take_orders(
            max(most - output.total_num_scheduled_tokens, most // 8)
        )
        if self.stored is not None:
            metadata.store = self.stored.take_orders()

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
            self.intake.adapters.learn(reported.adapters, self._requests.values())

        if reported.costs is not None and self.admission.cost_model is not None:
            self.admission.cost_model.costs = reported.costs

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
                self.reporting.early.add(state)

    def finish(self, request: Any, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Register the blocks of a request that has ended, and return its report.

        Returns:
            `kv_transfer_params` of the response; None if there is nothing to report.
        """
        state = self._requests[request.request_id]
        blocks = block_ids[self.admission.pool.groups.main]
        state.finished = True
        self.reporting.early.drop(state)
        if state.recovering:
            self._recoveries.cancel(state)
            return None

        del self._requests[state.id]
        if not state.whole:
            self._register(state, blocks, request.num_computed_tokens, ended=True)
            self._leave(state, blocks)

        self._masking.release(state)
        if isinstance(state.options, Control):
            return self._controls.apply(state, state.options, blocks)

        state.report.registered_blocks = state.provenance.num_entries
        return state.report.as_params()

    def take_stats(self) -> Stats | None:
        """Return the metrics since the last call; vLLM asks after each step's outputs."""
        return self.reporting.take()

    def _choose(
        self, state: RequestState, reuse: Reuse, num_missing: int
    ) -> tuple[str | None, Reuse | None]:
        """Return a decision whose sources are pinned, or the reason why there is none.

        Either way, shed pinned blocks that it does not use if the request needs their room.
        """
        reason, pins = reuse.reason, self.admission.pins
        if state.whole and state.refusal is not None:
            # Its adapter has other weights than when its prompt was shortened.
            self._shorter_prompts.restore(state, state.refusal)
            reason = state.refusal
        elif state.is_trial and not (state.refusal or state.whole or reuse is state.candidate):
            reason = SHADOW
        elif reuse.needs_recovery and self.settings.mode == SHADOW and not state.is_trial:
            self._shadow.note(state, reuse)
            reason = SHADOW

        if reason is None:
            pins.shed(state.pin_namespace, num_missing, {*state.prefix, *reuse.sources})
            if self._pin(state, reuse, num_missing):
                return None, reuse
            reason = "pool_pressure"

        pins.shed(state.pin_namespace, num_missing, set(state.prefix))
        return reason, None

    def _pin(self, state: RequestState, reuse: Reuse, num_missing: int) -> bool:
        """Pin the sources of a decision; return False if they and the new blocks can never fit.

        A request that keeps a part of documents has no sources. If it was preempted, the part has
        fitted before, so the request waits for that room again.
        """
        pool = self.admission.pool
        pool.acquire(reuse.sources)
        if state.whole and state.request.num_preemptions:
            return True

        num_needed = (
            num_missing
            + pool.groups.num_pages(reuse.num_known, state.request.num_tokens)
            + sum(pool.ref_count(page) == 0 for page in state.prefix)
            + SPARE_BLOCKS
        )
        if num_needed <= pool.num_free or self._is_busy():
            return True

        pool.release(reuse.sources)
        if state.whole:
            self._shorter_prompts.restore(state, "pool_pressure")

        return False

    def _is_busy(self) -> bool:
        """Return True if other requests or the store will free blocks later."""
        if self.stored is not None and self.stored.num_held:
            return True
        return any(
            other.recovering or other.request.status == RUNNING for other in self._requests.values()
        )

    def _register_running(self) -> None:
        """Register what running requests have computed of their prompts, once per step."""
        if self._has_registered:
            return
        self._has_registered = True
        for state in self._requests.values():
            if state.admitted and not (state.recovering or state.finished or state.whole):
                num_tokens = min(state.request.num_computed_tokens, state.request.num_prompt_tokens)
                if num_tokens // self.admission.pool.block_size > state.provenance.num_registered:
                    self._register(state, self._masking.blocks_of(state), num_tokens)

    def _register(
        self, state: RequestState, blocks: list[int], num_computed: int, *, ended: bool = False
    ) -> None:
        """Register a request's first `num_computed` tokens for reuse and in the store."""
        num_computed = min(num_computed, state.request.num_tokens)
        register_blocks(self.admission, state, blocks, num_computed)
        if self.stored is not None and state.leaves_kv:
            self.stored.keep(state, blocks, ended=ended)

    def _leave(self, state: RequestState, blocks: list[int]) -> None:
        """Note which blocks of an ending request only its continuations will want."""
        # A request that was preempted and not resumed has fewer blocks than before.
        if stop := min(state.provenance.num_continuable, len(blocks)):
            depths = state.provenance.depths(stop, self.admission.pool.block_size)
            self.admission.leave(state, blocks[:stop], depths)

    def _is_coming(self, state: RequestState, num_prefix: int, num_missing: int) -> bool:
        """Return True if the request should wait for blocks that the store is loading."""
        if self.stored is None or state.refusal not in (None, "off", "policy_full"):
            return False
        pool = self.admission.pool
        others = pool.groups.num_pages(num_prefix, state.request.num_tokens)
        spare = pool.num_free - num_missing - others - SPARE_BLOCKS
        return self.stored.is_coming(state, num_prefix, spare, grafts=state.refusal is None)
