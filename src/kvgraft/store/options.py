"""Options of the tiers below device memory."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from kvgraft.core.options import StoreFields
from kvgraft.core.segmentation import Similarity
from kvgraft.setting_schema import check_declared
from kvgraft.store.backends import check_url, is_server, local_directory, without_password
from kvgraft.store.files import check_private_directory
from kvgraft.store.secret import CACHE_SECRET, check_secret, find_secret, given_secret
from kvgraft.store.shared import Sharing
from kvgraft.store.store import SegmentStore

SHARED_GIB = 64.0  # default size of a shared directory


@dataclass(frozen=True)
class StoreOptions(StoreFields):
    """A segment store that is not opened yet; `StoreFields` declares its options.

    Attributes:
        rank: number of this rank, if there are several. Each has its own part of the directory and
            of the shared place. None: there is one.

    Raises:
        ValueError: an option is outside its range, or a shared place has no secret.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        check_declared(self)
        if self.shared_url is not None:
            self._check_shared(self.shared_url)
        elif self.shared_gib is not None:
            raise ValueError(
                f"shared_gib {self.shared_gib} is the size of shared_url: give that, too"
            )

    @property
    def shared_place(self) -> str | None:
        """URL of the shared tier without its password."""
        return None if self.shared_url is None else without_password(self.shared_url)

    @property
    def sharing(self) -> Sharing | None:
        """Settings of the shared tier, or None; see `find_secret` for its errors."""
        secret = (
            None
            if self.shared_url is None
            else find_secret(None if self.directory is None else Path(self.directory))
        )
        if self.shared_url is None or secret is None:
            return None
        gib = SHARED_GIB if self.shared_gib is None else self.shared_gib
        return Sharing(
            self.shared_url, secret, self.rank, self.shared_timeout_s, int(gib * 2**30), self.quota
        )

    def check_backends(self) -> None:
        """Raise the errors of `open` about directories and the secret, before anything else is
        loaded. Makes nothing.

        Raises:
            ValueError: the secret of the environment is invalid.
            OSError: a directory cannot be used; PermissionError if others may read it.
        """
        directory = None if self.directory is None else Path(self.directory)
        shared = None if self.shared_url is None else local_directory(self.shared_url)
        ranks = [] if directory is None else sorted(directory.glob("rank-*"))
        for place in (directory, *ranks, shared):
            if place is not None:
                check_private_directory(place)
        check_secret(directory)

    def open(
        self,
        block_size: int,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
        chunk_blocks: int = 16,
    ) -> SegmentStore:
        """Open the store, for blocks of `block_size` tokens; see `SegmentStore` for its errors."""
        directory = None if self.directory is None else Path(self.directory)
        sharing = self.sharing
        if directory is not None and self.rank is not None:
            directory = directory / f"rank-{self.rank}"

        with ExitStack() as opened:
            shared = None if sharing is None else opened.enter_context(closing(sharing.open()))
            store = SegmentStore(
                block_size=block_size,
                ram_bytes=int(self.ram_gib * 2**30),
                directory=directory,
                disk_bytes=0 if directory is None else int(self.disk_gib * 2**30),
                quota=self.quota,
                int8=self.int8,
                chunk_blocks=chunk_blocks,
                similarity=similarity,
                anchors=anchors,
                shared=shared,
            )
            # From now on the store owns the shared tier.
            opened.pop_all()
            return store

    def _check_shared(self, url: str) -> None:
        """Raise ValueError if the shared tier cannot be used, before it is opened."""
        check_url(url)
        if self.shared_gib is not None and is_server(url):
            raise ValueError(
                f"shared_gib {self.shared_gib} is for a directory: a server's maxmemory bounds it"
            )
        if given_secret() is None and self.directory is None:
            raise ValueError(
                "a shared tier needs a secret, by which servers know their own data and each "
                "other's tenants: set "
                f"{CACHE_SECRET} to the same 64 hexadecimal digits for all of them"
            )
