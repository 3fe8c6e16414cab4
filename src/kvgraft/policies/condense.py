"""Condense: keep the parts of many documents that the question attends to, and recompute all of
them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.methods import require_at_least, require_share
from kvgraft.prefill.documents.context import DocumentContext
from kvgraft.prefill.documents.keeping import KeepsDocuments, Recomputed


@dataclass(frozen=True)
class Condense(KeepsDocuments):
    """SamKV's frame with another choice: blocks by the greatest attention that one of their tokens
    receives, in rounds.

    KVGraft's own method; docs/results/samkv.md has the study. In each round the question attends to
    the tokens kept so far. The tokens that scored highest in earlier rounds join its queries, so
    that a fact is found to which another one leads. All layers keep the same tokens; the lowest
    layers do not take part in the choice.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "condense"

    block_tokens: int = 8
    recomputed: Recomputed = "kept"
    halo_blocks: int = 1
    rounds: int = 4  # rounds, which share the room evenly
    hop_tokens: int = 8  # document tokens that join the question after each round
    skipped_share: float = 0.25  # share of the lowest layers, whose attention does not count

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("rounds", self.rounds, 1)
        require_at_least("hop_tokens", self.hop_tokens, 0)
        require_share("skipped_share", self.skipped_share)
        if self.skipped_share == 1:
            raise ValueError(
                "skipped_share must be less than 1: the attention of some layer has to count"
            )

    def choose(self, ctx: DocumentContext) -> Tensor:
        """Fill the room with the blocks that hold the tokens most attended to."""
        layout, fresh, asking = ctx.layout, ctx.plan.fresh, ctx.plan.question
        kept = layout.anchors
        room = self.num_kept(layout.lengths) - int(kept.sum())
        middle = layout.is_middle.nonzero()[:, 0]
        # Fresh tokens are retained, so later rounds compute only the question again.
        ctx.retain(fresh.repeat(ctx.num_layers, 1))
        for number in range(self.rounds if room else 0):
            wanted = torch.zeros(ctx.plan.num_tokens)
            entering = ctx.plan.question if number else fresh
            for index in self.ask(
                ctx, kept | layout.before(kept, self.halo_blocks), asking, entering
            ):
                if index >= int(self.skipped_share * ctx.num_layers):
                    wanted = wanted.maximum(ctx.scores(index, asking, "max"))
            # Blocks that were chosen before stay.
            best = layout.by_block(wanted.masked_fill(kept, float("inf")))[middle]
            ranking = middle[best.argsort(descending=True, stable=True)]
            kept = layout.anchors | layout.fill(ranking, room * (number + 1) // self.rounds)
            asking = asking | ctx.plan.top(
                wanted, self.hop_tokens, among=ctx.plan.grafted & ~asking
            )

        return kept.repeat(ctx.num_layers, 1)
