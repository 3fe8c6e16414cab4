"""What a policy may ask of a host that keeps only a part of some documents: the protocol of SamKV.

A prompt is seen as documents, which the host has read on their own, among fresh tokens. To the
policy every layer has the aligned KV of all documents; what the host holds of it at a time is the
host's affair: of a document that lies in host memory a layer reads what it attends to, and the
pages of the prompt hold what the policy retains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvgraft.kv.documents import BlockCut, Document
from kvgraft.prefill.context import Hidden, Reduction
from kvgraft.prefill.plan import Plan

OverHeads = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Placed:
    """A document in a prompt: its tokens are [start, start + document.num_tokens)."""

    start: int
    document: Document

    @property
    def stop(self) -> int:
        """The token behind it."""
        return self.start + self.document.num_tokens


class DocumentLayout:
    """Where the documents of a prompt and their blocks lie; blocks are numbered through all
    documents.

    Attributes:
        placed: the documents in order.
        block_of: int64 [T], the block of every token, -1 for tokens of no document.
        starts, stops: int64 [B], the tokens of each block.
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
        """bool [T]: tokens of initial and local blocks."""
        return self.tokens_of(~self.is_middle)

    def tokens_of(self, blocks: Tensor) -> Tensor:
        """bool [T]: the tokens of the blocks that are set in bool [B]."""
        found: Tensor = torch.cat((blocks, torch.tensor([False])))[self.block_of]
        return found

    def before(self, tokens: Tensor, count: int) -> Tensor:
        """bool [T]: the tokens of at most `count` blocks before each block of the same document
        that has a token in `tokens` bool [T]."""
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
        """bool [T]: exactly `num_tokens` tokens of the blocks int [b], best first, or all of theirs
        if they have fewer; of the last block its first tokens."""
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
        num_layers: of the model.
        stable_layers: those whose attention agrees on what is important (N*, Appendix A.2).
    """

    plan: Plan
    layout: DocumentLayout
    num_layers: int
    stable_layers: Sequence[int]

    @abstractmethod
    def embed(self, where: Tensor) -> Hidden:
        """Embeddings of the tokens in `where` bool [T]."""

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
        """One decoder layer for some tokens over some keys.

        Args:
            hidden: what enters it.
            sees: bool [T], whose keys and values are attended to, as far as they stand before a
                query.
            writes: bool [T], of these tokens, whose keys and values are computed anew; those of the
                others stay.
            outputs: bool [T], of these tokens, whose output is wanted; they also see each other and
                what is written.
            fuses: `blend` what is computed for tokens of documents with what was there instead of
                overwriting it.

        Raises:
            ValueError: tokens to write or to output that are not in `hidden`.

        Returns:
            The states of `outputs`. What is written stays if it is retained (`retain`), else it is
            gone afterwards.
        """

    @abstractmethod
    def query(self) -> Tensor:
        """Queries of the last `layer` call: [n, Hq, d], rotated."""

    @abstractmethod
    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """As in `PrefillContext`."""

    @abstractmethod
    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """float32 [T]: the softmax attention over all documents together that each of their tokens
        receives from the tokens in `queries` bool [T], summed over them and over heads, or the
        greatest; 0 for other tokens. The tokens in `queries` stand behind all documents, and the
        last `layer` call was of this layer and included them."""

    @abstractmethod
    def block_keys(self, index: int, number: int) -> Tensor:
        """Mean keys [B, Hkv, d] of the blocks of a document, aligned."""

    @abstractmethod
    def local_query(self, index: int, number: int) -> Tensor:
        """The mean query [Hq, d] of the local blocks of a document, aligned (Q_loc)."""

    @abstractmethod
    def retain(self, kept: Tensor) -> None:
        """What stays in the cache: bool [L, T], as many tokens in each layer, among them all fresh
        ones. When it is called again, tokens that had stayed before are as they were computed.

        Raises:
            ValueError: the layers differ in number, or it is more than the policy said that it
                keeps.
        """


def cosine(one: Tensor, other: Tensor, over_heads: OverHeads) -> Tensor:
    """Cosines [...] of vectors float32 [..., x] that hold what is here of all heads."""
    pairs = (one, other), (one, one), (other, other)
    product, *squares = over_heads(torch.stack([(a * b).sum(-1) for a, b in pairs]))
    return product / (squares[0].sqrt() * squares[1].sqrt()).clamp(min=1e-8)


def blend(new: Sequence[Tensor], old: Sequence[Tensor], over_heads: OverHeads) -> list[Tensor]:
    """`theta * new + (1 - theta) * old`, theta the cosine between a token's new and old KV (Eq. 4);
    keys and values, [n, Hkv, d] each."""
    one, other = (
        torch.cat([part.flatten(1) for part in pair], dim=1).float() for pair in (new, old)
    )
    theta = cosine(one, other, over_heads)[:, None, None].to(new[0].dtype)
    return [theta * a + (1 - theta) * b for a, b in zip(new, old, strict=True)]
