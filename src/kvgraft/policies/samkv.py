"""SamKV: sparse attention across the KV caches of many documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvgraft.kv.documents import Document
from kvgraft.methods import require_choice
from kvgraft.prefill.documents.context import DocumentContext, OverHeads, cosine
from kvgraft.prefill.documents.keeping import KeepsDocuments, Update

Switch = Literal["on", "off"]


@dataclass(frozen=True)
class SamKV(KeepsDocuments):
    """Keep of each document the initial and local blocks, and the middle blocks that best match the
    query; recompute initial, local and outlier tokens.

    The query of a document combines the question and the other documents; it is compared with the
    mean key of each block.

    Source: Cao et al., "Sparse Attention across Multiple-context KV Cache", 2026, sections 3.1 to
    3.3 and Appendix A.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "samkv"

    # greatest share of the documents' tokens that is kept; the paper has no such limit (1.0)
    kept_share: float = 1.0
    update: Update = "fusion"
    selection: Switch = "on"  # off: only initial and local blocks
    bias: Switch = "on"  # off: every document is scored by the generic query (no Eq. 1)
    # off: `kept_share` is always filled, without Eq. 2, Eq. 3 and the filter by documents
    top_p: Switch = "on"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("selection", "bias", "top_p"):
            require_choice(option, getattr(self, option), get_args(Switch))
        if self.initial_blocks == self.local_blocks == 0 and self.selection == self.top_p == "on":
            raise ValueError(
                "initial and local must not both be 0: their blocks are the anchors of Eq. 2 (or "
                "set top_p=off)"
            )

    def num_kept(self, lengths: Sequence[int]) -> int:
        """Greatest number of kept tokens: the initial and local blocks, and as many selected tokens
        as the documents have on average (section 3.2, the last paragraph)."""
        anchors = sum(map(self.blocks.num_anchors, lengths))
        if self.selection == "off" or not lengths:
            return anchors
        most = super().num_kept(lengths)
        return min(most, anchors + sum(lengths) // len(lengths)) if self.top_p == "on" else most

    def choose(self, ctx: DocumentContext) -> Tensor:
        """Choose the kept tokens by sections 3.1 and 3.2."""
        layout, lengths = ctx.layout, ctx.layout.lengths
        fresh, question = ctx.plan.fresh, ctx.plan.question
        asked = self.ask(ctx, layout.anchors, question, fresh)
        # [L, Hq, d]
        generic = torch.stack([ctx.query()[question[fresh]].float().mean(0) for _ in asked])
        kept = layout.anchors.repeat(ctx.num_layers, 1)
        if self.selection == "off" or not layout.is_middle.any():
            return kept

        scores = self._scores(ctx, generic)
        num_tokens = self.num_kept(lengths) - int(layout.anchors.sum())
        retrieved = layout.is_middle.repeat(ctx.num_layers, 1)
        if self.top_p == "on":
            retrieved = self._retrieve(ctx, scores)
            most = [int((layout.stops - layout.starts)[found].sum()) for found in retrieved]
            num_tokens = min(num_tokens, *most)

        normed = _normed(ctx, scores, retrieved)
        for index in range(ctx.num_layers):
            ranking = normed[index].argsort(descending=True, stable=True)
            kept[index] |= layout.fill(ranking[retrieved[index][ranking]], num_tokens)

        return kept

    def _scores(self, ctx: DocumentContext, generic: Tensor) -> Tensor:
        """Scores of every block for the query of its document, [L, B]."""
        layers, numbers = range(ctx.num_layers), range(len(ctx.layout.placed))
        queries = generic[:, None].expand(-1, len(numbers), -1, -1)  # [L, D, Hq, d]
        if self.bias == "on":
            local = [
                torch.stack([ctx.local_query(index, number) for number in numbers])
                for index in layers
            ]
            queries = personalise(generic, torch.stack(local).float(), ctx.over_heads)

        matched = [
            torch.cat(
                [match(queries[index, number], ctx.block_keys(index, number)) for number in numbers]
            )
            for index in layers
        ]
        return ctx.over_heads(torch.stack(matched)).cpu()

    def _retrieve(self, ctx: DocumentContext, scores: Tensor) -> Tensor:
        """Best share P of the middle blocks of each document and layer: bool [L, B] (Eq. 2 and
        3)."""
        layout, stable = ctx.layout, list(ctx.stable_layers)
        retrieved = torch.zeros_like(scores, dtype=torch.bool)
        for number, at in enumerate(ctx.layout.placed):
            mine = layout.owner == number
            middle = layout.is_middle[mine]
            if not middle.any():
                continue
            share = self.shares(at.document, scores[:, mine], middle)[stable].mean()
            of_middle = scores[:, mine][:, middle]  # [L, b]
            top = of_middle.topk(math.ceil(float(share) * of_middle.shape[1]), dim=1).indices
            retrieved.scatter_(1, (mine & layout.is_middle).nonzero()[:, 0][top], True)
        return retrieved

    def shares(self, document: Document, scores: Tensor, middle: Tensor) -> Tensor:
        """Retrieved share P of each layer [L] (Eq. 2).

        Args:
            scores: [L, b], of a document's blocks.
            middle: bool [b], its middle blocks.
        """
        of_middle = scores[:, middle]
        best = of_middle.gather(1, document.exponents[:, middle].argmin(1, keepdim=True))[:, 0]
        worst = of_middle.gather(1, document.attention[:, middle].argmin(1, keepdim=True))[:, 0]
        return retrieved_share(best, scores[:, ~middle].mean(1), worst)


def personalise(generic: Tensor, local: Tensor, over_heads: OverHeads) -> Tensor:
    """Add to the generic query of each document what the other documents look for (Eq. 1).

    [..., Hq, d] and [..., D, Hq, d] -> [..., D, Hq, d].
    """
    generic = generic.unsqueeze(-3).expand_as(local)
    weighted = (
        cosine(generic.flatten(-2), local.flatten(-2), over_heads).abs()[..., None, None] * local
    )
    others = max(local.shape[-3] - 1, 1)
    return generic + (weighted.sum(-3, keepdim=True) - weighted) / others


def match(query: Tensor, keys: Tensor) -> Tensor:
    """Inner products over these heads: query [Hq, d], keys [B, Hkv, d] -> [B]."""
    by_group = query.unflatten(0, (keys.shape[1], -1)).sum(1)  # [Hkv, d]
    return (keys.float() * by_group).sum((1, 2))


def retrieved_share(best: Tensor, anchor: Tensor, worst: Tensor) -> Tensor:
    """Retrieved share P of each layer (Eq. 2), from the scores of the most important block, the
    anchors, and the least important block: [L] each."""
    inside = (worst < anchor) & (anchor <= best)
    return torch.where(inside, (best - anchor) / (best - worst), torch.zeros_like(best))


def _normed(ctx: DocumentContext, scores: Tensor, retrieved: Tensor) -> Tensor:
    """Scores [L, B] that are comparable between documents: mean 0 and deviation 1 over the
    retrieved blocks of each, bool [L, B]; -inf elsewhere."""
    normed = torch.full_like(scores, float("-inf"))
    for number in range(len(ctx.layout.placed)):
        mine = retrieved & (ctx.layout.owner == number)
        count = mine.sum(1, keepdim=True).clamp(1)
        own = torch.where(mine, scores, 0.0)
        shifted = torch.where(mine, scores - own.sum(1, keepdim=True) / count, 0.0)
        deviation = (shifted.square().sum(1, keepdim=True) / count).sqrt().clamp(1e-9)
        normed = torch.where(mine, shifted / deviation, normed)
    return normed
