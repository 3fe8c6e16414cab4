"""Naive reuse: the lower baseline of the papers."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.prefill.context import Hidden, Policy, PrefillContext


@dataclass(frozen=True)
class Naive(Policy):
    """Use the aligned KV unchanged, and compute fresh tokens only ("naive reuse", SparseX 5.1)."""

    name: ClassVar[str] = "naive"
    recovers_in_place: ClassVar[bool] = False

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft all layers, then run the fresh tokens."""
        layers = range(ctx.num_layers)
        ctx.graft(layers)
        return ctx.run(layers, ctx.embed(ctx.plan.fresh))
