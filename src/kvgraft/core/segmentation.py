"""Segmentation: borders and signatures of segments that may recur (cross-query reuse, segment
discovery)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvgraft.core.keys import window_hashes
from kvgraft.core.minhash import Permutations, compact, winnow
from kvgraft.methods import make, parse, require_at_least, require_share

ANCHORS = ("\nThought:", "\nAction:", "\nObservation:", "<tool_call>", "<tool_response>")
MAX_SEGMENT = 256  # tokens
# A window begins at the least of this number of shingles, which is about one in 16.
WINNOW = 32


@dataclass(frozen=True)
class Similarity:
    """Definition of near-duplicates; the names are those of the paper.

    Attributes:
        tau: least Jaccard similarity of the shingles of two segments. The paper has 0.8, which
            misses most of a text if a twentieth of it was edited. Tokens that differ are never
            grafted, so a low value does no harm.
        window_tokens: length of the overlapping windows.
        tolerance_tokens: greatest difference in length of two segments (r).
        context_tau: least similarity of the left contexts; 0 accepts any.
        context_tokens: length of the left context, the text before a segment (W).
        min_run_tokens: least number of identical tokens in a row to graft.
        shingle_tokens: length of a shingle (k).
        permutations: components of a signature.
        candidates: greatest number of stored segments that are aligned with a segment of a prompt
            (M).

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "similar"

    tau: float = 0.3
    window_tokens: int = 128
    tolerance_tokens: int = 16
    context_tau: float = 0.0
    context_tokens: int = 64
    min_run_tokens: int = 8
    shingle_tokens: int = 8
    permutations: int = 128
    candidates: int = 4

    def __post_init__(self) -> None:
        require_share("tau", self.tau)
        require_share("context_tau", self.context_tau)
        for name in ("shingle_tokens", "permutations", "candidates", "min_run_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("tolerance_tokens", self.tolerance_tokens, 0)
        require_at_least("window_tokens", self.window_tokens, 2 * self.shingle_tokens)
        require_at_least("context_tokens", self.context_tokens, self.shingle_tokens)

    @property
    def shortest(self) -> int:
        """Least number of tokens in a segment."""
        return max(self.window_tokens // 2, 2 * self.shingle_tokens)


def parse_match(text: str) -> Similarity | None:
    """Parse the matching of prompts: `exact` is None, `similar` or `similar:tau=0.7,...` a
    `Similarity`; otherwise ValueError."""
    name, options = parse("match", text)
    if name == "exact" and not options:
        return None
    return make("match", {"similar": Similarity}, name, options)


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments [start, stop) of one token sequence, with their signatures.

    Attributes:
        starts, stops: int64 [n].
        signatures: uint32 [n, P].
        contexts: compact signatures of their left contexts, uint8 [n, P]; 0 for segments without
            one.
    """

    starts: np.ndarray
    stops: np.ndarray
    signatures: np.ndarray
    contexts: np.ndarray


class Segmenter:
    """Cuts token sequences into segments.

    Args:
        options: lengths of segments, and settings of their signatures.
        anchors: token sequences that begin a segment wherever they occur.
    """

    def __init__(self, options: Similarity, anchors: Iterable[Sequence[int]] = ()) -> None:
        self.options = options
        self._anchors = [np.array(anchor, np.int32) for anchor in anchors if len(anchor)]
        self._permutations = Permutations(options.permutations)

    def cut(self, tokens: np.ndarray, scope: bytes, wanted: np.ndarray | None = None) -> Segments:
        """Cut tokens int32 [T] into windows and anchored segments. Signatures of different scopes
        are unrelated.

        Args:
            wanted: bool [T]; segments with fewer than `min_run_tokens` of these tokens are left
                out. None: all tokens.
        """
        options, shingles = self.options, window_hashes(tokens, self.options.shingle_tokens, scope)
        windows = winnow(shingles, WINNOW)
        anchored = self._anchored(tokens)
        starts = np.concatenate((windows, anchored[:-1]))
        stops = np.concatenate(
            (windows + options.window_tokens, np.minimum(anchored[1:], anchored[:-1] + MAX_SEGMENT))
        )
        stops = np.minimum(stops, len(tokens))
        long_enough = stops - starts >= options.shortest
        starts, stops = np.unique(np.stack((starts, stops))[:, long_enough], axis=1)
        if wanted is not None:
            before = np.concatenate(([0], np.cumsum(wanted)))
            useful = before[stops] - before[starts] >= options.min_run_tokens
            starts, stops = starts[useful], stops[useful]

        # The last tokens of a segment begin no shingle of it.
        lost = options.shingle_tokens - 1
        signatures = self._permutations.signatures(shingles, starts, stops - lost)
        contexts = np.zeros(
            (len(starts), options.permutations if options.context_tau else 0), np.uint8
        )
        if options.context_tau:
            has = starts > lost
            first = np.maximum(starts[has] - options.context_tokens, 0)
            contexts[has] = compact(
                self._permutations.signatures(shingles, first, starts[has] - lost)
            )

        return Segments(starts, stops, signatures, contexts)

    def _anchored(self, tokens: np.ndarray) -> np.ndarray:
        """Starts of the stretches between anchors, then the end of the last one, int64. No stretch
        is too short."""
        positions: list[int] = []
        for anchor in self._anchors:
            if len(anchor) <= len(tokens):
                windows = sliding_window_view(tokens, len(anchor))
                positions += np.flatnonzero((windows == anchor).all(axis=1)).tolist()
        cuts: list[int] = []
        for cut in sorted(positions):
            if not cuts or cut - cuts[-1] >= self.options.shortest:
                cuts.append(cut)
        return np.array([*cuts, len(tokens)] if cuts else [0], np.int64)
