"""Recoveries on the worker: batches in the order of their arrival, a bounded amount of work in each
step of vLLM."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from greenlet import getcurrent, greenlet

from kvgraft.kv.cache import slots_of
from kvgraft.kv.heads import HeadMap
from kvgraft.prefill.context import Hidden, Policy
from kvgraft.prefill.costs import Costs
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.library import Library
from kvgraft.prefill.plan import Plan
from kvgraft.vllm.compat.adapters import Adapter
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.ranks import all_succeeded
from kvgraft.vllm.headwise import HeadwisePrefill
from kvgraft.vllm.layers import VllmLayers
from kvgraft.vllm.prefill import VllmPrefill
from kvgraft.vllm.recovery_budget import RecoveryBudget, seconds_of_step

logger = logging.getLogger("kvgraft")


@dataclass(frozen=True, eq=False)
class Job:
    """What the scheduler side asks for: recover one prompt into its own blocks."""

    request_id: str
    policy: Policy
    plan: Plan
    token_ids: np.ndarray  # int64 [T]
    # by group int64 [ceil(T / block_size)]; of documents: what holds what is kept
    tables: tuple[np.ndarray, ...]
    # int64 [n, groups]: the pages that it grafts from, and their counterparts if any
    source_pages: np.ndarray
    documents: tuple[range, ...] = ()
    scope: bytes = b""  # of what is read on its own
    adapter: Adapter | None = None  # under which it is computed
    kept: np.ndarray | None = None  # of documents, if that has been chosen: as in `RecoveryResult`

    @property
    def own_blocks(self) -> torch.Tensor:
        """The blocks that it writes to: no other request has them."""
        return self._blocks_but(self.plan.prefix)

    @property
    def new_blocks(self) -> torch.Tensor:
        """Those of them in which nothing is known: what lies there is somebody else's."""
        return self._blocks_but(self.plan.prefix | self.plan.in_place)

    def _blocks_but(self, where: torch.Tensor) -> torch.Tensor:
        count = len(self.tables[0])
        known = where[:: self.plan.block_size].numpy()[:count]
        others = np.pad(~known, (0, count - len(known)), constant_values=True)
        return torch.from_numpy(np.concatenate([table[others] for table in self.tables]))


@dataclass(frozen=True)
class RecoveryResult:
    """What became of a job. `failure` is the reason why its prompt must be computed in full, or
    None; `kept` the tokens of documents that stay in each layer, bits [L, T / 8]; `counts` are of
    what its policy did not trust."""

    failure: str | None = None
    computed_share: float = 0.0
    recomputed_tokens: int = 0
    kept: np.ndarray | None = None
    stages: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class RecoveryBatch:
    """Jobs of one policy and one adapter, recovered together. Runs in a greenlet of its own, so
    that a policy can be paused anywhere without knowing of it: same thread, same tensors, no
    locks."""

    def __init__(
        self, host: ModelHost, library: Library, head_map: HeadMap | None, jobs: list[Job]
    ) -> None:
        self.jobs = jobs
        self._library, self._head_map = library, head_map
        self.outcomes: dict[str, RecoveryResult] | None = None
        self._host = host
        self._budget = RecoveryBudget(host.num_layers, self._pause)
        self._task = greenlet(self._run)

    def advance(self, seconds: float, costs: Costs) -> float:
        """Work until done or until so many seconds, by these costs, are spent; returns what is left
        of them."""
        self._budget.seconds, self._budget.costs = seconds, costs
        self._host.adapters.use(self.jobs[0].adapter)
        self._task.parent = getcurrent()
        self._task.switch()
        return max(self._budget.seconds, 0)

    def drop(self) -> None:
        """End it; whatever it has written so far is garbage."""
        if self._task and not self._task.dead:
            self._task.throw()

    def _pause(self) -> None:
        self._task.parent.switch()

    def _run(self) -> None:
        policy = self.jobs[0].policy
        if not isinstance(policy, KeepsDocuments):
            self.outcomes = self._attempt(self._recover, self.jobs)
            return
        outcomes: dict[str, RecoveryResult] = {}
        for job in self.jobs:
            outcomes |= self._attempt(partial(self._keep, policy, job), [job])
        self.outcomes = outcomes

    def _attempt(
        self, work: Callable[[], dict[str, RecoveryResult]], jobs: list[Job]
    ) -> dict[str, RecoveryResult]:
        """The outcomes of these jobs; of a failure if their work failed on any rank."""
        outcomes = None
        for job in jobs:
            self._host.clear_drafts(job.new_blocks)
        try:
            outcomes = work()
        except Exception:
            logger.exception("recovery of %d prompts failed: they are computed in full", len(jobs))
        if not all_succeeded(outcomes is not None) or outcomes is None:
            return {job.request_id: RecoveryResult("error") for job in jobs}
        return outcomes

    def _keep(self, policy: KeepsDocuments, job: Job) -> dict[str, RecoveryResult]:
        """One prompt of which a part is kept."""
        slots = slots_of(job.tables[0].tolist(), job.plan.block_size).to(self._host.device)
        layers, plan = VllmLayers(self._host, slots, self._budget), job.plan
        chosen = (
            None
            if job.kept is None
            else torch.from_numpy(np.unpackbits(job.kept, 1, plan.num_tokens)).bool()
        )
        ctx, *_ = self._library.keep(
            layers, policy, plan, job.token_ids, job.documents, job.scope, kept=chosen
        )
        layers.close_up(ctx.num_kept, plan.num_tokens - ctx.num_kept)
        share = ctx.projected / (ctx.num_layers * plan.num_tokens)
        failure = None if ctx.is_finite else "non_finite"
        kept = np.packbits((ctx.kept & plan.grafted).numpy(), 1)
        return {
            job.request_id: RecoveryResult(failure, share, ctx.recomputed, kept, ctx.times.seconds)
        }

    def _recover(self) -> dict[str, RecoveryResult]:
        """Jobs whose grafts are in the pool."""
        plan = Plan.batch([job.plan for job in self.jobs])
        tokens = torch.from_numpy(np.concatenate([job.token_ids for job in self.jobs]))
        source_pages = np.concatenate([job.source_pages for job in self.jobs])
        tables = [job.tables for job in self.jobs]
        given, policy = (
            (self._host, plan, tokens, tables, source_pages, self._budget),
            self.jobs[0].policy,
        )
        if self._head_map is not None and policy.needs_head_map:
            ctx: VllmPrefill = HeadwisePrefill(self._head_map, *given)
        else:
            ctx = VllmPrefill(*given)
        hidden = policy.recover(ctx)
        ctx.draft(hidden)
        if isinstance(ctx, HeadwisePrefill):
            ctx.sum_counts()
        finite = torch.isfinite(ctx.last_hidden(hidden)).flatten(1).all(1).tolist()
        return {
            job.request_id: self._outcome(ctx, hidden, number, ok)
            for number, (job, ok) in enumerate(zip(self.jobs, finite, strict=True))
        }

    def _outcome(
        self, ctx: VllmPrefill, hidden: Hidden, number: int, finite: bool
    ) -> RecoveryResult:
        prompt = ctx.plan.prompts[number]
        share = int(ctx.computed[number]) / (ctx.num_layers * ctx.plan.lengths[number])
        recomputed = int((hidden.where & ctx.plan.grafted)[prompt].sum())
        failure = None if finite else "non_finite"
        stages, counts = ctx.seconds_of(number), {**ctx.counts[number], **_rejected(ctx, prompt)}
        return RecoveryResult(failure, share, recomputed, stages=stages, counts=counts)


