"""Host storage of the indexes: a hash table of ids, and tables of rows found by key. It uses numpy,
with no object per block."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

_EMPTY, _REMOVED = -1, -2
_MAX_LOAD, _GROWTH = 0.6, 1.25
# Filter bytes per slot. Most keys that are not held are rejected by the filter.
_FILTER = 4

# (pages int32 [n], versions int64 [n]) -> bool [n]: whether each page still holds what it had under
# that version
IsLive = Callable[[np.ndarray, np.ndarray], np.ndarray]
# pages int32 [n] -> bool [n]: whether all KV of their tokens is there
IsWhole = Callable[[np.ndarray], np.ndarray]


class HashTable:
    """Multimap from 64-bit hashes to int32 ids: open addressing with triangular probing, in whole
    batches.

    A slot holds only an id; the key of every id lies in one array. A filter, longer than the slots,
    says which low bits of a key may be held. Keys must be well mixed.
    """

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)  # by id
        self._slots = np.full(8, _EMPTY, np.int32)  # their number is a power of two
        self._filter = np.zeros(_FILTER * len(self._slots), bool)
        self._num_held = 0
        self._num_used = 0  # slots that are held or removed

    def __len__(self) -> int:
        return self._num_held

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes + self._filter.nbytes

    def grow(self, capacity: int) -> None:
        """Make room for ids below capacity."""
        self._keys = _grown(self._keys, capacity)

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Keys of these ids: uint64 [n]."""
        return self._keys[ids]

    def insert(self, keys: np.ndarray, ids: np.ndarray) -> None:
        """Add distinct ids (int32 [m]) that are not held, under keys (uint64 [m])."""
        self._keys[ids] = keys
        self._num_held += len(ids)
        self._num_used += len(ids)
        if self._num_used > _MAX_LOAD * len(self._slots):
            ids = np.concatenate((self._slots[self._slots >= 0], ids))
            self._slots = np.full(1 << (2 * len(ids) - 1).bit_length(), _EMPTY, np.int32)
            self._filter = np.zeros(_FILTER * len(self._slots), bool)
            self._num_used = len(ids)

        self._filter[_low_bits(self._keys[ids], self._filter)] = True
        slots, step = _low_bits(self._keys[ids], self._slots), 0
        while len(ids):
            empty = self._slots[slots] == _EMPTY
            self._slots[slots[empty]] = ids[empty]
            unplaced = self._slots[slots] != ids  # taken before, or won by another id of this batch
            step += 1
            ids, slots = ids[unplaced], self._advance(slots[unplaced], step)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every (row, id) whose id is held under keys[row], in no particular order: int64
        [n], int32 [n]."""
        rows, step = np.flatnonzero(self._filter[_low_bits(keys, self._filter)]), 0
        slots = _low_bits(keys[rows], self._slots)
        found = [(rows[:0], self._slots[:0])]
        while len(rows):
            ids = self._slots[slots]
            hits = np.flatnonzero(ids >= 0)
            hits = hits[self._keys[ids[hits]] == keys[rows[hits]]]
            found.append((rows[hits], ids[hits]))
            probing = ids != _EMPTY
            step += 1
            rows, slots = rows[probing], self._advance(slots[probing], step)

        return np.concatenate([rows for rows, _ in found]), np.concatenate(
            [ids for _, ids in found]
        )

    def remove(self, ids: np.ndarray) -> None:
        """Remove distinct ids; KeyError if one is not held (others may have been removed then)."""
        slots, step = _low_bits(self._keys[ids], self._slots), 0
        while len(ids):
            held = self._slots[slots]
            if (held == _EMPTY).any():
                raise KeyError(f"id {ids[held == _EMPTY][0]} is not in the table")
            reached = held == ids
            self._slots[slots[reached]] = _REMOVED
            self._num_held -= int(reached.sum())
            step += 1
            ids, slots = ids[~reached], self._advance(slots[~reached], step)

    def _advance(self, slots: np.ndarray, step: int) -> np.ndarray:
        # triangular: visits every slot of a power of two
        return (slots + step) & (len(self._slots) - 1)


class Table(ABC):
    """Rows as a struct of arrays, one row per id, each found under the same number of keys.

    Ids of dropped rows are reused. A subclass sets its columns, arrays without rows, and then calls
    this initialiser.
    """

    def __init__(self, keys_per_row: int = 1) -> None:
        self._columns = tuple(vars(self))
        self._keys_per_row = keys_per_row
        self._held = np.zeros(0, bool)
        self._by_key = HashTable()
        self._vacant = np.empty(0, np.int32)  # ids that are free

    def __len__(self) -> int:
        return len(self._by_key) // self._keys_per_row

    @property
    def capacity(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        columns = sum(getattr(self, name).nbytes for name in self._columns)
        return columns + self._held.nbytes + self._by_key.nbytes + self._vacant.nbytes

    @abstractmethod
    def live(self, ids: np.ndarray) -> np.ndarray:
        """Return whether the content that each row describes still exists, bool [n]."""

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every (row, id) whose live id is held under keys[row], and drop the stale ones
        that it meets."""
        rows, ids, *_ = self.find_and_drop(keys)
        return rows, ids

    def find_and_drop(
        self, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Find like `find`, and also return the rows and ids that are dropped. Their columns stay
        valid until the next `add`."""
        rows, ids = self._by_key.find(keys)
        ids = ids // self._keys_per_row
        live = self.live(ids)
        if live.all():
            return rows, ids, rows[:0], ids[:0]

        self._remove(np.unique(ids[~live]))
        return rows[live], ids[live], rows[~live], ids[~live]

    def held(self) -> np.ndarray:
        """Return all ids, live and stale, ascending, int32 [n]."""
        return np.flatnonzero(self._held).astype(np.int32)

    def beside(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every (row, id) whose live id shares the first key of ids[row], including the id
        itself."""
        return self.find(self._by_key.keys_of(ids * np.int32(self._keys_per_row)))

    def add(self, keys: np.ndarray, **columns: np.ndarray | int) -> np.ndarray:
        """Add m rows under keys uint64 [m] or [m, keys_per_row], with the given columns, and return
        their ids, int32."""
        ids = self._allocate(len(keys))
        for name in self._columns:
            getattr(self, name)[ids] = columns[name]
        self._held[ids] = True
        self._by_key.insert(keys.ravel(), self._key_ids(ids))
        return ids

    def discard_stale(self) -> int:
        """Drop every row that is not live, and return how many."""
        held = self.held()
        stale = held[~self.live(held)]
        self._remove(stale)
        return len(stale)

    def _key_ids(self, ids: np.ndarray) -> np.ndarray:
        return (
            ids[:, None] * np.int32(self._keys_per_row)
            + np.arange(self._keys_per_row, dtype=np.int32)
        ).ravel()

    def _allocate(self, count: int) -> np.ndarray:
        if count > len(self._vacant):
            self.discard_stale()
            if self.capacity - len(self) < count + self.capacity // 5:
                self._grow(max(int(_GROWTH * self.capacity), len(self) + count))
            self._vacant = np.flatnonzero(~self._held).astype(np.int32)
        ids, self._vacant = self._vacant[:count], self._vacant[count:]
        return ids

    def _grow(self, capacity: int) -> None:
        size = self.capacity
        for name in self._columns:
            setattr(self, name, _grown(getattr(self, name), capacity))
        self._held = _grown(self._held, capacity)
        self._held[size:] = False
        self._by_key.grow(capacity * self._keys_per_row)

    def _remove(self, ids: np.ndarray) -> None:
        self._by_key.remove(self._key_ids(ids))
        self._held[ids] = False


class EntryTable(Table):
    """Entries of the virtual-block index, found by the key of their content."""

    def __init__(self, block_size: int, is_live: IsLive) -> None:
        self.tokens = np.empty((0, block_size), np.int32)
        # owner of the content, the 32 bytes of `scope_digest`
        self.scope = np.empty((0, 4), np.uint64)
        self.page = np.empty(0, np.int32)
        self.version = np.empty(0, np.int64)  # content version of the page
        self.source = np.empty(0, np.int64)  # sequence that the block was computed in
        self.source_start = np.empty(0, np.int32)  # position of its first token there
        # entry before it in the source, or -1; its id may have been reused since
        self.previous = np.empty(0, np.int32)
        self.following = np.empty(0, np.int32)
        self.depth = np.empty(0, np.int16)  # see `Match`
        super().__init__()
        self._is_live = is_live

    def live(self, ids: np.ndarray) -> np.ndarray:
        """Return whether the pages still hold the entries' content, bool [n]."""
        return np.asarray(self._is_live(self.page[ids], self.version[ids]), bool)

    def is_of(self, ids: np.ndarray, scope: bytes) -> np.ndarray:
        """Return whether the entries belong to this scope, bool [n]."""
        found: np.ndarray = (self.scope[ids] == np.frombuffer(scope, np.uint64)).all(axis=1)
        return found

    def is_same(self, ids: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return whether the entries have the same tokens and scope as others, bool [n]."""
        found: np.ndarray = (self.tokens[ids] == self.tokens[others]).all(axis=1)
        return found & (self.scope[ids] == self.scope[others]).all(axis=1)

    def link(self, ids: np.ndarray) -> None:
        """Link the entries (or -1) of consecutive blocks if both neighbours were computed in one
        source."""
        left, right = ids[:-1], ids[1:]
        linked = (left >= 0) & self._is_adjacent(left, right, step=1)
        self.following[left[linked]] = right[linked]
        self.previous[right[linked]] = left[linked]

    def adjacent(self, ids: np.ndarray, step: int) -> np.ndarray:
        """Return the live entry before (step -1) or after (+1) each one in its source, or -1: int32
        [n]."""
        near = (self.following if step > 0 else self.previous)[ids]
        rows = np.flatnonzero(self._is_adjacent(ids, near, step))
        rows = rows[self.live(near[rows])]
        found = np.full(len(ids), -1, np.int32)
        found[rows] = near[rows]
        return found

    def walk(self, entry: int, step: int, count: int) -> list[int]:
        """Return up to `count` entries before (step -1) or after (+1) this one in its source,
        nearest first, live or not."""
        near, found, start = (
            self.following if step > 0 else self.previous,
            [],
            int(self.source_start[entry]),
        )
        source = self.source[entry]
        for _ in range(count):
            entry, start = int(near[entry]), start + step * self.tokens.shape[1]
            if entry < 0 or not self.holds(entry, source, start):
                break
            found.append(entry)
        return found

    def holds(self, ids: Any, source: Any, source_start: Any) -> Any:
        """Return whether these ids, one or many, are still the blocks at these positions of their
        sources."""
        return (
            self._held[ids]
            & (self.source[ids] == source)
            & (self.source_start[ids] == source_start)
        )

    def _is_adjacent(self, ids: np.ndarray, others: np.ndarray, step: int) -> np.ndarray:
        start = self.source_start[ids] + step * self.tokens.shape[1]
        return (others >= 0) & self.holds(others, self.source[ids], start)


def _low_bits(keys: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Home slots of keys uint64 [n], among a power of two of slots: int64 [n]."""
    return (keys & np.uint64(len(slots) - 1)).view(np.int64)


def _grown(column: np.ndarray, capacity: int) -> np.ndarray:
    grown = np.empty((capacity, *column.shape[1:]), column.dtype)
    grown[: len(column)] = column
    return grown


def occurrence(values: np.ndarray) -> np.ndarray:
    """Number of equal values before each of the values int [m]: int64 [m]."""
    order = np.argsort(values, kind="stable")
    ordered, counts = values[order], np.empty(len(order), np.int64)
    counts[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return counts
