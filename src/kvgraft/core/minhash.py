"""MinHash of token segments, and banded LSH that proposes similar ones (cross-query reuse, segment
discovery).

Shingles are windows of k tokens, hashed by `keys.window_hashes` under the scope, so signatures of
two namespaces are unrelated. The result is only a proposal: tokens are compared before anything is
reused.
"""

from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvgraft.core.keys import block_hashes

_CHUNK = 1 << 14  # shingles permuted at a time
# values of a stored component: its low byte (b-bit minwise hashing, Li and König 2010, b = 8)
_BITS = 256


class Permutations:
    """P random maps of 64-bit hashes, `(a x + b) >> 32`, and the minima of segments under them.

    Args:
        count: P.
        seed: equal seeds give equal maps.
    """

    def __init__(self, count: int, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self._factors = random.integers(0, 1 << 63, count, np.uint64) * np.uint64(2) + np.uint64(1)
        self._terms = random.integers(0, 1 << 63, count, np.uint64)

    def signatures(self, hashes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Least image of the hashes [start, stop) of each segment under each map: uint32 [n, P].

        Args:
            hashes: uint64 [T].
            starts, stops: int64 [n], not empty, starts ascending.
        """
        signatures = np.empty((len(starts), len(self._factors)), np.uint32)
        first = 0
        while first < len(starts):  # segments that begin within one chunk of hashes
            base = int(starts[first])
            last = int(np.searchsorted(starts, base + _CHUNK))
            images = self._images(hashes[base : int(stops[first:last].max())])
            edges = np.stack((starts[first:last], stops[first:last]), axis=1).ravel() - base
            signatures[first:last] = np.minimum.reduceat(images, edges, axis=0)[::2]
            first = last
        return signatures

    def _images(self, hashes: np.ndarray) -> np.ndarray:
        """Images of the hashes, uint32 [t + 1, P]. The last row is the maximum, so that a segment
        may end before it."""
        images = np.full((len(hashes) + 1, len(self._factors)), np.iinfo(np.uint32).max, np.uint32)
        images[:-1] = (hashes[:, None] * self._factors + self._terms) >> np.uint64(32)
        return images


def compact(signatures: np.ndarray) -> np.ndarray:
    """Low byte of each component: uint8 [n, P]."""
    return signatures.astype(np.uint8)


def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Estimate the Jaccard similarity from compact signatures uint8 [n, P]: float64 [n].

    It is corrected for equal bytes of different components, so that unrelated segments are near 0.
    """
    return ((left == right).mean(axis=1) * _BITS - 1) / (_BITS - 1)


@lru_cache(maxsize=16)
def bands(threshold: float, permutations: int, miss_weight: float = 0.5) -> tuple[int, int]:
    """Return the number of bands, and of components in each, that best separate pairs at the
    threshold.

    A pair of similarity s is proposed with probability `1 - (1 - s^r)^b`. The function minimises
    the area of false proposals below the threshold plus that of misses above it, weighted by
    `miss_weight`.
    """
    similarities = np.linspace(0, 1, 1001)
    below = similarities < threshold
    best, least = (1, 1), np.inf
    for count in range(1, permutations + 1):
        rows = np.arange(1, permutations // count + 1)[:, None]
        proposed = 1 - (1 - similarities**rows) ** count  # [r, s]
        false, missed = (proposed * below).sum(axis=1), ((1 - proposed) * ~below).sum(axis=1)
        errors = (1 - miss_weight) * false + miss_weight * missed
        if errors.min() < least:
            best, least = (count, int(errors.argmin()) + 1), float(errors.min())
    return best


def band_keys(signatures: np.ndarray, count: int, rows: int, scope: bytes) -> np.ndarray:
    """Bucket of each band in this scope, uint64 [n, count]. It is equal if all components of the
    band are equal."""
    parts = signatures[:, : count * rows].reshape(-1, count, rows)
    number = np.broadcast_to(np.arange(count, dtype=np.uint32)[:, None], (len(parts), count, 1))
    return block_hashes(
        np.concatenate((parts, number), axis=2).reshape(-1, rows + 1), scope
    ).reshape(-1, count)


def winnow(hashes: np.ndarray, span: int) -> np.ndarray:
    """Offsets whose hash is the least of some `span` consecutive ones, ascending, int64 (Schleimer
    et al. 2003).

    Equal text has equal offsets wherever it occurs. Every `span` contains at least one.
    """
    if len(hashes) < span:
        return np.flatnonzero(hashes == hashes.min(initial=np.iinfo(np.uint64).max))[:1]
    return np.unique(
        np.arange(len(hashes) - span + 1) + sliding_window_view(hashes, span).argmin(axis=1)
    )
