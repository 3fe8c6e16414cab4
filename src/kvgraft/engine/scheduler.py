"""Continuous batching: admit requests that fit, prefill them in batches by policy, decode all
running requests."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.core.report import FALLBACKS
from kvgraft.engine.decoder import Decoder
from kvgraft.engine.layers import NativeLayers
from kvgraft.engine.memory import Memory
from kvgraft.engine.prefill import NativePrefill
from kvgraft.engine.request import Event, Report
from kvgraft.engine.sampling import most_likely
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.sparse import SparseDecode
from kvgraft.engine.step_graphs import StepGraphs
from kvgraft.kv.heads import HeadMap
from kvgraft.kv.pages import PoolExhausted
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.library import Library
from kvgraft.prefill.documents.partial import PartialPrefill

Recover = Callable[[PrefillContext], Hidden]


class Scheduler:
    """Steps of the engine. Waiting sequences are admitted in order; a running one never loses its
    pages.

    Args:
        head_map: for policies that work head by head, and for a cache that keeps less of local
            heads.
        enforce_eager: launch every operation of a decode step by itself, on CUDA, too.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        library: Library,
        head_map: HeadMap | None = None,
        *,
        enforce_eager: bool = False,
    ) -> None:
        self.decoder = decoder
        self.memory = memory
        self.library = library
        self.head_map = head_map
        self.flows = SparseDecode(memory.cache, decoder.config.group)
        self.steps = StepGraphs(decoder, memory.cache, self.flows, enforce_eager=enforce_eager)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []

    def submit(self, sequences: Sequence[SequenceState]) -> None:
        """Queue sequences for admission."""
        for sequence in sequences:
            if sequence.refusal in FALLBACKS:
                self.memory.note_fallback(sequence, sequence.refusal)
        self.waiting.extend(sequences)

    def run(self, sequences: Sequence[SequenceState]) -> Iterator[Event]:
        """Submit sequences, then `drain` them."""
        self.submit(sequences)
        yield from self.drain(sequences)

    def drain(self, sequences: Sequence[SequenceState]) -> Iterator[Event]:
        """Step until these waiting or running sequences are done, and yield their events. Closing
        the iterator aborts them."""
        try:
            while any(not sequence.done or sequence.events for sequence in sequences):
                for sequence in sequences:
                    while sequence.events:
                        yield sequence.events.popleft()
                if not all(sequence.done for sequence in sequences):
                    self.step()
        finally:
            self.abort(sequences)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit and prefill, or decode one token for all running sequences, or both."""
        decoding = list(self.running)
        admitted = self._admit()
        groups: dict[Policy, list[SequenceState]] = {}
        for sequence in admitted:
            groups.setdefault(sequence.recovers_by, []).append(sequence)

        try:
            for policy, sequences in groups.items():
                self._prefill(policy, sequences)
        except BaseException:
            self._requeue(admitted)
            raise

        if decoding:
            self._decode(decoding)

        self._retire()

    def adopt(self, sequence: SequenceState) -> None:
        """Add a sequence whose prompt was computed elsewhere. The caller must fill its pages before
        the next step.

        Raises:
            PoolExhausted: it does not fit now.
        """
        self.memory.adopt(sequence)
        self.running.append(sequence)

    @torch.inference_mode()
    def read_documents(self, sequence: SequenceState) -> int:
        """Compute documents of a sequence that the library does not have, if its policy keeps a
        part of them.

        Returns:
            The number of documents computed.
        """
        policy = sequence.policy
        if not isinstance(policy, KeepsDocuments):
            return 0
        layers = NativeLayers(self.decoder, self.memory.cache)
        return self.library.place(
            layers,
            sequence.prompt,
            sequence.documents,
            sequence.scope,
            policy.blocks,
            shared=sequence.shared,
        )[1]

    def abort(self, sequences: Iterable[SequenceState]) -> None:
        """Drop these sequences in any state, and release their pages."""
        for sequence in sequences:
            if sequence in self.running:
                self.running.remove(sequence)
                self.memory.release(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)

    def _admit(self) -> list[SequenceState]:
        admitted: list[SequenceState] = []
        num_tokens = 0
        while self.waiting and (
            not admitted or num_tokens + self.waiting[0].num_prompt <= self.memory.chunk
        ):
            sequence = self.waiting[0]
            started = time.perf_counter()
            try:
                if not self.memory.admit(sequence, idle=not self.running):
                    break
            except PoolExhausted as error:
                self.waiting.popleft().finish("error", error=str(error))
                continue
            sequence.report.stages["queue"] = started - sequence.submitted_at
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
            num_tokens += sequence.num_prompt

        return admitted

    def _requeue(self, admitted: list[SequenceState]) -> None:
        """Queue admitted sequences again that were not prefilled, so that none decodes from
        unwritten pages."""
        for sequence in reversed(admitted):
            if sequence.first_token_pending:
                self.running.remove(sequence)
                self.memory.abandon(sequence)
                self.waiting.appendleft(sequence)

    def _prefill(self, policy: Policy, sequences: list[SequenceState]) -> None:
        """Prefill prompts with grafts by the policy and all others in full.

        Prompts with non-finite logits lose their grafts and are computed again in full.
        """
        for sequence in sequences:
            if sequence.documents:
                self._keep_documents(policy, sequence)

        sequences = [
            sequence
            for sequence in sequences
            if not sequence.documents and sequence in self.running
        ]
        logits: dict[SequenceState, Tensor] = {}
        broken: list[SequenceState] = []
        grafting = [sequence for sequence in sequences if _has_grafts(sequence)]
        for batch in (
            [[sequence] for sequence in grafting]
            if policy.needs_head_map
            else [grafting]
            if grafting
            else []
        ):
            rows = self._recover(policy.recover, batch)
            logits |= zip(batch, rows, strict=True)
            finite = rows.isfinite().all(dim=-1).tolist()
            broken += [
                sequence for sequence, is_finite in zip(batch, finite, strict=True) if not is_finite
            ]

        for sequence in sequences:
            self.memory.unpin_sources(sequence)

        for sequence in broken:
            self.memory.drop_grafts(sequence, "non_finite")

        exact = [sequence for sequence in sequences if not _has_grafts(sequence)]
        logits |= zip(exact, self._compute(policy, exact), strict=True)
        best = most_likely(
            [logits[sequence] for sequence in sequences],
            [sequence.sampler for sequence in sequences],
        )
        for sequence, token in zip(sequences, best, strict=True):
            self._accept(sequence, logits[sequence], token)
            self.memory.register(sequence)
            self.memory.settle(sequence)

    def _keep_documents(self, policy: Policy, sequence: SequenceState) -> None:
        """Prefill one prompt whose documents are kept in part. Compute unknown documents first."""
        if not isinstance(policy, KeepsDocuments):
            raise TypeError(f"policy {policy.name!r} keeps no documents")

        report, remember = sequence.report, sequence.request.remember
        layers = NativeLayers(self.decoder, self.memory.cache, sequence.pages.slots)
        plan, documents = sequence.admitted_plan, sequence.documents
        ctx, hidden, report.counts["documents_read"] = self.library.keep(
            layers,
            policy,
            plan,
            sequence.prompt,
            documents,
            sequence.scope,
            shared=sequence.shared,
            remember=remember,
        )
        logits = self.decoder.logits(hidden.states[-1:])[0]
        self._account(ctx, report)
        if not ctx.is_finite or not bool(logits.isfinite().all()):
            self.running.remove(sequence)
            self.memory.drop_documents(sequence, "non_finite")
            self.waiting.appendleft(sequence)
            return

        self.memory.shorten(sequence, ctx.num_kept)
        self._accept(sequence, logits)

    def _account(self, ctx: PartialPrefill, report: Report) -> None:
        config = self.decoder.config
        report.recomputed_tokens = ctx.recomputed
        report.computed_share = ctx.projected / (report.prompt_tokens * ctx.num_layers)
        report.ffn_flops = sum(
            count * config.ffn_flops(layer) for layer, count in enumerate(ctx.finished)
        )
        report.flops = (
            report.ffn_flops
            + ctx.projected * config.project_flops
            + sum(ctx.finished) * config.output_flops
        )
        report.flops += (
            ctx.attended * config.attention_flops + ctx.scored * config.attention_flops // 2
        )
        report.kv_bytes += ctx.scratch_bytes
        report.counts["kept_tokens"] = ctx.num_kept - report.fresh_tokens
        report.stages.update(ctx.times.seconds)

    def _compute(self, policy: Policy, sequences: list[SequenceState]) -> Iterable[Tensor]:
        """Compute prompts in full and return logits [V] of each. A long prompt runs in chunks,
        which others can reuse at once."""
        if sum(sequence.num_prompt for sequence in sequences) <= self.memory.chunk:
            return self._recover(policy.recompute, sequences) if sequences else []
        return [self._compute_long(policy, sequence) for sequence in sequences]

    def _compute_long(self, policy: Policy, sequence: SequenceState) -> Tensor:
        for start in range(0, sequence.num_prompt, self.memory.chunk):
            part = sequence.admitted_plan.part(
                start, min(start + self.memory.chunk, sequence.num_prompt)
            )
            if part.active.any():
                ctx, hidden = self._run(policy.recompute, [sequence], [part])
                self._report(ctx, hidden, [sequence])
            sequence.num_computed = part.num_tokens
            self.memory.register(sequence)
        return self.decoder.logits(ctx.last_hidden(hidden))[0]

    def _recover(self, recover: Recover, sequences: list[SequenceState]) -> Tensor:
        """Logits [b, V] after each prompt."""
        ctx, hidden = self._run(
            recover, sequences, [sequence.admitted_plan for sequence in sequences]
        )
        logits = self.decoder.logits(ctx.last_hidden(hidden))
        # Reporting waits for the device. Launch the logits first, to keep it busy meanwhile.
        self._report(ctx, hidden, sequences)
        return logits

    def _run(
        self, recover: Recover, sequences: list[SequenceState], plans: list[Plan]
    ) -> tuple[NativePrefill, Hidden]:
        """Run one pass over the plans of the sequences."""
        for sequence, plan in zip(sequences, plans, strict=True):
            self.memory.reach(sequence, plan.active.nonzero()[:, 0].numpy())

        plan = Plan.batch(plans)
        tokens = torch.cat(
            [
                torch.from_numpy(s.prompt[: p.num_tokens])
                for s, p in zip(sequences, plans, strict=True)
            ]
        )
        slots = [sequence.pages.slots for sequence in sequences]
        sources = self.memory.lookup.source_slots(plan)
        ctx = NativePrefill(
            self.decoder, self.memory.cache, plan, tokens, slots, sources, self.head_map
        )
        hidden = recover(ctx)
        for sequence, length in zip(sequences, plan.lengths, strict=True):
            sequence.num_computed = length

        return ctx, hidden

    def _report(self, ctx: NativePrefill, hidden: Hidden, sequences: list[SequenceState]) -> None:
        """Add what a pass has computed to the reports of its sequences."""
        # Wait for the last event before anything is read, so that reading waits for nothing else.
        stages = [ctx.seconds_of(number) for number in range(len(sequences))]
        ctx.flops.settle()
        recomputed = hidden.where & ctx.plan.grafted
        for i, (sequence, prompt) in enumerate(zip(sequences, ctx.plan.prompts, strict=True)):
            report = sequence.report
            report.recomputed_tokens = int(recomputed[prompt].sum())
            report.computed_share += int(ctx.computed[i]) / (sequence.num_prompt * ctx.num_layers)
            self.memory.admission.learn(sequence, int(ctx.computed[i]) / ctx.num_layers)
            report.ffn_flops += int(ctx.flops.ffn[i])
            report.flops += int(ctx.flops.attention[i] + ctx.flops.ffn[i])
            report.counts.update(ctx.counts[i])
            if num_rejected := int(ctx.rejected[prompt].sum()):
                report.counts["rejected_tokens"] = num_rejected
                self.memory.fallbacks["probe"] += 1
            for stage, seconds in stages[i].items():
                report.stages[stage] = report.stages.get(stage, 0.0) + seconds

    def _decode(self, sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            self.memory.reach(sequence, np.array([sequence.num_computed]))
        logits = self.steps.decode(sequences)
        best = most_likely(logits, [sequence.sampler for sequence in sequences])
        for sequence, row, token in zip(sequences, logits, best, strict=True):
            sequence.num_computed += 1
            self._accept(sequence, row, token)

    def _accept(self, sequence: SequenceState, logits: Tensor, best: int | None = None) -> None:
        sequence.accept(sequence.choose(logits, best), logits, self.decoder.config.eos_token_ids)

    def _retire(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.done]:
            self.memory.register(sequence, ended=True)
            self.memory.release(sequence)
            self.running.remove(sequence)


def _has_grafts(sequence: SequenceState) -> bool:
    return bool(sequence.admitted_plan.grafted.any())
