"""The document protocol: operations of a host that keeps only a part of some documents (SamKV).

A prompt consists of documents, which the host has read on their own, and fresh tokens. The policy
sees the aligned KV of all documents in every layer. The host decides what it loads: a layer reads
only what it attends to from documents in host memory, and the prompt's pages hold what the policy
retains.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kv.documents import BlockCut, Document
from kvgraft.prefill.context import Hidden, Reduction

OverHeads = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Placed:
    """A document in a prompt: its tokens are [start, start + document.num_tokens)."""

    start: int
    document: Document

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + self.document.num_tokens


class DocumentLayout:
    """Positions of the documents of a prompt and of their blocks, which are numbered through all
    documents.

    Attributes:
        placed: the documents in order.
        block_of: int64 [T], the block of every token, -1 for tokens of no document.
        starts, stops: int64 [B], the token range of each block.
        owner: int64 [B], the document of each block.
        is_middle: bool [B]: neither initial nor local.
    """

    def __init__(self, placed: Sequence[Placed], blocks: BlockCut, num_tokens: int) -> None:
        self.placed = tuple(placed)
        starts, stops, owner, is_middle = [], [], [], []
        for number, at in enumerate(placed):
            count, size = at.document.num_tokens, at.document.block_size
            middle = blocks.middle(count)
            for block in range(blocks.count(count)):
                starts.append(at.start + block * size)
                stops.append(min(at.start + (block + 1) * size, at.stop))
                owner.append(number)
                is_middle.append(block in middle)

        self.starts, self.stops, self.owner = (
            torch.tensor(x, dtype=torch.int64) for x in (starts, stops, owner)
        )
        self.is_middle = torch.tensor(is_middle, dtype=torch.bool)
        self.block_of = torch.full((num_tokens,), -1)
        for block, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            self.block_of[start:stop] = block

    @property
    def lengths(self) -> list[int]:
        """Tokens of the documents."""
        return [at.document.num_tokens for at in self.placed]

    @cached_property
    def anchors(self) -> Tensor:
        """Tokens of initial and local blocks: bool [T]."""
        return self.tokens_of(~self.is_middle)

    def tokens_of(self, blocks: Tensor) -> Tensor:
        """Tokens of the blocks that are set in bool [B]: bool [T]."""
        found: Tensor = torch.cat((blocks, torch.tensor([False])))[self.block_of]
        return found

    def before(self, tokens: Tensor, count: int) -> Tensor:
        """Tokens of the blocks with a token in `tokens` bool [T], and of at most `count` blocks
        before each in its document: bool [T]."""
        near = torch.zeros(self.starts.numel() + 1, dtype=torch.bool)
        near[self.block_of[tokens]] = True
        near = near[:-1]
        for _ in range(count):
            follows = near[1:] & (self.owner[1:] == self.owner[:-1])
            near = torch.cat((near[:-1] | follows, near[-1:])) if near.numel() else near
        return self.tokens_of(near)

    def by_block(self, scores: Tensor) -> Tensor:
        """Greatest score of a token in each block: [T] -> [B]."""
        inside = self.block_of >= 0
        empty = scores.new_full((self.starts.numel(),), float("-inf"))
        return empty.scatter_reduce(0, self.block_of[inside], scores[inside], "amax")

    def fill(self, ranking: Tensor, num_tokens: int) -> Tensor:
        """Choose exactly `num_tokens` tokens of the blocks int [b], best block first, or all if
        there are fewer: bool [T].

        Of the last block the first tokens are chosen.
        """
        chosen = torch.zeros_like(self.block_of, dtype=torch.bool)
        sizes = (self.stops - self.starts)[ranking]
        left = (num_tokens - (sizes.cumsum(0) - sizes)).clamp(min=0).minimum(sizes)
        for block, count in zip(ranking.tolist(), left.tolist(), strict=True):
            start = int(self.starts[block])
            chosen[start : start + count] = True
        return chosen


class DocumentContext(ABC):
    """One prefill pass over one prompt. Queries and keys are of the heads that this rank has.

    Attributes:
        plan: the tokens of documents are `grafted`, all others fresh.
        layout: the documents and their blocks.
        num_layers: layers of the model.
        stable_layers: layers whose attention agrees on what is important (N*, Appendix A.2).
    """

    plan: Plan
    layout: DocumentLayout
    num_layers: int
    stable_layers: Sequence[int]

    @abstractmethod
    def embed(self, where: Tensor) -> Hidden:
        """Compute the embeddings of the tokens in `where` bool [T]."""

    @abstractmethod
    def layer(
        self,
        index: int,
        hidden: Hidden,
        *,
        sees: Tensor,
        writes: Tensor,
        outputs: Tensor,
        fuses: bool = False,
    ) -> Hidden:
        """Run one decoder layer for some tokens over some keys.

        Args:
            hidden: states that enter it.
            sees: bool [T], tokens whose keys and values are attended to by later queries.
            writes: bool [T], tokens of `hidden` whose keys and values are recomputed; those of the
                others stay.
            outputs: bool [T], tokens of `hidden` whose output is returned; they also see each other
                and what is written.
            fuses: `blend` recomputed KV of document tokens with the old KV instead of overwriting
                it.

        Returns:
            The states of `outputs`. Written KV stays only if it is retained (`retain`).

        Raises:
            ValueError: tokens to write or to output are not in `hidden`.
        """

    @abstractmethod
    def query(self) -> Tensor:
        """Queries of the last `layer` call: [n, Hq, d], rotated."""

    @abstractmethod
    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Reduce over all heads of the model, like `PrefillContext.over_heads`."""

    @abstractmethod
    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Softmax attention over all documents together that each of their tokens receives from
        `queries` bool [T]: float32 [T].

        It is summed over queries and heads, or its maximum is taken; 0 for other tokens. The query
        tokens must stand behind all documents, and the last `layer` call must have been of this
        layer and have included them.
        """

    @abstractmethod
    def block_keys(self, index: int, number: int) -> Tensor:
        """Mean keys [B, Hkv, d] of the blocks of a document, aligned."""

    @abstractmethod
    def local_query(self, index: int, number: int) -> Tensor:
        """Mean query [Hq, d] of the local blocks of a document, aligned (Q_loc)."""

    @abstractmethod
    def retain(self, kept: Tensor) -> None:
        """Set the tokens that stay in the cache: bool [L, T], equally many in each layer, including
        all fresh ones.

        In a later call, tokens that were retained before keep their computed KV.

        Raises:
            ValueError: the layers differ in number, or there are more tokens than the policy said.
        """


def cosine(one: Tensor, other: Tensor, over_heads: OverHeads) -> Tensor:
    """Cosines [...] of vectors float32 [..., x] that hold this rank's part of all heads."""
    pairs = (one, other), (one, one), (other, other)
    product, *squares = over_heads(torch.stack([(a * b).sum(-1) for a, b in pairs]))
    return product / (squares[0].sqrt() * squares[1].sqrt()).clamp(min=1e-8)


def blend(new: Sequence[Tensor], old: Sequence[Tensor], over_heads: OverHeads) -> list[Tensor]:
    """Return `theta * new + (1 - theta) * old` for keys and values, [n, Hkv, d] each (Eq. 4).

    theta is the cosine between a token's new and old KV.
    """
    one, other = (
        torch.cat([part.flatten(1) for part in pair], dim=1).float() for pair in (new, old)
    )
    theta = cosine(one, other, over_heads)[:, None, None].to(new[0].dtype)
    return [theta * a + (1 - theta) * b for a, b in zip(new, old, strict=True)]
