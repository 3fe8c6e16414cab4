"""What a graft does to the next-token distributions at its edges: a policy, watched, and the truth
beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.guard.distances import kl_divergence
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.spreading import Spreading
from kvgraft_lab.evaluate.recording import PrefillRecord, Recording, Wrapped

EDGE = 8  # tokens at either end of a segment: the boundary, whatever the halo


@dataclass
class Seen:
    """One pass over a prompt. All logits are float32 [n, V] of the tokens in `edges`, or nothing if
    the policy has dropped some of them before the last layer.

    Attributes:
        plan: of the prompt; nothing is grafted in one that was computed in full.
        edges: bool [T], the boundary tokens of all segments.
        trusting: before anything was rejected.
        final: as they stay.
        trusting_last, last: likewise of the prompt's last token, float32 [V].
        probed: KL of each segment that the policy's own probe has compared, in nats, by number of
            the segment.
        rejected: bool [T], tokens that it did not trust.
    """

    plan: Plan | None = None
    edges: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    trusting: Tensor | None = None
    final: Tensor | None = None
    trusting_last: Tensor | None = None
    last: Tensor | None = None
    probed: dict[int, float] = field(default_factory=dict)
    rejected: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Watched(Wrapped):
    """Runs `policy`, and keeps what is seen at the boundary tokens."""

    name: ClassVar[str] = "watched"

    seen: Seen = field(default_factory=Seen)

    def around(self, recover: Callable[[PrefillContext], Hidden], ctx: PrefillContext) -> Hidden:
        seen = self.seen
        seen.plan, seen.edges = ctx.plan, ctx.plan.edges(EDGE)
        seen.rejected = torch.zeros_like(seen.edges)
        hidden = recover(_Watching(ctx, seen))
        seen.final, seen.last = _logits(ctx, hidden, seen.edges), _last_logits(ctx, hidden)
        return hidden


class _Watching(Recording):
    """Another context, of which the first pass through the last layer and the probe's logits are
    kept."""

    def __init__(self, inner: PrefillContext, seen: Seen) -> None:
        super().__init__(inner, PrefillRecord(computed=torch.zeros(inner.num_layers,
        inner.plan.num_tokens, dtype=torch.bool)),
                         score_layers=False)  # fmt: skip
        self._seen = seen
        self._stored: Tensor | None = None  # logits of the probe with what is stored

    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        after, seen = super().layer(index, hidden, spreading), self._seen
        if index == self.num_layers - 1 and seen.trusting_last is None and after.where[-1]:
            seen.trusting, seen.trusting_last = (
                _logits(self._inner, after, seen.edges),
                _last_logits(self._inner, after),
            )
        return after

    def logits(self, hidden: Hidden) -> Tensor:
        """The probe asks twice: with the residual stream of the source, and with what is
        computed."""
        logits = super().logits(hidden)
        if self._stored is None:
            self._stored = logits
            return logits
        divergence = kl_divergence(logits, self._stored).cpu()
        numbers = self.plan.segments[hidden.where]
        self._seen.probed |= {
            n: float(divergence[numbers == n].mean()) for n in numbers.unique().tolist()
        }
        self._stored = None
        return logits

    def reject(self, where: Tensor) -> None:
        super().reject(where)
        self._seen.rejected |= where


@dataclass(frozen=True, eq=False)
class Truth(Policy):
    """Full recomputation that keeps the logits of the tokens in `where` bool [T] in `logits`,
    float32 [n, V]."""

    name: ClassVar[str] = "truth"
    uses_grafts: ClassVar[bool] = False

    where: Tensor
    logits: list[Tensor] = field(default_factory=list)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """All layers on all tokens."""
        return self.recompute(ctx)

    def recompute(self, ctx: PrefillContext) -> Hidden:
        """The same.

        Raises:
            ValueError: some of the tokens are exact hits, or the prompt is computed in chunks.
        """
        hidden = super().recompute(ctx)
        if hidden.where.shape != self.where.shape:
            raise ValueError(
                f"the prompt has {self.where.numel()} tokens, this pass {hidden.where.numel()}"
            )
        self.logits.append(ctx.logits(hidden.only(self.where)).cpu())
        return hidden


def _last_logits(ctx: PrefillContext, hidden: Hidden) -> Tensor:
    return ctx.logits(Hidden(hidden.states[-1:], hidden.where))[0].cpu()


def _logits(ctx: PrefillContext, hidden: Hidden, where: Tensor) -> Tensor | None:
    if bool((where & ~hidden.where).any()):
        return None
    return ctx.logits(hidden.only(where)).cpu()