def _rejected(ctx: VllmPrefill, prompt: slice) -> dict[str, int]:
    """What the policy would not trust of one prompt, if anything."""
    where = ctx.rejected[prompt]
    if not where.any():
        return {}
    return {
        "rejected_tokens": int(where.sum()),
        "rejected_segments": ctx.plan.segments[prompt][where].unique().numel(),
    }


class RecoveryQueue:
    """All recoveries of one worker.

    Args:
        max_batch_tokens: tokens of the prompts that one batch may hold together (a longer prompt is
            a batch of its own); this bounds the memory of a recovery.
        library: documents that were read on their own.
        head_map: of the KV heads of this rank, if it is known.
    """

    def __init__(
        self,
        host: ModelHost,
        max_batch_tokens: int,
        library: Library,
        head_map: HeadMap | None = None,
    ) -> None:
        self._host, self._head_map = host, head_map
        self.library = library
        self._max_batch_tokens = max_batch_tokens
        self._batches: deque[RecoveryBatch] = deque()
        self._cancelled: set[str] = set()

    def add(self, jobs: list[Job]) -> None:
        """Queue jobs; neighbours of one policy and one adapter share a batch."""
        batches: list[list[Job]] = []
        for job in jobs:
            if batches and self._share(batches[-1], job):
                batches[-1].append(job)
            else:
                batches.append([job])
        self._batches += [
            RecoveryBatch(self._host, self.library, self._head_map, batch) for batch in batches
        ]

    def _share(self, batch: list[Job], job: Job) -> bool:
        """Whether a job can be recovered together with these. Heads are promoted by what one prompt
        needs."""
        alike = (job.policy, job.adapter) == (
            batch[0].policy,
            batch[0].adapter,
        ) and not job.policy.needs_head_map
        return (
            alike and sum(len(other.token_ids) for other in [*batch, job]) <= self._max_batch_tokens
        )

    def cancel(self, request_ids: set[str]) -> None:
        """Nobody wants these any more; they end as cancelled, the others of their batch go on."""
        self._cancelled |= request_ids & {
            job.request_id for batch in self._batches for job in batch.jobs
        }

    @torch.inference_mode()
    def advance(self, num_tokens: int, costs: Costs) -> dict[str, RecoveryResult]:
        """Work as long as vLLM would take for so many tokens at the end of the oldest prompt, by
        these costs, oldest batch first; returns the outcomes of what has ended."""
        if not self._batches:
            return {}
        longest = max(len(job.token_ids) for job in self._batches[0].jobs)
        with self._host.fused_operators():
            return self._advance(seconds_of_step(costs, num_tokens, longest), costs)

    def _advance(self, seconds: float, costs: Costs) -> dict[str, RecoveryResult]:
        """The same, with fused kernels."""
        ended: dict[str, RecoveryResult] = {}
        while self._batches and seconds > 0:
            batch = self._batches[0]
            if all(job.request_id in self._cancelled for job in batch.jobs):
                batch.drop()
                batch.outcomes = {job.request_id: RecoveryResult("aborted") for job in batch.jobs}
            else:
                seconds = batch.advance(seconds, costs)
            if batch.outcomes is not None:
                self._clear_failed(batch.jobs, batch.outcomes)
                ended |= batch.outcomes
                self._batches.popleft()
        self._cancelled -= ended.keys()
        self._host.adapters.give_back()
        return ended

    def _clear_failed(self, jobs: list[Job], outcomes: dict[str, RecoveryResult]) -> None:
        """Leave nothing behind that could spoil what is computed into these blocks next."""
        for job in jobs:
            if outcomes[job.request_id].failure is not None:
                self._host.clear(job.own_blocks)
