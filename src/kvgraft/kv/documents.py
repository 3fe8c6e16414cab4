"""Documents that were computed alone, whole and outside the page pool. A prompt keeps a part of
them (SamKV).
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class BlockCut:
    """Cut of documents into blocks (SamKV, section 4.1).

    Attributes:
        size: tokens of a block.
        initial, local: blocks at the beginning and at the end that are always kept. A document
            without other blocks is kept whole.
    """

    size: int = 64
    initial: int = 1
    local: int = 2

    def count(self, num_tokens: int) -> int:
        """Return the number of blocks of a document. The last one may be shorter."""
        return -(-num_tokens // self.size)

    def middle(self, num_tokens: int) -> range:
        """Return the blocks of a document that are not always kept."""
        count = self.count(num_tokens)
        first = min(self.initial, count)
        return range(first, max(count - self.local, first))

    def num_anchors(self, num_tokens: int) -> int:
        """Return the number of tokens of a document that are always kept."""
        return num_tokens - len(self.middle_tokens(num_tokens))

    def middle_tokens(self, num_tokens: int) -> range:
        """Return the tokens of the middle blocks."""
        middle = self.middle(num_tokens)
        return range(
            min(middle.start * self.size, num_tokens), min(middle.stop * self.size, num_tokens)
        )


@dataclass(frozen=True, eq=False)
class Document:
    """A text that was computed alone, from position 0, and statistics of its blocks.

    Attributes:
        keys, values: [L, Hkv, n, d]; keys are rotated for positions 0..n-1.
        block_size: tokens of each of the B blocks; the last may be shorter.
        block_keys: [L, B, Hkv, d], the mean key of each block.
        local_query: [L, Hq, d], the mean query of the local blocks (Q_loc).
        exponents: float32 [L, B], exponent of the power law by which the attention to a block's
            representative token decays: the smallest is the most important block (Appendix A.1).
            Infinite where too little text follows.
        attention: float32 [L, B], mean attention to that token: the smallest is the least important
            block.
        outliers: bool [L, n], representative tokens of middle blocks with an exceptionally small
            exponent: to be recomputed.
    """

    keys: Tensor
    values: Tensor
    block_size: int
    block_keys: Tensor
    local_query: Tensor
    exponents: Tensor
    attention: Tensor
    outliers: Tensor

    @property
    def num_tokens(self) -> int:
        """n, the number of tokens."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class DocumentStore:
    """Documents by tokens and scope, with least-recently-used eviction.

    Args:
        capacity: bytes. A document of a running request lives until the request ends, even after
            its eviction.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(
                f"the capacity of the document store must be at least 0 bytes, got {capacity}"
            )
        self.capacity = capacity
        self.nbytes = 0
        self._documents: OrderedDict[bytes, Document] = OrderedDict()

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, tokens: np.ndarray, scope: bytes, blocks: BlockCut) -> Document | None:
        """Return the document of tokens int [n] in this scope and with this cut, or None."""
        key = _key(tokens, scope, blocks)
        if key in self._documents:
            self._documents.move_to_end(key)
        return self._documents.get(key)

    def put(self, tokens: np.ndarray, scope: bytes, blocks: BlockCut, document: Document) -> None:
        """Store a document, and evict older ones if there is no room. A document larger than the
        store is not kept.
        """
        if document.nbytes > self.capacity:
            return
        key = _key(tokens, scope, blocks)
        if (before := self._documents.pop(key, None)) is not None:
            self.nbytes -= before.nbytes
        self._documents[key] = document
        self.nbytes += document.nbytes
        while self.nbytes > self.capacity:
            self.nbytes -= self._documents.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget all documents."""
        self._documents.clear()
        self.nbytes = 0


def _key(tokens: np.ndarray, scope: bytes, blocks: BlockCut) -> bytes:
    cut_as = np.array([blocks.size, blocks.initial, blocks.local], "<i8").tobytes()
    return hashlib.sha256(b"document" + scope + cut_as + tokens.astype("<i4").tobytes()).digest()
