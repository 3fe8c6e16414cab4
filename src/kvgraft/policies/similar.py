"""Cross-query segment reuse: reuse the lower layers of near-duplicates, and compute the upper
ones."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.methods import (
    count_layers,
    require_amount,
    require_at_least,
    require_choice,
    require_layers,
)
from kvgraft.prefill.context import Hidden, Policy, PrefillContext

ProbeAt = Literal["output", "reused"]


@dataclass(frozen=True)
class Similar(Policy):
    """Partial-layer reuse with halos and an acceptance probe (cross-query segment reuse, splicing
    steps 2 to 4).

    Inside a segment the first layers are not computed. Their KV is grafted, and the tokens enter
    the next layer with the residual stream of their source. Halos and all other tokens are computed
    from the embedding. A segment is rejected, and computed, if the logits of its boundary tokens
    depend too much on where they were read.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "similar"
    recovers_in_place: ClassVar[bool] = False
    match: ClassVar[str] = "similar"

    reused_layers: int | None = None  # the first layers (L_reuse); None: `reused_share` of all
    reused_share: float = 0.375  # share of all layers, rounded up; 12 of 32 in the paper
    halo_tokens: int = 8  # computed at each edge of a segment (h)
    probe_tokens: int = 1  # tokens at each segment edge whose logits are compared; 0: no probe
    max_kl: float = 0.1  # nats, on average over these tokens; a segment with more is rejected
    # compare logits after all layers, or logits of the states that leave the reused layers
    probe_at: ProbeAt = "output"

    def __post_init__(self) -> None:
        require_layers(self, "reused_layers")
        require_at_least("halo_tokens", self.halo_tokens, 0)
        require_at_least("probe_tokens", self.probe_tokens, 0)
        require_amount("max_kl", self.max_kl)
        require_choice("probe_at", self.probe_at, get_args(ProbeAt))

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """The first layer above the reused ones."""
        return (
            min(count_layers(self.reused_layers, self.reused_share, num_layers), num_layers - 1),
        )

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Compute with the inside of all segments reused. If the probe rejects some, compute again
        without them."""
        [first_computed] = self.residual_layers(ctx.num_layers)
        bottom, top = range(first_computed), range(first_computed, ctx.num_layers)
        ctx.graft(range(ctx.num_layers))
        # Computing a token overwrites its cached state, so read it first.
        stored = ctx.residual(first_computed, ctx.plan.grafted)

        def enter(reused: Tensor) -> Hidden:
            computed = ctx.run(bottom, ctx.embed(ctx.plan.active & ~reused))
            return computed.joined(stored.only(reused))

        reused = ctx.plan.grafted & ~ctx.plan.edges(self.halo_tokens)
        entering, probed = enter(reused), self._probed(ctx, reused)
        if self.probe_at == "reused" and probed.any():
            rejected = self._rejected(ctx, stored.only(probed), entering.only(probed), reused)
            if rejected.any():
                entering = enter(reused & ~rejected)
        hidden = ctx.run(top, entering)
        if self.probe_at == "output" and probed.any():
            grafted = ctx.run(top, stored.only(probed))
            # The probe overwrote the KV of these tokens, so compute it again.
            ctx.run(top, entering.only(probed))
            rejected = self._rejected(ctx, grafted, hidden.only(probed), reused)
            if rejected.any():
                hidden = ctx.run(top, enter(reused & ~rejected))
        return hidden

    def _probed(self, ctx: PrefillContext, reused: Tensor) -> Tensor:
        """Outermost tokens of the segments that are reused in part: bool [T]."""
        segments = ctx.plan.segments
        return ctx.plan.edges(min(self.probe_tokens, self.halo_tokens)) & torch.isin(
            segments, segments[reused]
        )

    def _rejected(
        self, ctx: PrefillContext, grafted: Hidden, computed: Hidden, reused: Tensor
    ) -> Tensor:
        """Return the segments whose probed tokens have too different logits, with the states of
        their source and the computed ones. bool [T].

        Probed and rejected segments are counted.
        """
        segments = ctx.plan.segments
        there, here = (ctx.logits(hidden).log_softmax(-1) for hidden in (grafted, computed))
        # KL(here, there)
        divergence = F.kl_div(there, here, reduction="none", log_target=True).sum(-1).cpu()
        numbers, count = segments[computed.where], int(segments.max()) + 1
        means = torch.zeros(count).index_add_(0, numbers, divergence) / numbers.bincount(
            minlength=count
        )
        # The last element stands for tokens of no segment.
        bad = torch.zeros(count + 1, dtype=torch.bool)
        bad[segments[reused]] = True
        # Written as a negation, so that means that are not finite are rejected, too.
        bad[:-1] &= ~(means <= self.max_kl)
        for counts, prompt in zip(ctx.counts, ctx.plan.prompts, strict=True):
            mine = segments[prompt][reused[prompt]].unique()
            counts["probed_segments"] += mine.numel()
            counts["rejected_segments"] += int(bad[mine].sum())

        rejected = bad[segments]
        if rejected.any():
            ctx.reject(rejected)

        return rejected
