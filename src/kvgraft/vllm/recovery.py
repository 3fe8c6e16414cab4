"""Recoveries on the worker: batches in order of arrival, with a bounded amount of work per step."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from greenlet import getcurrent, greenlet

from kvgraft.core.costs import Costs
from kvgraft.core.plan import Plan
from kvgraft.kv.cache import slots_of
from kvgraft.kv.heads import HeadMap
from kvgraft.prefill.context import Hidden, Policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.library import Library
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
    """Order of the scheduler side to recover one prompt into its own blocks."""

    request_id: str
    policy: Policy
    plan: Plan
    # int64 [T]
    token_ids: np.ndarray
    # by group int64 [ceil(T / block_size)]; with documents: only the blocks that hold kept tokens
    tables: tuple[np.ndarray, ...]
    # int64 [n, groups]: pages to graft from, with their counterparts in the other groups
    source_pages: np.ndarray
    documents: tuple[range, ...] = ()
    # scope of the documents that are read on their own
    scope: bytes = b""
    # LoRA adapter of the request
    adapter: Adapter | None = None
    # kept tokens of documents if already chosen, as in `RecoveryResult`
    kept: np.ndarray | None = None

    @property
    def own_blocks(self) -> torch.Tensor:
        """Blocks that the job writes to. No other request has them."""
        return self._blocks_but(self.plan.prefix)

    @property
    def new_blocks(self) -> torch.Tensor:
        """Blocks of `own_blocks` that hold nothing known yet, only leftovers of other requests."""
        return self._blocks_but(self.plan.prefix | self.plan.in_place)

    def _blocks_but(self, where: torch.Tensor) -> torch.Tensor:
        """Return the job's blocks in all groups, except those set in `where` bool [T]."""
        count = len(self.tables[0])
        known = where[:: self.plan.block_size].numpy()[:count]
        others = np.pad(~known, (0, count - len(known)), constant_values=True)
        return torch.from_numpy(np.concatenate([table[others] for table in self.tables]))


@dataclass(frozen=True)
class RecoveryResult:
    """Result of a job.

    Attributes:
        failure: reason why the prompt must be computed in full, or None.
        computed_share: share of all (token, layer) pairs that was computed.
        recomputed_tokens: grafted tokens that were recomputed.
        kept: tokens of documents that stay in each layer, as bits [L, T / 8].
        stages: seconds by stage.
        counts: counts of tokens and segments that the policy has rejected, among others.
    """

    failure: str | None = None
    computed_share: float = 0.0
    recomputed_tokens: int = 0
    kept: np.ndarray | None = None
    stages: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class RecoveryBatch:
    """Jobs of one policy and one adapter, recovered together.

    The batch runs in its own greenlet, which can pause anywhere inside a policy. It uses the same
    thread and tensors as vLLM, so it needs no locks.
    """

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
        """Work until the batch is done or the time is spent.

        Args:
            seconds: time that the batch may spend, estimated by `costs`.

        Returns:
            The seconds that are left.
        """
        self._budget.seconds, self._budget.costs = seconds, costs
        self._host.adapters.use(self.jobs[0].adapter)
        self._task.parent = getcurrent()
        self._task.switch()
        return max(self._budget.seconds, 0)

    def drop(self) -> None:
        """End the batch. What it has written so far is garbage."""
        if self._task and not self._task.dead:
            self._task.throw()

    def _pause(self) -> None:
        """Give control back to the caller of `advance`."""
        self._task.parent.switch()

    def _run(self) -> None:
        """Recover all jobs and set `outcomes`."""
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
        """Return the outcomes of the jobs; all are failures if the work failed on any rank."""
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
        """Recover one prompt that keeps only a part of its documents."""
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
        """Recover all jobs of the batch, whose grafts are in the pool."""
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
        """Return the result of prompt `number` in a recovered batch."""
        prompt = ctx.plan.prompts[number]
        share = int(ctx.computed[number]) / (ctx.num_layers * ctx.plan.lengths[number])
        recomputed = int((hidden.where & ctx.plan.grafted)[prompt].sum())
        failure = None if finite else "non_finite"
        stages, counts = ctx.seconds_of(number), {**ctx.counts[number], **_rejected(ctx, prompt)}
        return RecoveryResult(failure, share, recomputed, stages=stages, counts=counts)


def _rejected(ctx: VllmPrefill, prompt: slice) -> dict[str, int]:
    """Return the numbers of tokens and segments that the policy rejected in one prompt, if any."""
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
        host: the loaded model and its cache.
        max_batch_tokens: maximum number of prompt tokens in a batch, to bound memory. A longer
            prompt is a batch of its own.
        library: documents that were read on their own.
        head_map: classes of this rank's KV heads, if known.
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
        """Queue jobs. Consecutive jobs of one policy and one adapter share a batch."""
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
        """Return True if a job can join a batch.

        Policies with a head map choose heads for a single prompt.
        """
        same_policy = (job.policy, job.adapter) == (batch[0].policy, batch[0].adapter)
        num_tokens = sum(len(other.token_ids) for other in [*batch, job])
        return (
            same_policy and not job.policy.needs_head_map and num_tokens <= self._max_batch_tokens
        )

    def cancel(self, request_ids: set[str]) -> None:
        """Cancel the jobs of these requests. Other jobs of their batches continue."""
        self._cancelled |= request_ids & {
            job.request_id for batch in self._batches for job in batch.jobs
        }

    @torch.inference_mode()
    def advance(self, num_tokens: int, costs: Costs) -> dict[str, RecoveryResult]:
        """Recover the oldest batches first, within the time of one step.

        Args:
            num_tokens: the time is what vLLM needs for this many tokens at the end of the longest
                prompt in the oldest batch.
            costs: costs that convert tokens to time.

        Returns:
            The outcomes of the jobs that have ended, by request id.
        """
        if not self._batches:
            return {}
        longest = max(len(job.token_ids) for job in self._batches[0].jobs)
        with self._host.fused_operators():
            return self._advance(seconds_of_step(costs, num_tokens, longest), costs)

    def _advance(self, seconds: float, costs: Costs) -> dict[str, RecoveryResult]:
        """Recover within this time, while fused kernels are active."""
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
        """Zero the blocks of failed jobs, since leftovers could spoil what is computed there."""
        for job in jobs:
            if outcomes[job.request_id].failure is not None:
                self._host.clear(job.own_blocks)
