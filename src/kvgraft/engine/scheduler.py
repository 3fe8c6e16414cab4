"""Continuous batching: admit what fits, prefill it in batches by policy, decode everything that runs."""

import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.engine.memory import Memory
from kvgraft.engine.prefill import NativePrefill
from kvgraft.engine.sequence import Sequence
from kvgraft.kernels.dispatch import varlen_attention
from kvgraft.kernels.layout import VarlenLayout
from kvgraft.kv.pages import PoolExhausted
from kvgraft.prefill.context import Policy
from kvgraft.prefill.plan import Plan
from kvgraft.prefill.policies import Full


class Scheduler:
    """Steps of the engine. A waiting sequence is never overtaken; a running one never loses its pages.

    Args:
        max_prefill_tokens: prompt tokens admitted per step (one prompt always is).
    """

    def __init__(self, decoder: Decoder, memory: Memory, max_prefill_tokens: int) -> None:
        self.decoder = decoder
        self.memory = memory
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @torch.inference_mode()
    def step(self) -> None:
        """Admit and prefill, or decode one token for all running sequences, or both."""
        decoding = list(self.running)
        admitted = self._admit()
        groups: dict[Policy, list[Sequence]] = {}
        for sequence in admitted:
            groups.setdefault(sequence.policy, []).append(sequence)
        try:
            for policy, sequences in groups.items():
                self._prefill(policy, sequences)
        except BaseException:
            self._requeue(admitted)
            raise
        if decoding:
            self._decode(decoding)
        self._retire()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Forget these sequences, whatever their state."""
        for sequence in sequences:
            if sequence in self.running:
                self.running.remove(sequence)
                self.memory.release(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        num_tokens = 0
        while self.waiting and (not admitted or num_tokens + self.waiting[0].num_prompt <= self.max_prefill_tokens):
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

    def _requeue(self, admitted: list[Sequence]) -> None:
        """A policy failed: what has not been prefilled waits again, so that nobody decodes from unwritten pages."""
        for sequence in reversed(admitted):
            if sequence.first_token_pending:
                self.running.remove(sequence)
                self.memory.release(sequence)
                self.waiting.appendleft(sequence)

    def _prefill(self, policy: Policy, sequences: list[Sequence]) -> None:
        """One pass over a batch; prompts whose grafts led to non-finite logits are recomputed in full."""
        logits = self._recover(policy, sequences)  # [b, V]
        for sequence in sequences:
            self.memory.unpin_sources(sequence)
        grafted = [bool(sequence.plan is not None and sequence.plan.grafted.any()) for sequence in sequences]
        broken = [i for i, finite in enumerate(logits.isfinite().all(-1).tolist()) if grafted[i] and not finite]
        if broken:
            again = [sequences[i] for i in broken]
            for sequence in again:
                self.memory.drop_grafts(sequence, "non_finite")
            logits[broken] = self._recover(Full(), again)
        for sequence, row in zip(sequences, logits, strict=True):
            self._accept(sequence, row)
            self.memory.offer(sequence)

    def _recover(self, policy: Policy, sequences: list[Sequence]) -> Tensor:
        """Logits [b, V] after each prompt."""
        plan = Plan.batch([sequence.plan for sequence in sequences if sequence.plan is not None])
        tokens = torch.cat([torch.from_numpy(sequence.prompt) for sequence in sequences])
        slots = [sequence.slots for sequence in sequences]
        ctx = NativePrefill(self.decoder, self.memory.cache, plan, tokens, slots)
        hidden = policy.recover(ctx)
        logits = self.decoder.logits(ctx.last_hidden(hidden))
        recomputed = hidden.where & plan.grafted
        for i, (sequence, prompt) in enumerate(zip(sequences, plan.prompts, strict=True)):
            report = sequence.report
            report.recomputed_tokens = int(recomputed[prompt].sum())
            report.computed_share += int(ctx.computed[i]) / (sequence.num_prompt * ctx.num_layers)
            report.flops += int(ctx.flops[i])
            for stage, seconds in ctx.stages.items():
                report.stages[stage] = report.stages.get(stage, 0.0) + seconds
        return logits

    def _decode(self, sequences: list[Sequence]) -> None:
        decoder, cache = self.decoder, self.memory.cache
        tokens = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=decoder.device)
        positions = [torch.tensor([sequence.num_computed]) for sequence in sequences]
        layout = VarlenLayout.of(positions, [sequence.slots for sequence in sequences])
        cos, sin = decoder.config.rope.table(layout.query_positions)
        hidden = decoder.embed(tokens)  # [b, D]
        for layer in range(decoder.config.num_layers):
            query, keys, values = decoder.project(layer, hidden, cos, sin)
            cache.write(layer, layout.query_slots, keys, values)
            scale = decoder.config.head_dim**-0.5
            attended = varlen_attention(query, cache.keys[layer], cache.values[layer], layout, scale)
            hidden = decoder.finish(layer, hidden, attended.flatten(1))
        for sequence, row in zip(sequences, decoder.logits(hidden), strict=True):
            self._accept(sequence, row)

    def _accept(self, sequence: Sequence, logits: Tensor) -> None:
        sequence.accept(sequence.sampler.sample(logits), logits, self.decoder.config.eos_token_ids)

    def _retire(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.done]:
            self.memory.offer(sequence)
            self.memory.release(sequence)
            self.running.remove(sequence)
