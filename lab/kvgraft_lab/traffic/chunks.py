"""Reuse in chunks of fixed length, as by CacheBlend in LMCache, for comparison."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvgraft_lab.traffic.origins import Origin

CHUNK_TOKENS = 256  # LMCache's default


class FixedChunks:
    """Hits of fixed-length chunks beyond exact prefix caching.

    A prompt is cut at the beginnings of its messages, and each message into chunks of 256 tokens. A
    chunk is a hit if an earlier prompt had the same one at any position. The rest of a message is
    never a hit.

    Args:
        capacity: tokens of the chunk cache, in addition to the prefix cache; the least recently
            used go first.
    """

    def __init__(self, capacity: int | None, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_tokens = chunk_tokens
        self._capacity = None if capacity is None else capacity // chunk_tokens
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, tokens: np.ndarray, segments: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return the origins of a prompt's tokens, int16 [T], and store its chunks.

        Args:
            tokens: int32 [T].
            segments: beginnings of its messages, int64 [s].
            origins: origins under prefix caching alone, int16 [T].
        """
        found = origins.copy()
        for start, key in self._chunks(tokens, segments):
            here = slice(start, start + self._chunk_tokens)
            if key in self._known:
                found[here] = np.where(origins[here] == Origin.NEW, Origin.GRAFTED, origins[here])
        for _, key in self._chunks(tokens, segments):
            self._known[key] = None
            self._known.move_to_end(key)
        while self._capacity is not None and len(self._known) > self._capacity:
            self._known.popitem(last=False)
        found[-1] = Origin.NEW  # always computed
        return found

    def _chunks(self, tokens: np.ndarray, segments: np.ndarray) -> Iterator[tuple[int, bytes]]:
        size, data = self._chunk_tokens, tokens.astype("<i4").tobytes()
        for begin, end in pairwise([*segments.tolist(), len(tokens)]):
            for start in range(begin, end - size + 1, size):
                yield start, hashlib.sha256(data[4 * start : 4 * (start + size)]).digest()
