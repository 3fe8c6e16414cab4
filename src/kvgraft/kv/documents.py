"""Documents that were read on their own, whole and outside the page pool; of them a prompt keeps a
part (SamKV)."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class BlockCut:
    """How documents are cut (SamKV, section 4.1).

    Attributes:
        size: tokens of a block.
        initial, local: blocks at the beginning and at the end that are always kept; a document that
            has no more is kept whole.
    """

    size: int = 64
    initial: int = 1
    local: int = 2

    def count(self, num_tokens: int) -> int:
        """Blocks of a document, the last of which may be shorter."""
        return -(-num_tokens // self.size)

    def middle(self, num_tokens: int) -> range:
        """The blocks of a document that are not always kept."""
        count = self.count(num_tokens)
        first = min(self.initial, count)
        return range(first, max(count - self.local, first))

    def num_anchors(self, num_tokens: int) -> int:
        """Tokens of a document that are always kept."""
        return num_tokens - len(self.middle_tokens(num_tokens))

    def middle_tokens(self, num_tokens: int) -> range:
        """The tokens of the middle blocks."""
        middle = self.middle(num_tokens)
        return range(
            min(middle.start * self.size, num_tokens), min(middle.stop * self.size, num_tokens)
        )


@dataclass(frozen=True, eq=False)
class Document:
    """A text that was read on its own, from position 0, and what is known of its blocks at load
    time.

    Attributes:
        keys, values: [L, Hkv, n, d]; keys are rotated for positions 0..n-1.
        block_size: tokens of each of the B blocks, of which the last may be shorter.
        block_keys: [L, B, Hkv, d], the mean key of each block.
        local_query: [L, Hq, d], the mean query of the local blocks (Q_loc).
        exponents: float32 [L, B], of the power law by which the attention that a block's
            representative token receives decays: the smallest is the most important block (Appendix
            A.1). Infinite where too little text follows.
        attention: float32 [L, B], what it receives on average: the smallest is the most unimportant
            block.
        outliers: bool [L, n], representative tokens of middle blocks whose exponent is
            exceptionally small among these: to be recomputed.
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
        """n."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class DocumentStore:
    """Documents by their tokens and scope, least recently used out first.

    Args:
        capacity: bytes. What a running request holds stays until it ends, whether it is still here
            or not.
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
        """The document of these tokens int [n], read in this scope and cut like this."""
        key = _key(tokens, scope, blocks)
        if key in self._documents:
            self._documents.move_to_end(key)
        return self._documents.get(key)

    def put(self, tokens: np.ndarray, scope: bytes, blocks: BlockCut, document: Document) -> None:
        """Keep a document, in place of older ones if there is no room; one larger than the store is
        not kept."""
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
        """Forget all."""
        self._documents.clear()
        self.nbytes = 0


def _key(tokens: np.ndarray, scope: bytes, blocks: BlockCut) -> bytes:
    cut_as = np.array([blocks.size, blocks.initial, blocks.local], "<i8").tobytes()
    return hashlib.sha256(b"document" + scope + cut_as + tokens.astype("<i4").tobytes()).digest()
