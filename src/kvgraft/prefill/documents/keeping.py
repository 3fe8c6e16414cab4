"""Policies that keep a part of many documents, in the frame of SamKV (section 3)."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvgraft.kv.documents import BlockCut
from kvgraft.methods import require_at_least, require_choice, require_share
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.documents.context import DocumentContext

Recomputed = Literal["none", "anchors", "kept"]
Update = Literal["overwrite", "fusion"]


@dataclass(frozen=True)
class KeepsDocuments(Policy):
    """A policy for prompts of many documents that keeps some of their blocks. Without documents it
    is full prefill.

    Raises:
        ValueError: an option outside its range.
    """

    uses_grafts: ClassVar[bool] = False  # documents are no grafts: they lie outside the page pool

    block_tokens: int = 64  # tokens of a block
    initial_blocks: int = 1  # blocks at the beginning of each document that are always kept
    local_blocks: int = 2  # blocks at the end of each document that are always kept
    # greatest share of the documents' tokens that is kept, unless what is always kept is more
    kept_share: float = 0.15
    # kept tokens to recompute: none, the initial, local and outlier ones, or all
    recomputed: Recomputed = "anchors"
    # recomputed KV replaces the old KV, or is blended with it (Eq. 4)
    update: Update = "overwrite"
    # blocks before each kept one that recomputation also sees; they are dropped afterwards
    halo_blocks: int = 0

    def __post_init__(self) -> None:
        for option, least in (
            ("block_tokens", 1),
            ("initial_blocks", 0),
            ("local_blocks", 0),
            ("halo_blocks", 0),
        ):
            require_at_least(option, getattr(self, option), least)
        require_share("kept_share", self.kept_share)
        require_choice("recomputed", self.recomputed, get_args(Recomputed))
        require_choice("update", self.update, get_args(Update))

    @property
    def blocks(self) -> BlockCut:
        """Rule by which documents are cut into blocks."""
        return BlockCut(self.block_tokens, self.initial_blocks, self.local_blocks)

    def num_kept(self, lengths: Sequence[int]) -> int:
        """Greatest number of tokens that stay in each layer, for documents of these lengths."""
        anchors = sum(self.blocks.num_anchors(length) for length in lengths)
        return max(anchors, int(self.kept_share * sum(lengths) + 1e-9))

    @abstractmethod
    def choose(self, ctx: DocumentContext) -> Tensor:
        """Choose the document tokens to keep: bool [L, T], equally many in each layer, including
        all anchors."""

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Recompute everything. Only a host without documents calls this."""
        return self.recompute(ctx)

    def keep(self, ctx: DocumentContext, kept: Tensor | None = None) -> Hidden:
        """Choose tokens, drop the rest, recompute a part of the kept ones, and prefill the question
        over them (Figure 2).

        Args:
            kept: bool [L, T], the earlier choice for this prompt, when fewer tokens of its answer
                were known; None chooses.
        """
        kept = self.choose(ctx) if kept is None else kept
        ctx.retain(kept | ctx.plan.fresh)
        self._mend(ctx, kept)
        question = ctx.plan.question
        hidden = ctx.embed(question)
        for index in range(ctx.num_layers):
            hidden = ctx.layer(
                index, hidden, sees=kept[index] | ctx.plan.fresh, writes=question, outputs=question
            )
        return hidden

    def ask(
        self, ctx: DocumentContext, sees: Tensor, asking: Tensor, entering: Tensor
    ) -> Iterator[int]:
        """Prefill the fresh tokens in `entering` over the document tokens in `sees`, to learn what
        the question looks for.

        Yields each layer as soon as the queries of the tokens in `asking` are computed (section
        3.1). All masks are bool [T].
        """
        hidden, seen = ctx.embed(entering | asking), sees | ctx.plan.fresh
        for index in range(ctx.num_layers):
            hidden = ctx.layer(index, hidden, sees=seen, writes=entering, outputs=entering | asking)
            yield index

    def _mend(self, ctx: DocumentContext, kept: Tensor) -> None:
        """Recompute a part of the kept tokens (section 3.3).

        Layers keep different tokens. A token that is recomputed in a layer is computed in all
        layers below it (rule 1). In those it uses its cached KV unless it is recomputed there, too
        (rule 2).
        """
        fresh = ctx.plan.fresh & ~ctx.plan.question
        computed = self._recomputed(ctx, kept) | fresh  # [L, T]
        needed = computed.flip(0).cumsum(0).flip(0) > 0  # [L, T]: enters the layer
        if not needed.any():
            return

        hidden = ctx.embed(needed[0])
        for index in range(ctx.num_layers):
            outputs = needed[index + 1] if index + 1 < ctx.num_layers else torch.zeros_like(fresh)
            sees = kept[index] | fresh | ctx.layout.before(kept[index], self.halo_blocks)
            hidden = ctx.layer(
                index,
                hidden,
                sees=sees,
                writes=computed[index],
                outputs=outputs,
                fuses=self.update == "fusion",
            )

    def _recomputed(self, ctx: DocumentContext, kept: Tensor) -> Tensor:
        """Kept tokens to recompute: bool [L, T]."""
        if self.recomputed == "none":
            return torch.zeros_like(kept)
        if self.recomputed == "kept":
            return kept
        wanted = ctx.layout.anchors.repeat(ctx.num_layers, 1)
        for at in ctx.layout.placed:
            wanted[:, at.start : at.stop] |= at.document.outliers
        return kept & wanted
