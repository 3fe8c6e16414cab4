"""Contents of a fleet's servers as the router sees them: one bit per server and fingerprint."""

import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

# Rows of the table. A sketch reveals only the row of a fingerprint, 20 of its 64 bits, so 2^44
# fingerprints look the same.
ROWS = 1 << 20
# seconds for which a server counts as holding text that was sent to it, even if its reports lack it
GRACE = 10.0

# identifier of a server
Server = TypeVar("Server", bound=Hashable)


def pack(values: np.ndarray) -> bytes:
    """Return the sketch of fingerprints uint64 [n], about two bytes each."""
    rows = np.unique(values % np.uint64(ROWS)).astype(np.uint32)
    return zlib.compress(
        np.diff(rows, prepend=np.uint32(0)).astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes(),
        6,
    )


def unpack(sketch: bytes) -> np.ndarray:
    """Return the rows int64 [n] of a sketch.

    Raises:
        ValueError: the bytes are not a sketch.
    """
    try:
        data = np.frombuffer(zlib.decompress(sketch), np.uint8)
        rows = data.reshape(4, -1).T.copy().view("<u4")[:, 0].cumsum(dtype=np.int64)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"no sketch: {error}") from error
    if len(rows) and rows[-1] >= ROWS:
        raise ValueError(f"no sketch: row {rows[-1]}, there are {ROWS}")
    return rows


class RouterView(Generic[Server]):
    """Table of the fingerprints that each server holds.

    Fingerprints in the same row are not distinguished. With n fingerprints of a server, a lookup is
    wrongly positive with probability n / ROWS.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # bit column of each server
        self._columns: dict[Server, int] = {}
        self._free: list[int] = []
        # the last sketch of each server
        self._sketches: dict[Server, bytes] = {}
        # rows of that sketch
        self._held: dict[Server, np.ndarray] = {}
        # rows of text that was sent to a server, and the time until which they count
        self._sent: dict[Server, deque[tuple[float, np.ndarray]]] = {}
        # rows in which the server's bit is set
        self._drawn: dict[Server, np.ndarray] = {}
        # each byte holds the bits of eight servers
        self._bits = np.zeros((ROWS, 0), np.uint8)

    def update(self, server: Server, sketch: bytes) -> None:
        """Replace a server's contents by those of a sketch.

        Raises:
            ValueError: the bytes are not a sketch; nothing changes.
        """
        if self._sketches.get(server) != sketch:
            rows = unpack(sketch)
            self.add_server(server)
            self._held[server], self._sketches[server] = rows, sketch
        self._draw(server)

    def add_server(self, server: Server) -> None:
        """Add a server that holds nothing yet."""
        if server in self._columns:
            return
        if not self._free:
            width = self._bits.shape[1]
            self._bits = np.pad(self._bits, ((0, 0), (0, max(width, 1))))
            self._free = list(range(8 * width, 8 * self._bits.shape[1]))[::-1]
        self._columns[server] = self._free.pop()
        self._held[server], self._sent[server] = np.zeros(0, np.int64), deque()
        self._drawn[server] = self._held[server]

    def remove_server(self, server: Server) -> None:
        """Remove a server and its contents."""
        if server in self._columns:
            self._held[server], self._sent[server] = np.zeros(0, np.int64), deque()
            self._draw(server)
            self._free.append(self._columns.pop(server))
            del self._held[server], self._sent[server], self._drawn[server]
            self._sketches.pop(server, None)

    def sent(self, server: Server, values: np.ndarray) -> None:
        """Mark fingerprints uint64 [n] as held by a server, until it can report them itself."""
        rows = (values % np.uint64(ROWS)).astype(np.int64)
        self._sent[server].append((self._clock() + GRACE, rows))
        column = self._columns[server]
        self._bits[rows, column // 8] |= np.uint8(1 << column % 8)
        self._drawn[server] = np.concatenate((self._drawn[server], rows))

    def where(self, values: np.ndarray, servers: Sequence[Server]) -> np.ndarray:
        """Return which of these servers hold which fingerprints.

        Args:
            values: fingerprints, uint64 [n].
            servers: known servers.

        Returns:
            bool [servers, n].
        """
        found = np.unpackbits(
            self._bits[(values % np.uint64(ROWS)).astype(np.int64)], axis=1, bitorder="little"
        )
        known: np.ndarray = found[:, [self._columns[server] for server in servers]].T.view(bool)
        return known

    def _draw(self, server: Server) -> None:
        """Set the bits of a server's rows, and clear the others in its column."""
        column, sent, now = self._columns[server], self._sent[server], self._clock()
        while sent and sent[0][0] < now:
            sent.popleft()
        place, bit = column // 8, np.uint8(1 << column % 8)
        self._bits[self._drawn[server], place] &= ~bit
        self._drawn[server] = np.concatenate((self._held[server], *(rows for _, rows in sent)))
        self._bits[self._drawn[server], place] |= bit
