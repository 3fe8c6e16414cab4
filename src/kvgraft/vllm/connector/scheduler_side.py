"""What runs beside vLLM's scheduler: finds known text, plans, guards exactness, and hands out the work."""

import itertools
import logging
import os
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvgraft.engine.text import anchor_ids
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.segments.keys import scope_digest
from kvgraft.segments.segmentation import ANCHORS
from kvgraft.vllm.compat import hide_answer, nonce_hash, on_cache_reset, set_prompt
from kvgraft.vllm.compat.support import model_identity
from kvgraft.vllm.connector.accounts import Accounts
from kvgraft.vllm.connector.known import KnownText
from kvgraft.vllm.connector.metadata import Metadata, WorkerMetadata
from kvgraft.vllm.connector.stored import StoredText
from kvgraft.vllm.connector.tracked import NEVER, Candidate, Tracked
from kvgraft.vllm.connector.wishes import Wishes
from kvgraft.vllm.options import KEY, Control, RequestOptions
from kvgraft.vllm.recovery import Job, Outcome
from kvgraft.vllm.settings import Settings
from kvgraft.vllm.sparse.program import program_of
from kvgraft.vllm.stats import Stats

logger = logging.getLogger("kvgraft")
RUNNING = RequestStatus.RUNNING
SPARE_BLOCKS = 2  # that vLLM may want beside a request's own


