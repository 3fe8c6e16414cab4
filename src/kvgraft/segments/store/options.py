"""How large the tiers below device memory are, as users say it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgraft.methods import require_amount, require_share
from kvgraft.segments.segmentation import Similarity
from kvgraft.segments.store.store import SegmentStore


@dataclass(frozen=True)
class StoreOptions:
    """A segment store that is still to be opened.

    Attributes:
        directory: of the tier on disk, which outlasts the process; None has no such tier.
        ram_gib: memory of the tier in host memory.
        disk_gib: size of the tier on disk.
        quota: share of each that one namespace may take; in any case the one that holds most gives way first.
        int8: keep keys and values as int8, in a quarter to a half of the bytes; they come back as graft sources only.

    Raises:
        ValueError: an option outside its range.
    """

    directory: Path | str | None = None
    ram_gib: float = 1.0
    disk_gib: float = 16.0
    quota: float = 1.0
    int8: bool = False

    def __post_init__(self) -> None:
        require_amount("ram_gib", self.ram_gib)
        require_amount("disk_gib", self.disk_gib)
        require_share("quota", self.quota)
        if not self.quota or (self.directory is not None and not self.disk_gib):
            raise ValueError(f"quota {self.quota} and disk_gib {self.disk_gib} must be above 0")
        if not isinstance(self.int8, bool):
            raise ValueError(f"int8 must be true or false, got {self.int8!r}")

    def open(
        self,
        block_size: int,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
        chunk_blocks: int = 16,
    ) -> SegmentStore:
        """The store, for blocks of so many tokens; see `SegmentStore` for what it raises."""
        return SegmentStore(
            block_size=block_size,
            ram_bytes=int(self.ram_gib * 2**30),
            directory=None if self.directory is None else Path(self.directory),
            disk_bytes=0 if self.directory is None else int(self.disk_gib * 2**30),
            quota=self.quota,
            int8=self.int8,
            chunk_blocks=chunk_blocks,
            similarity=similarity,
            anchors=anchors,
        )
