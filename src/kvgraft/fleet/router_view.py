"""What the servers of a fleet hold, as its router sees it: one bit for each of their
fingerprints."""

import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

# of a table; a row is what is told of a fingerprint, so that 2^44 different ones look alike
ROWS = 1 << 20
GRACE = 10.0  # seconds for which a server is taken to hold what was sent to it, whatever it says

Server = TypeVar("Server", bound=Hashable)  # what names one


def pack(values: np.ndarray) -> bytes:
    """A sketch: what a server tells of its fingerprints uint64 [n], about two bytes each."""
    rows = np.unique(values % np.uint64(ROWS)).astype(np.uint32)
    return zlib.compress(
        np.diff(rows, prepend=np.uint32(0)).astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes(),
        6,
    )


def unpack(sketch: bytes) -> np.ndarray:
    """The rows int64 [n] of a sketch. ValueError if it is none."""
    try:
        data = np.frombuffer(zlib.decompress(sketch), np.uint8)
        rows = data.reshape(4, -1).T.copy().view("<u4")[:, 0].cumsum(dtype=np.int64)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"no sketch: {error}") from error
    if len(rows) and rows[-1] >= ROWS:
        raise ValueError(f"no sketch: row {rows[-1]}, there are {ROWS}")
    return rows


class RouterView(Generic[Server]):
    """Which servers hold which fingerprints. It may take one for another, as hash tables do: with n
    fingerprints of a server it says so wrongly of one in ROWS / n.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._columns: dict[Server, int] = {}  # by server
        self._free: list[int] = []
        self._sketches: dict[Server, bytes] = {}  # the last of each
        self._held: dict[Server, np.ndarray] = {}  # its rows
        self._sent: dict[Server, deque[tuple[float, np.ndarray]]] = {}  # until when, and which rows
        self._drawn: dict[Server, np.ndarray] = {}  # rows with its bit
        self._bits = np.zeros((ROWS, 0), np.uint8)  # bytes of eight servers

    def update(self, server: Server, sketch: bytes) -> None:
        """A server has said what it holds. ValueError if that is no sketch; then nothing
        changes."""
        if self._sketches.get(server) != sketch:
            rows = unpack(sketch)
            self.add_server(server)
            self._held[server], self._sketches[server] = rows, sketch
        self._draw(server)

    def add_server(self, server: Server) -> None:
        """A server that may hold something; nothing by now."""
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
        """A server is gone, with all that it held."""
        if server in self._columns:
            self._held[server], self._sent[server] = np.zeros(0, np.int64), deque()
            self._draw(server)
            self._free.append(self._columns.pop(server))
            del self._held[server], self._sent[server], self._drawn[server]
            self._sketches.pop(server, None)

    def sent(self, server: Server, values: np.ndarray) -> None:
        """Text with these fingerprints uint64 [n] was sent to a server, which will say so itself
        some time later."""
        rows = (values % np.uint64(ROWS)).astype(np.int64)
        self._sent[server].append((self._clock() + GRACE, rows))
        column = self._columns[server]
        self._bits[rows, column // 8] |= np.uint8(1 << column % 8)
        self._drawn[server] = np.concatenate((self._drawn[server], rows))

    def where(self, values: np.ndarray, servers: Sequence[Server]) -> np.ndarray:
        """Which of these servers, all of them known, hold which of these fingerprints uint64 [n]:
        bool [servers, n]."""
        found = np.unpackbits(
            self._bits[(values % np.uint64(ROWS)).astype(np.int64)], axis=1, bitorder="little"
        )
        known: np.ndarray = found[:, [self._columns[server] for server in servers]].T.view(bool)
        return known

    def _draw(self, server: Server) -> None:
        """Set the bits of a server, and no others in its column."""
        column, sent, now = self._columns[server], self._sent[server], self._clock()
        while sent and sent[0][0] < now:
            sent.popleft()
        place, bit = column // 8, np.uint8(1 << column % 8)
        self._bits[self._drawn[server], place] &= ~bit
        self._drawn[server] = np.concatenate((self._held[server], *(rows for _, rows in sent)))
        self._bits[self._drawn[server], place] |= bit
