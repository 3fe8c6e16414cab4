"""EPIC: recompute the beginning of every segment."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.methods import require_at_least
from kvgraft.prefill.context import Hidden, Policy, PrefillContext


@dataclass(frozen=True)
class Epic(Policy):
    """Recompute the first tokens of every segment, which were attention sinks at their source
    (EPIC, LegoLink-16).

    Source: Hu et al., "EPIC: Efficient Position-Independent Caching for Serving Large Language
    Models", 2024.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "epic"
    recovers_in_place: ClassVar[bool] = False

    start_tokens: int = 16  # N: recomputed at the beginning of each segment

    def __post_init__(self) -> None:
        require_at_least("start_tokens", self.start_tokens, 0)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Graft all layers, then run the fresh tokens and the segment starts."""
        layers = range(ctx.num_layers)
        ctx.graft(layers)
        return ctx.run(
            layers, ctx.embed(ctx.plan.fresh | ctx.plan.segment_starts(self.start_tokens))
        )
