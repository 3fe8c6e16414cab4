"""Where a tier that machines share is, before it is opened."""

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field

from kvgraft.segments.store.backends import Backend, open_backend
from kvgraft.segments.store.chunk import ChunkRecord
from kvgraft.segments.store.secret import derive
from kvgraft.segments.store.shared import SharedTier, removal
from kvgraft.segments.store.signer import Signer


@dataclass(frozen=True)
class Sharing:
    """A shared tier that is still to be opened.

    Attributes:
        url: see `open_backend`.
        secret: 32 bytes that the servers of a fleet have in common.
        rank: of several, each of which has a part of the place of its own; None: there is one.
        timeout_s: for which one prompt waits, however much of it is asked for.
        capacity, quota: of a file system, see `FileBackend`.
    """

    url: str
    secret: bytes = field(repr=False)
    rank: int | None
    timeout_s: float
    capacity: int
    quota: float

    def open(self) -> "SharedTier":
        """The tier; see `open_backend` for what it raises. A place that cannot be reached is no
        error."""
        return SharedTier(self._backend(), self._own_secret, timeout_s=self.timeout_s)

    def remove(self, records: Iterable[ChunkRecord]) -> None:
        """Remove chunks for all who share the place, as its operator. Raises whatever the place's
        client raises."""
        seal = Signer(self._own_secret)
        with closing(self._backend()) as place:
            for record in records:
                place.remove(
                    seal.name(record), seal.close_record(removal(record.key, os.urandom(8)))
                )

    @property
    def _own_secret(self) -> bytes:
        """Of this rank: of one text each has other data of the same shape, which is not signed for
        the others."""
        return self.secret if self.rank is None else derive(self.secret, f"rank {self.rank}")

    def _backend(self) -> Backend:
        folder = "" if self.rank is None else f"rank-{self.rank}"
        return open_backend(self.url, folder, self.timeout_s, self.capacity, self.quota)
