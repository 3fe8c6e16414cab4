"""Segment store: tiers below device memory for the KV of text that was read. The tiers are host
memory, a directory that outlasts the process, and a place that machines share."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.core.chunk import Chunk, ChunkRecord, Gone, Payload, StoredBlock
from kvgraft.core.matches import Match, MatchQuery
from kvgraft.core.segmentation import Similarity
from kvgraft.store.chunk_index import ChunkIndex
from kvgraft.store.shared import SharedTier
from kvgraft.store.tiers import Tiers

if TYPE_CHECKING:
    from torch import Tensor

    Stored = dict[str, Tensor]
_Found = tuple[ChunkRecord, int] | None  # a block: its chunk, and its place there


class SegmentStore:
    """Chunks of KV by content and scope, in host memory, on disk, and at a place that machines
    share.

    A *block number* names a stored block until its chunk is gone, and is never confused with
    another block. Problems with stored data or the disk raise no error. The chunk is then gone, and
    `counts` says why.

    `_lock` guards the index, the tier in host memory and the counts. Tiers below have locks of
    their own, which are taken under this one and never the other way. It is not held while the
    shared place is called. Tiers do not know the store: they return the keys that were evicted, and
    the store polls those below for changes (`_look_around`). Only the store updates the index.

    Args:
        block_size: tokens of a block.
        ram_bytes: budget of host memory.
        directory: directory of the tier on disk, with mode 0700; made if it does not exist. None:
            no such tier.
        disk_bytes: its budget.
        quota: share of either budget that one scope may take (`Budget.add`).
        int8: store payloads as int8. They are graft sources, but never exact prefix blocks.
        chunk_blocks: greatest number of blocks in a chunk.
        max_backlog_bytes: payload that may wait to be written. Further chunks stay in host memory
            only.
        similarity, anchors: of near-duplicates (`SimilarIndex`); None finds identical text only.
        shared: the tier that machines share, closed with the store; None: no such tier.

    Attributes:
        counts: blocks fetched ("ram_hits", "disk_hits", "shared_hits"), and chunks by event. Chunks
            that were "stored", or were "known" already when they were put. Chunks not kept on disk
            or in any tier: "too_large", "backlog", "non_finite", "write_failed". Chunks "evicted"
            from all tiers. Chunks that were gone when they were requested or when the store was
            opened: "missing", "damaged", "foreign". Chunks cut into other blocks: "unusable". Found
            on opening: "orphans", "temporaries", "catalogue_damaged". Errors of the catalogue in
            use: "catalogue_failed". For names that begin with "shared_" see `SharedTier.counts`.

    Raises:
        ValueError: a number is out of range, or only one of directory and disk_bytes is given.
        OSError: the directory cannot be used; PermissionError if others may read it.
    """

    def __init__(
        self,
        *,
        block_size: int,
        ram_bytes: int,
        directory: Path | None = None,
        disk_bytes: int = 0,
        quota: float = 1.0,
        int8: bool = False,
        chunk_blocks: int = 16,
        max_backlog_bytes: int = 1 << 30,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
        shared: SharedTier | None = None,
    ) -> None:
        if (directory is None) != (disk_bytes == 0):
            raise ValueError(f"directory {directory}, disk_bytes {disk_bytes}: both or neither")

        self.block_size = block_size
        self.chunk_blocks = chunk_blocks
        self.int8 = int8
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._index = ChunkIndex(block_size, chunk_blocks, similarity, anchors)
        # findable chunks of others that `take_appeared` has not returned yet
        self._appeared: dict[bytes, ChunkRecord] = {}
        self._tiers = Tiers.open(ram_bytes, directory, disk_bytes, quota, max_backlog_bytes, shared)
        # Each poll returns only some of the changes.
        while self._look_around():
            pass

    def __enter__(self) -> "SegmentStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Chunks that can be found."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @property
    def counts(self) -> Counter[str]:
        """Events so far, by the names above."""
        with self._lock:
            return self._counts + self._tiers.counts

    @property
    def ram_nbytes(self) -> int:
        """Bytes of payload in host memory, without chunks that only wait to be written."""
        with self._lock:
            return self._tiers.memory.budget.nbytes

    @property
    def disk_nbytes(self) -> int:
        """Bytes of the payload files, as far as this process knows."""
        return self._tiers.disk.nbytes if self._tiers.disk else 0

    def put(self, chunk: Chunk, payload: Payload) -> bool:
        """Store a chunk; its file is written later.

        A known chunk counts as used, and is written to tiers that lack it. A chunk that only the
        shared tier has is stored here, too.

        Args:
            payload: tensors in host memory, floating point [streams, tokens of the chunk, d]; they
                are copied.

        Returns:
            Whether it was stored. False if it is known (in an equal or better form), or refused,
                which is counted.

        Raises:
            ValueError: chunk or payload are not of this form, or the store is closed.
        """
        if not self._index.can_hold(chunk):
            given = f"{chunk.num_blocks} blocks of {chunk.block_size} tokens"
            raise ValueError(
                f"a chunk of {given}: allowed are {self.chunk_blocks} of {self.block_size} tokens"
            )

        record = ChunkRecord.of(chunk, payload, int8=self.int8)
        with self._lock:
            self._look_around()
            known = self._index.get(chunk.key)
            is_better = known is not None and known.int8 and not self.int8
            if known is not None and not is_better and self._tiers.is_near(chunk.key):
                self._counts["known"] += 1
                self._tiers.touch(known.key)
                self._tiers.write_missing(known)
                return False

        try:
            stored = record.pack(payload)
        except ValueError:
            with self._lock:
                self._counts["non_finite"] += 1
            return False

        with self._lock:
            if is_better:
                # The known chunk is an int8 copy, so replace it.
                self._drop(chunk.key)
            evicted = self._tiers.put(record, stored)
            if evicted is None:
                return False
            self._index.add(record)
            self._counts["stored"] += 1
            self._left(evicted)
            return True

    def take_appeared(self) -> list[ChunkRecord]:
        """Return findable chunks that were not put here: all of them at first, then those that came
        since the last call."""
        with self._lock:
            self._look_around()
            found, self._appeared = list(self._appeared.values()), {}
            return found

    def touch(self, key: bytes) -> bool:
        """Note that a chunk was used. Return whether it is known."""
        with self._lock:
            self._look_around(others=False)
            known = key in self._index
            if known:
                self._tiers.touch(key)
            return known

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the parts of a prompt that are stored, at any offset: matches whose pages are
        block numbers.

        Near-duplicates are found if the store was made with `similarity`.
        """
        with self._lock:
            self._look_around()
            return self._index.match(query)

    def prefix(self, chain_keys: Sequence[bytes], scope: bytes) -> list[int]:
        """Return for each key of `chain_hashes` the number of a bit-exact block, or -1."""
        with self._lock:
            self._look_around()
            return self._index.prefix(chain_keys, scope)

    def fetch(self, blocks: Sequence[int], *scopes: bytes) -> list[StoredBlock | None]:
        """Return the blocks of these numbers, or None for each that is gone or outside these
        scopes.

        Each chunk is read once. Waits for the shared tier as in `SharedTier.fetch`.
        """
        return self._fetch_all(lambda: [self._index.find(block, *scopes) for block in blocks], None)

    def fetch_from(
        self, places: Sequence[tuple[bytes, int]], asked_at: float | None = None
    ) -> list[StoredBlock | None]:
        """Fetch blocks like `fetch`, by places: the key of a chunk, and the place of a block in it.

        Args:
            asked_at: `time.monotonic` when the waiting began; None: now.
        """

        def find() -> list[_Found]:
            records = [(self._index.get(key), place) for key, place in places]
            return [
                (r, at) if r is not None and at < r.chunk.num_blocks else None for r, at in records
            ]

        return self._fetch_all(find, asked_at)

    def record(self, key: bytes) -> ChunkRecord | None:
        """Return the record of a findable chunk, or None."""
        with self._lock:
            return self._index.get(key)

    def pin(self, key: bytes, pinned: bool = True) -> None:
        """Pin a chunk, so that it is never evicted, or unpin it; on disk if it is there. KeyError
        if it is unknown."""
        self.flush()
        with self._lock:
            self._check_known(key)
            self._tiers.pin(key, pinned)
        self.flush()

    def drop(self, key: bytes) -> None:
        """Forget a chunk everywhere. KeyError if it is unknown."""
        with self._lock:
            self._check_known(key)
            self._drop(key)

    def flush(self) -> None:
        """Wait until all chunks that were put are written; for the shared tier 10 s at most."""
        if not self._closed:
            self._tiers.flush()
            with self._lock:
                self._look_around()

    def close(self) -> None:
        """Write all pending chunks, then close directory and shared place. Nothing can be put or
        fetched afterwards."""
        if not self._closed:
            if self._tiers.disk:
                self._tiers.disk.flush()
            with self._lock:
                self._look_around(others=False)
            self._tiers.close()
            self._closed = True

    def _fetch_all(
        self, find: Callable[[], list[_Found]], asked_at: float | None
    ) -> list[StoredBlock | None]:
        """Fetch the blocks that are found. The lock is not held while waiting for the shared
        tier."""
        with self._lock:
            self._look_around(others=False)
            far = self._tiers.far(held[0] for held in find() if held is not None)
        arrived = self._tiers.shared.fetch(far, asked_at) if far and self._tiers.shared else {}
        with self._lock:
            self._look_around(others=False)
            return self._fetch(find(), arrived)

    # The methods below need the lock to be held.

    def _fetch(
        self, wanted: Sequence[_Found], arrived: "Mapping[ChunkRecord, Stored]"
    ) -> list[StoredBlock | None]:
        blocks: list[StoredBlock | None] = [None] * len(wanted)
        by_key: dict[bytes, list[tuple[int, ChunkRecord, int]]] = {}
        for at, held in enumerate(wanted):
            if held is not None:
                by_key.setdefault(held[0].key, []).append((at, *held))
        # Chunks in host memory come first, before loading others evicts them.
        for key in sorted(by_key, key=lambda key: key not in self._tiers.memory):
            if (stored := self._load(by_key[key][0][1], len(by_key[key]), arrived)) is not None:
                for at, record, place in by_key[key]:
                    blocks[at] = record.block(stored, place)
        return blocks

    def _load(
        self, record: ChunkRecord, num_blocks: int, arrived: "Mapping[ChunkRecord, Stored]"
    ) -> "Stored | None":
        """Load the stored tensors of a chunk, into host memory if they fit. Forget an unusable
        chunk and return None."""
        self._tiers.touch(record.key)
        stored, evicted = self._tiers.get(record, num_blocks, arrived)
        self._left(evicted)
        if stored is None and record.key not in self._tiers:
            self._forget(record.key)
        return stored

    def _left(self, keys: Iterable[bytes]) -> None:
        """Drop and count chunks that were evicted from a tier, if no other tier has them."""
        for key in keys:
            if key not in self._tiers:
                self._drop(key)
                self._counts["evicted"] += 1

    def _drop(self, key: bytes) -> None:
        self._forget(key)
        self._tiers.remove(key)

    def _forget(self, key: bytes) -> None:
        """Forget a chunk here, without changing the tiers below."""
        self._tiers.memory.remove(key)
        self._index.remove(key)
        self._appeared.pop(key, None)

    def _look_around(self, *, others: bool = True) -> bool:
        """Apply changes of the tiers below, before any other operation (`Tiers.poll`). Return
        whether there were any."""
        if self._closed:
            raise ValueError("the segment store is closed")

        changed = self._tiers.poll(others=others)
        for key, news in changed.items():
            if news is Gone.EVICTED:
                self._left([key])
                continue
            self._forget(key)
            found = self._tiers.removed(key) if news is Gone.REMOVED else news
            if isinstance(found, ChunkRecord) and self._index.can_hold(found.chunk):
                self._index.add(found)
                self._appeared[key] = found
            elif isinstance(found, ChunkRecord):
                self._counts["unusable"] += 1

        return bool(changed)

    def _check_known(self, key: bytes) -> None:
        self._look_around(others=False)
        if key not in self._index:
            raise KeyError(f"no stored chunk has the key {key.hex()}")
