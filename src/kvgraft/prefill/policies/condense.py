"""Condense: keeps of many documents what the question attends to, and recomputes all of that."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgraft.prefill.documents import DocumentContext
from kvgraft.prefill.keeping import KeepsDocuments, Recomputed
from kvgraft.prefill.options import require_at_least


@dataclass(frozen=True)
class Condense(KeepsDocuments):
    """SamKV's frame with another choice: blocks by their best token's attention in any layer, in rounds.

    Ours; docs/results/samkv.md has the study. Each round asks again over what the rounds before have chosen, so that a
    fact that is found by means of another one is found. The layers keep the same tokens.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "condense"

    recomputed: Recomputed = "kept"
    halo: int = 1
    rounds: int = 2  # that share the budget evenly

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("rounds", self.rounds, 1)

    def choose(self, ctx: DocumentContext) -> Tensor:
        """Fills the budget with the blocks that hold the tokens most attended to."""
        layout = ctx.layout
        kept = layout.anchors
        room = self.num_kept(layout.lengths) - int(kept.sum())
        middle = layout.is_middle.nonzero()[:, 0]
        for number in range(self.rounds if room else 0):
            wanted = torch.zeros(ctx.plan.num_tokens)
            for index in self.ask(ctx, kept):
                wanted = wanted.maximum(ctx.scores(index, ctx.plan.question, "max"))
            scores = layout.by_block(wanted.masked_fill(kept, float("inf")))[middle]  # what was chosen stays
            ranking = middle[scores.argsort(descending=True, stable=True)]
            kept = layout.anchors | layout.fill(ranking, room * (number + 1) // self.rounds)
        return kept.repeat(ctx.num_layers, 1)