class SchedulerSide:
    """Follows every request from arrival to end."""

    def __init__(self, config: VllmConfig) -> None:
        self.settings = Settings.of(config)
        self.known: KnownText
        self.stored: StoredText | None
        self._flow = program_of(config)
        self._model = model_identity(config, lasting=self.settings.store is not None)
        self._block_size = int(config.cache_config.block_size)
        self._longest = -(-config.model_config.max_model_len // self._block_size)  # blocks
        self._num_layers = config.model_config.get_num_layers(config.parallel_config)
        self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._num_ranks = int(config.parallel_config.tensor_parallel_size)
        similar = self.settings.default.match_similar and not config.model_config.skip_tokenizer_init
        self._anchors = anchor_ids(cached_tokenizer_from_config(config.model_config), ANCHORS) if similar else []
        self._requests: dict[str, Tracked] = {}
        self._tentative: dict[str, list[int]] = {}  # sources pinned in this scheduling step, not yet admitted
        self._jobs: list[Job] = []
        self._cancelled: set[str] = set()
        self._offered = False  # in this scheduling step
        self._forgets = False  # what the workers have read
        self._sources = itertools.count()
        self.accounts = Accounts()
        exits = self.settings.exit_layers(self._num_layers)
        self._wishes = Wishes(self.settings.default, self._num_layers, exits, self._num_ranks)

    def bind(self, kv_cache_manager: Any) -> None:
        """Called once, before the first request."""
        self._manager = kv_cache_manager
        share = self._frozen_share(kv_cache_manager.block_pool.num_gpu_blocks - 1)
        capacity = min(self.settings.frozen_capacity, share)
        self.known = KnownText(kv_cache_manager, self._block_size, self.settings, capacity, self._anchors)
        self.stored = StoredText(self.known, self._num_ranks) if self.settings.store else None
        on_cache_reset(kv_cache_manager, self.forget)

    def forget(self) -> bool:
        """Let go of frozen text and of documents: they may be of old weights."""
        self._forgets = True
        if self.stored is not None:  # from now on nothing that was stored is found, nor is what is under way stored
            self.stored.forget()
            self._model += f"/{os.urandom(8).hex()}"
            for tracked in self._requests.values():
                tracked.num_stored = NEVER
        return self.known.clear()

    def _frozen_share(self, num_blocks: int) -> float:
        """Share of the pool that leaves room for the longest request of anybody else."""
        return max(num_blocks - self._longest, 1) / num_blocks

    def on_new_request(self, request: Any) -> None:
        """Take note of a request; one whose parameters are wrong is served without reuse."""
        scope = scope_digest(self._model, request.cache_salt or "")
        options, refusal = self._wishes.of(request)
        tracked = Tracked(request, options, scope, next(self._sources), refusal)
        self._requests[request.request_id] = tracked
        if self._flow is not None and self._flow.reaches(request.num_prompt_tokens + request.max_tokens):
            tracked.num_exact = tracked.first_approximate = request.num_prompt_tokens
            hide_answer(request, self._block_size)
        if refusal is None and isinstance(options, RequestOptions) and isinstance(options.policy, KeepsDocuments):
            self._condense(tracked, options.policy)

    def match(self, request: Any, num_prefix: int) -> tuple[int | None, bool]:
        """How many tokens behind vLLM's exact hits this connector provides: all of them, or none; None: ask again.

        May be called in every step while a request waits. Sources are pinned here and unpinned at the end of the
        scheduling step if the request was not admitted.
        """
        started = time.perf_counter()
        tracked = self._requests[request.request_id]
        self._offer_running()
        num_missing = -(-request.num_tokens // self._block_size) - num_prefix // self._block_size
        if self._is_coming(tracked, num_prefix, num_missing):
            return None, False
        self.known.make_room(tracked, num_missing)
        tracked.reason, tracked.candidate = self._choose(tracked, num_prefix, num_missing)
        tracked.report.stages["match"] = time.perf_counter() - started
        if tracked.candidate is None:
            return 0, False
        self._tentative[tracked.id] = tracked.candidate.sources
        return request.num_tokens - num_prefix, True

    def _condense(self, tracked: Tracked, policy: KeepsDocuments) -> None:
        """Let vLLM see a prompt of as many tokens as will be kept, so that it allocates no more blocks. Nobody finds
        these blocks: they have the hashes of a nonce."""
        self._offer_running()
        tracked.documents = self.known.documents(tracked)
        tokens, lengths = tracked.token_ids, [len(span) for span in tracked.documents]
        if not self._is_worthwhile(sum(lengths), len(tokens)):
            tracked.refusal = "too_little_known" if lengths else "no_known_text"
            return
        num_kept = len(tokens) - sum(lengths) + policy.num_kept(lengths)
        tracked.whole, tracked.first_approximate = tuple(tokens), 0
        set_prompt(tracked.request, tokens[-num_kept:])  # only the last of them will ever be read
        self._hide(tracked, 0)

    def _expand(self, tracked: Tracked, reason: str) -> None:
        """The request has its whole prompt again and is computed in full."""
        set_prompt(tracked.request, list(tracked.whole))
        tracked.whole, tracked.documents, tracked.hashes, tracked.first_approximate = (), (), None, tracked.num_exact
        tracked.refusal = reason

    def admit(self, request: Any, blocks: list[int], num_external: int) -> None:
        """vLLM has allocated the request's blocks; called again, without anything to load, after the recovery."""
        tracked = self._requests[request.request_id]
        candidate, sources = tracked.candidate, self._tentative.pop(tracked.id, [])
        if num_external and candidate is not None:
            self._start(tracked, candidate, sources, blocks)
        elif sources:
            self.known.pool.release(sources)
        if not tracked.recovering and not tracked.admitted:
            self.accounts.admitted(tracked, None)
        tracked.admitted, tracked.candidate = True, None
        tracked.num_offered, tracked.last_entry = 0, -1

    def end_of_schedule(self, output: SchedulerOutput) -> Metadata:
        """The step's message to the workers; what was pinned for requests that were not admitted is let go."""
        for sources in self._tentative.values():
            self.known.pool.release(sources)
        self._tentative.clear()
        self._offered = False
        spare = max(self._step_tokens - output.total_num_scheduled_tokens, self._step_tokens // 8)
        metadata = Metadata(self._jobs, self._cancelled, spare * self._num_layers, self._forgets)
        if self.stored is not None:
            metadata.store = self.stored.take_orders()
        self._jobs, self._cancelled, self._forgets = [], set(), False
        return metadata

    def on_outcomes(self, output: KVConnectorOutput) -> None:
        """Recoveries have ended: let go of their sources; the failed ones become ordinary requests again."""
        reported = output.kv_connector_worker_meta
        outcomes = reported.outcomes if isinstance(reported, WorkerMetadata) else {}
        if isinstance(reported, WorkerMetadata) and reported.documents is not None:
            self.accounts.documents = reported.documents
        if self.stored is not None and isinstance(reported, WorkerMetadata) and reported.store is not None:
            self.stored.on_report(reported.store)
            self.accounts.stored(reported.store.counts)
        for request_id in output.finished_recving or ():
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.recovering:
                self._end_recovery(tracked, outcomes.get(request_id, Outcome("error")))

    def finish(self, request: Any, blocks: list[int]) -> dict[str, Any] | None:
        """The request has ended: name what it leaves behind; returns what its response tells the client."""
        tracked = self._requests[request.request_id]
        tracked.finished = True
        if tracked.recovering:  # aborted: its blocks and sources stay until the workers have let go
            self._cancelled.add(tracked.id)
            return None
        del self._requests[tracked.id]
        if not tracked.whole:
            self._offer(tracked, blocks, request.num_computed_tokens, ended=True)
        if isinstance(tracked.options, Control):
            return {KEY: self.known.apply(tracked, blocks)} if request.num_output_tokens else None
        tracked.report.registered_blocks = tracked.num_sources
        return tracked.report.as_params()

    def take_stats(self) -> Stats | None:
        """What happened since the last call."""
        return self.accounts.take(self.known)

    def _choose(self, tracked: Tracked, num_prefix: int, num_missing: int) -> tuple[str | None, Candidate | None]:
        """A pinned plan, or why there is none."""
        if tracked.refusal is not None:
            return tracked.refusal, None
        candidate = self.known.find(tracked, num_prefix)
        if candidate is None:
            return "no_known_text", None
        if not self._is_worthwhile(int(candidate.plan.grafted.sum()), candidate.plan.num_tokens - num_prefix):
            return "too_little_known", None
        self.known.pin(candidate)
        hits = tracked.request.block_hashes[: num_prefix // self._block_size]
        num_needed = num_missing + self.known.pool.num_idle(hits) + SPARE_BLOCKS
        if num_needed > self.known.pool.num_free and not self._is_busy():  # waiting would not help
            self.known.pool.release(candidate.sources)
            if tracked.whole:
                self._expand(tracked, "pool_pressure")
            return "pool_pressure", None
        return None, candidate

    def _is_busy(self) -> bool:
        """Whether blocks will come free without this request's doing."""
        if self.stored is not None and self.stored.num_held:
            return True
        return any(other.recovering or other.request.status == RUNNING for other in self._requests.values())

    def _is_worthwhile(self, num_grafted: int, num_active: int) -> bool:
        """A graft makes all that follows approximate, so that nobody can have it as a prefix: not for a few tokens."""
        return num_grafted >= max(self.settings.min_graft_tokens, self.settings.min_graft_share * num_active)

    def _start(self, tracked: Tracked, candidate: Candidate, sources: list[int], blocks: list[int]) -> None:
        """Hand the recovery to the workers and hide everything approximate from exact lookups."""
        request, options = tracked.request, tracked.options
        if not isinstance(options, RequestOptions):
            raise TypeError("a control request never grafts")
        tracked.pinned, tracked.recovery = sources, candidate
        if request.prefill_stats is not None and not request.num_preemptions:  # vLLM's own would be the whole prompt
            num_grafted = int(candidate.plan.grafted.sum())
            request.prefill_stats.set(tracked.prompt_tokens, candidate.num_prefix, num_grafted)
        self.known.pool.hit_counts[sources] += 1
        tracked.first_approximate = min(tracked.first_approximate, candidate.first_graft)
        if not tracked.whole:
            self._hide(tracked, candidate.first_graft // self._block_size)
        tokens = torch.tensor(tracked.token_ids, dtype=torch.int64).numpy()
        table = torch.tensor(blocks, dtype=torch.int64).numpy()
        job = Job(tracked.id, options.policy, candidate.plan, tokens, table, tracked.documents, tracked.scope)
        self._jobs.append(job)

    def _hide(self, tracked: Tracked, first_block: int) -> None:
        """Give blocks from first_block on hashes that no content has; hashes of generated blocks chain from them."""
        hashes = tracked.request.block_hashes
        if tracked.hashes is None:
            tracked.hashes = (first_block, list(hashes[first_block:]))
        nonce = os.urandom(32)
        for block in range(first_block, len(hashes)):
            hashes[block] = nonce_hash(nonce, block)

    def _reveal(self, tracked: Tracked) -> None:
        """The request is computed in full after all: vLLM's own hashes stand again."""
        if tracked.hashes is not None:
            first, hashes = tracked.hashes
            del tracked.request.block_hashes[first:]
            tracked.request.block_hashes.extend(hashes)
            tracked.request.update_block_hashes()
        tracked.hashes, tracked.first_approximate = None, tracked.num_exact

    def _end_recovery(self, tracked: Tracked, outcome: Outcome) -> None:
        self.known.pool.release(tracked.pinned)
        candidate, tracked.pinned, tracked.recovery = tracked.recovery, [], None
        if tracked.finished:
            del self._requests[tracked.id]
            self.accounts.aborted()
        elif outcome.failure is not None:
            tracked.refusal = tracked.reason = outcome.failure
            if tracked.whole:
                self._expand(tracked, outcome.failure)
            else:
                self._reveal(tracked)
            self.accounts.admitted(tracked, None)
        else:
            self.accounts.recovered(tracked, candidate, outcome)

    def _offer_running(self) -> None:
        """Once in a scheduling step: what running requests have computed of their prompts becomes known."""
        if self._offered:
            return
        self._offered = True
        for tracked in self._requests.values():
            if tracked.admitted and not (tracked.recovering or tracked.finished or tracked.whole):
                num_tokens = min(tracked.request.num_computed_tokens, tracked.request.num_prompt_tokens)
                if num_tokens // self._block_size > tracked.num_offered:
                    self._offer(tracked, self._manager.get_block_ids(tracked.id)[0], num_tokens)

    def _offer(self, tracked: Tracked, blocks: list[int], num_computed: int, *, ended: bool = False) -> None:
        self.known.offer(tracked, blocks, min(num_computed, tracked.request.num_tokens))
        if self.stored is not None:
            self.stored.keep(tracked, blocks, ended=ended)

    def _is_coming(self, tracked: Tracked, num_prefix: int, num_missing: int) -> bool:
        """Whether the request should wait for stored blocks."""
        if self.stored is None or tracked.refusal not in (None, "off", "policy_full"):
            return False
        spare = self.known.pool.num_free - num_missing - SPARE_BLOCKS
        return self.stored.is_coming(tracked, num_prefix, spare, grafts=tracked.refusal is None)
