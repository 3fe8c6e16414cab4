"""What MinHash proposes of agents' prompts, beside the engine: whether it is right, and how much of
what is known it finds (cross-query reuse, H3)."""

from collections.abc import Sequence

import msgspec
import numpy as np
from rapidfuzz.distance import LCSseq

from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import scope_digest
from kvgraft.core.segmentation import Similarity
from kvgraft.core.similar import SimilarIndex
from research.cross_query.asking import KnownText

SAME = 0.5  # of its tokens that a right proposal shares with its source, in order
_BLOCK = 16


class Proposal(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt that resemble an earlier one.

    Attributes:
        same: share of them that stand in the source in the same order.
        kl: at the boundary tokens of what is grafted of it, before anything is rejected; None where
            nothing is.
    """

    start: int
    stop: int
    same: float
    kl: float | None = None

    @property
    def is_right(self) -> bool:
        return self.same >= SAME


class Proposer:
    """An index that is given all prompts, whatever an engine would have kept of them.

    Attributes:
        known: tokens of the last prompt that earlier ones held in runs worth a graft, `covered` of
            them by right proposals.
    """

    def __init__(self, similarity: Similarity, anchors: Sequence[Sequence[int]]) -> None:
        blocks = VirtualBlockIndex(_BLOCK, lambda pages, versions: np.ones(len(pages), bool))
        self.known = self.covered = 0
        self._index = SimilarIndex(blocks, similarity, anchors)
        self._scope = scope_digest("proposals", "agents")
        self._prompts: list[np.ndarray] = []
        self._num_pages = 0
        self._text = KnownText()

    def propose(self, tokens: Sequence[int]) -> list[Proposal]:
        """What resembles text of the prompts before; this one is known from now on."""
        prompt = np.asarray(tokens, np.int32)
        found = [self._proposal(prompt, *one) for one in self._index.propose(prompt, self._scope)]
        known, covered = self._text.known(tokens), np.zeros(len(prompt), bool)
        for one in found:
            covered[one.start : one.stop] |= one.is_right
        self.known, self.covered = int(known.sum()), int((known & covered).sum())
        self._add(prompt)
        return found

    def _proposal(self, prompt: np.ndarray, here: range, source: int, there: range) -> Proposal:
        mine = prompt[here.start : here.stop].tolist()
        same = LCSseq.similarity(mine, self._prompts[source][there.start : there.stop].tolist())
        return Proposal(here.start, here.stop, same / len(mine))

    def _add(self, prompt: np.ndarray) -> None:
        count = len(prompt) // _BLOCK
        pages = np.arange(self._num_pages, self._num_pages + count, dtype=np.int32)
        entries = self._index.blocks.insert(
            prompt[: count * _BLOCK], pages, np.zeros(count, np.int64), source=len(self._prompts),
            source_start=0,
            scope=self._scope,
        )  # fmt: skip
        self._index.insert(entries, self._scope)
        self._num_pages += count
        self._prompts.append(prompt)
        self._text.add(prompt.tolist())
