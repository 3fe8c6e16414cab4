"""Fingerprints of text, which describe the contents of a server without revealing them.

A fingerprint is a keyed digest of some bytes of text, at places that the text itself determines. So
equal text has equal fingerprints wherever it occurs. The key is the scope; without it a fingerprint
can be neither made nor tested.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvgraft.core.keys import check_scope, window_hashes

WINDOW = 64  # bytes that a fingerprint covers
SPACING = 128  # bytes between two fingerprints, on average; a power of two
# Text between two known neighbours counts as known up to this distance in bytes.
FARTHEST = 8 * SPACING


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Fingerprints of one text.

    Attributes:
        places: position of the first byte of each in the text, int64 [n], ascending.
        values: uint64 [n].
        num_bytes: length of the text.
    """

    places: np.ndarray
    values: np.ndarray
    num_bytes: int

    @classmethod
    def of(cls, text: bytes, scope: bytes) -> "Fingerprints":
        """Make the fingerprints of a text (UTF-8) in a scope (`scope_digest`)."""
        check_scope(scope)
        windows = window_hashes(np.frombuffer(text, np.uint8), WINDOW, scope)
        places = np.flatnonzero(windows & np.uint64(SPACING - 1) == 0)
        places = places[~_repeats(places, windows[places])]
        digests = [
            hashlib.blake2b(text[at : at + WINDOW], digest_size=8, key=scope).digest()
            for at in places.tolist()
        ]
        return cls(places, np.frombuffer(b"".join(digests), "<u8"), len(text))

    @classmethod
    def joined(cls, texts: Iterable["Fingerprints"]) -> "Fingerprints":
        """Join the fingerprints of texts that follow each other. No fingerprint crosses a
        border."""
        parts = list(texts)
        starts = np.cumsum([0, *(part.num_bytes for part in parts)])
        places = [
            part.places + start for part, start in zip(parts, starts[:-1].tolist(), strict=True)
        ]
        empty = np.zeros(0, np.int64)
        values = np.concatenate([*(part.values for part in parts), empty.astype(np.uint64)])
        return cls(np.concatenate([*places, empty]), values, int(starts[-1]))

    def chain(self) -> np.ndarray:
        """Name of each fingerprint together with all before it: uint64 [n]."""
        return self._chained

    @cached_property
    def _chained(self) -> np.ndarray:
        chained, last = np.empty_like(self.values), b""
        for number, value in enumerate(self.values.tolist()):
            last = hashlib.blake2b(last + value.to_bytes(8, "little"), digest_size=8).digest()
            chained[number] = int.from_bytes(last, "little")
        return chained

    def known_bytes(self, known: np.ndarray) -> np.ndarray:
        """Number of bytes that are known if these fingerprints bool [..., n] are: float64 [...],
        whole numbers.

        Each stands for its window. Two known neighbours also stand for the text between them, up to
        a limit.
        """
        gaps = np.diff(self.places)
        # Windows that overlap are counted once.
        reach = np.append(np.minimum(gaps, WINDOW), [WINDOW] * bool(len(self.places)))
        bridged = known[..., :-1] & known[..., 1:] & (gaps <= FARTHEST)
        # products of floats are much faster than those of integers
        found: np.ndarray = known.astype(float) @ reach + bridged.astype(float) @ (
            gaps - reach[:-1]
        )
        return found


def _repeats(places: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return which windows overlap an equal one before them, bool [n]. In "aaaa" all or none would
    be chosen otherwise."""
    order = np.lexsort((places, windows))
    is_near = np.diff(places[order]) < WINDOW
    repeats = np.zeros(len(places), bool)
    repeats[order[1:]] = is_near & (windows[order[1:]] == windows[order[:-1]])
    return repeats
