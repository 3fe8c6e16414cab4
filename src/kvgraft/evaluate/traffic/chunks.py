"""Text found in chunks of fixed length, as by CacheBlend in LMCache: to compare with."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvgraft.evaluate.traffic.origins import Origin

CHUNK_TOKENS = 256  # LMCache's default


class FixedChunks:
    """What chunks of fixed length find beyond exact prefix caching.

    A prompt is cut at the beginnings of its messages, and each message from there on into chunks of
    256 tokens. A chunk is found if an earlier prompt had the same one, wherever; what is left of a
    message is never found.

    Args:
        capacity: tokens kept, the least recently used go first; beside those of the prefix cache.
    """

    def __init__(self, capacity: int | None, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_tokens = chunk_tokens
        self._capacity = None if capacity is None else capacity // chunk_tokens
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, tokens: np.ndarray, segments: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Origins int16 [T] of a prompt int32 [T] of which prefix caching alone finds `origins`;
        its chunks are kept.

        Args:
            segments: where its messages begin, int64 [s].
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
        found[-1] = Origin.NEW  # computed in any case
        return found

    def _chunks(self, tokens: np.ndarray, segments: np.ndarray) -> Iterator[tuple[int, bytes]]:
        size, data = self._chunk_tokens, tokens.astype("<i4").tobytes()
        for begin, end in pairwise([*segments.tolist(), len(tokens)]):
            for start in range(begin, end - size + 1, size):
                yield start, hashlib.sha256(data[4 * start : 4 * (start + size)]).digest()
