"""What one server holds, by the KV cache events that vLLM publishes: the fingerprints of its text."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvgraft.fleet.known_text import pack
from kvgraft.segments.fingerprints import WINDOW, Fingerprints
from kvgraft.segments.keys import scope_digest

Decode = Callable[[list[int]], str]  # token ids -> text
BlockHash = int | bytes


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks of one prompt are cached now; fields are those of vLLM's event of this name."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are cached no longer."""

    block_hashes: list[BlockHash]
    group_idx: int | None = None
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached."""


class EventBatch(msgspec.Struct, array_like=True):
    """What one step of vLLM has changed."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@dataclass(eq=False)
class _Block:
    salt: str | None  # of its prompt
    tail: bytes  # the last text of it and of what stands before it
    values: np.ndarray  # uint64: fingerprints whose window ends in it


class Holdings:
    """Keeps account of the text of one server. For one thread.

    Args:
        decode: of the server's tokenizer.
        identity: of its model, for `scope_digest`.
    """

    def __init__(self, decode: Decode, identity: str) -> None:
        self._decode, self._identity = decode, identity
        self._blocks: dict[BlockHash, _Block] = {}
        self._counts: Counter[int] = Counter()  # by fingerprint: blocks in which its window ends
        self._num_tokens = self._num_bytes = 0

    def __len__(self) -> int:
        """Blocks of text."""
        return len(self._blocks)

    def __contains__(self, value: int) -> bool:
        """Whether it holds text with this fingerprint."""
        return value in self._counts

    @property
    def bytes_per_token(self) -> float | None:
        """Of all text so far; None if there was none."""
        return self._num_bytes / self._num_tokens if self._num_tokens else None

    def take(self, batch: EventBatch) -> None:
        """Note what a step has changed."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
            elif event.group_idx or event.medium not in (None, "GPU"):
                continue  # the same text in other layers, or in a tier below
            elif isinstance(event, BlockStored):
                self._add(event)
            else:
                for block_hash in event.block_hashes:
                    self._remove(block_hash)

    def clear(self) -> None:
        """Nothing is held, or nobody knows what."""
        self._blocks.clear()
        self._counts.clear()

    def sketch(self) -> bytes:
        """Of all fingerprints, see `known_text.pack`."""
        return pack(np.fromiter(self._counts, np.uint64, len(self._counts)))

    def _add(self, event: BlockStored) -> None:
        parent = self._blocks.get(event.parent_block_hash) if event.parent_block_hash is not None else None
        salt = parent.salt if parent is not None else _salt_of(event)
        before, texts = parent.tail if parent is not None else b"", self._texts(event)
        whole = b"".join((before, *texts))
        found = Fingerprints.of(whole, scope_digest(self._identity, salt or ""))
        stops = len(before) + np.cumsum([len(part) for part in texts])
        owners = np.searchsorted(stops, found.places + WINDOW)  # the block in which a window ends
        for number, (block_hash, stop) in enumerate(zip(event.block_hashes, stops.tolist(), strict=True)):
            if block_hash not in self._blocks:
                values = found.values[owners == number]
                self._blocks[block_hash] = _Block(salt, whole[max(stop - WINDOW + 1, 0) : stop], values)
                self._counts.update(values.tolist())
        self._num_tokens += len(event.token_ids)
        self._num_bytes += len(whole) - len(before)

    def _texts(self, event: BlockStored) -> list[bytes]:
        """The text of each block; what a character loses at its edge is lost."""
        size = event.block_size
        parts = (event.token_ids[at : at + size] for at in range(0, len(event.token_ids), size))
        return [self._decode(part).strip("\ufffd").encode() for part in parts]

    def _remove(self, block_hash: BlockHash) -> None:
        if (block := self._blocks.pop(block_hash, None)) is not None:
            for value in block.values.tolist():
                self._counts[value] -= 1
                if not self._counts[value]:
                    del self._counts[value]


class Beginnings:
    """Remembers the prompts that one server was asked to read, from their beginning on, as far as a router sees them.

    Args:
        capacity: fingerprints that are remembered, the last ones.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        self._capacity = capacity
        self._begun: OrderedDict[int, int] = OrderedDict()  # by chain: the fingerprint that it ends with

    def add(self, text: Fingerprints) -> None:
        """A prompt was read."""
        for chained, value in zip(text.chain().tolist(), text.values.tolist(), strict=True):
            self._begun[chained] = value
            self._begun.move_to_end(chained)
        while len(self._begun) > self._capacity:
            self._begun.popitem(last=False)

    def sketch(self, holdings: Holdings) -> bytes:
        """Of the chains whose text is still there, see `known_text.pack`."""
        held = [chained for chained, value in self._begun.items() if value in holdings]
        return pack(np.array(held, np.uint64))


def _salt_of(event: BlockStored) -> str | None:
    """The cache salt of a prompt's first block, which comes last among its keys but for embeddings."""
    keys: Sequence[Any] = (event.extra_keys or [None])[0] or ()
    named = [key for key in keys if isinstance(key, str) and key != event.lora_name]
    return named[-1] if named else None
