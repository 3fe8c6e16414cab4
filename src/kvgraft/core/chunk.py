"""Chunks: consecutive blocks of one sequence, the unit of the tiers below device memory, and their
stored form."""

import enum
import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from kvgraft.core.keys import as_int32, check_scope

# Importing torch is slow, and listing chunks does not need it.
if TYPE_CHECKING:
    from torch import Tensor

Payload = Mapping[str, "Tensor"]  # by name, [streams, tokens, d]
Shape = tuple[int, int, int]
TensorSpec = tuple[str, Shape]  # dtype and shape
KEY_BYTES = 32
# names in torch
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ITEM_BYTES = dict(zip((*DTYPES, "int8"), (8, 4, 2, 2, 1, 1, 1), strict=True))
_SCALE = ".scale"  # suffix of the scales of an int8 tensor


class Gone(enum.Enum):
    """Reason why a chunk left a tier without a request of this process."""

    # It made room for another chunk, or could not be written. Other tiers may have it.
    EVICTED = enum.auto()
    # Another process removed it. No tier may serve it.
    REMOVED = enum.auto()


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive blocks of one source sequence, all of them exact.

    Attributes:
        scope: `scope_digest` of model and namespace, part of the key.
        namespace: its label in listings.
        chains: `chain_hashes` key of each of the n blocks, which names its tokens and all before
            them.
        tokens: int32 [n * block_size].
        source: unique identity of the sequence, signed 64 bits.
        source_start: position of the first token there, a multiple of block_size.

    Raises:
        ValueError: a length, a token or a number is not of this form.
    """

    scope: bytes
    namespace: str
    chains: tuple[bytes, ...]
    tokens: np.ndarray
    source: int
    source_start: int

    def __post_init__(self) -> None:
        check_scope(self.scope)
        tokens, count = as_int32("tokens", self.tokens), len(self.chains)
        if not count or not len(tokens) or len(tokens) % count:
            raise ValueError(
                f"{len(tokens)} tokens and {count} chains: each block needs as many tokens and one "
                "chain"
            )
        if any(len(chain) != KEY_BYTES for chain in self.chains):
            raise ValueError(
                f"chains of {sorted({*map(len, self.chains)})} bytes: must have {KEY_BYTES} each"
            )
        if not -(2**63) <= self.source < 2**63:
            raise ValueError(f"source is {self.source}, must be a signed 64-bit integer")

        size = len(tokens) // count
        if (
            self.source_start < 0
            or self.source_start % size
            or self.source_start + len(tokens) >= 2**31
        ):
            raise ValueError(
                f"source_start is {self.source_start}, must be a multiple of {size}, the end below "
                "2^31"
            )

        # Another thread writes the tokens later, so copy them.
        object.__setattr__(self, "tokens", tokens.copy())

    @cached_property
    def key(self) -> bytes:
        """Key of the chunk, 32 bytes: SHA-256 over scope, last chain and number of blocks, but not
        the source."""
        count = self.num_blocks.to_bytes(8, "little")
        return hashlib.sha256(b"chunk" + self.scope + self.chains[-1] + count).digest()

    @property
    def num_blocks(self) -> int:
        """Number of blocks, n."""
        return len(self.chains)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return len(self.tokens) // len(self.chains)

    @property
    def source_end(self) -> int:
        """Position in the source behind the last token."""
        return self.source_start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """A block that was fetched.

    Attributes:
        payload: by name, [streams, block_size, d] in the dtype in which it was put. The tensors are
            views of the store's own memory and must not be changed.
        tokens: int32 [block_size].
        scope: the chunk's.
        chain: its `chain_hashes` key.
        source, source_start: source and position of its first token.
        exact: whether it equals what was put bit for bit; False if it was stored as int8.
    """

    payload: Payload
    tokens: np.ndarray
    scope: bytes
    chain: bytes
    source: int
    source_start: int
    exact: bool


class _Wire(msgspec.Struct, frozen=True):
    scope: bytes
    namespace: str
    chains: bytes
    tokens: bytes  # little-endian int32
    block_size: int
    source: int
    source_start: int
    tensors: dict[str, TensorSpec]
    int8: bool


@dataclass(frozen=True, eq=False)
class ChunkRecord:
    """A chunk and the form in which its payload is stored.

    Attributes:
        tensors: dtype and shape of the tensors that were put, by name in alphabetical order.
        int8: whether the tensors were quantised. Each then has a tensor of scales.
    """

    chunk: Chunk
    tensors: dict[str, TensorSpec]
    int8: bool

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("the payload has no tensors")
        for name, (dtype, shape) in self.tensors.items():
            if name.endswith(_SCALE) or name.startswith("__"):
                raise ValueError(
                    f"tensor {name!r}: names must not end with {_SCALE!r} nor begin with '__'"
                )
            if dtype not in DTYPES:
                raise ValueError(f"tensor {name!r} is {dtype}: allowed are {', '.join(DTYPES)}")
            if len(shape) != 3 or shape[1] != len(self.chunk.tokens) or min(shape) < 1:
                expected = f"[streams, {len(self.chunk.tokens)}, d]"
                raise ValueError(f"tensor {name!r} has shape {list(shape)}, expected {expected}")

    @classmethod
    def of(cls, chunk: Chunk, payload: Payload, *, int8: bool) -> "ChunkRecord":
        """Make the record of a payload that will be stored; ValueError if it cannot be."""
        if away := [name for name, tensor in payload.items() if tensor.device.type != "cpu"]:
            raise ValueError(f"tensors {away} are not in host memory")
        return cls(chunk, specs({name: payload[name] for name in sorted(payload)}), int8)

    @property
    def key(self) -> bytes:
        """Key of the chunk."""
        return self.chunk.key

    @property
    def stored(self) -> dict[str, TensorSpec]:
        """Dtype and shape of the tensors as they are stored."""
        if not self.int8:
            return self.tensors
        values: dict[str, TensorSpec] = {
            name: ("int8", shape) for name, (_, shape) in self.tensors.items()
        }
        return values | {
            name + _SCALE: ("float32", (s, 1, d)) for name, (_, (s, _, d)) in self.tensors.items()
        }

    def pack(self, payload: Payload) -> dict[str, "Tensor"]:
        """Copy or quantise a payload to its stored form. ValueError if it must be int8 and is not
        finite."""
        import torch

        from kvgraft.kv.quant import quantise

        if not self.int8:
            return {
                name: payload[name].detach().clone(memory_format=torch.contiguous_format)
                for name in self.tensors
            }
        pairs = {name: quantise(payload[name].detach()) for name in self.tensors}
        packed = {name: values.contiguous() for name, (values, _) in pairs.items()}
        return packed | {name + _SCALE: scale for name, (_, scale) in pairs.items()}

    def block(self, stored: Payload, place: int) -> StoredBlock:
        """Return the block at a place of the chunk, from the stored tensors."""
        chunk, size = self.chunk, self.chunk.block_size
        span = slice(place * size, (place + 1) * size)
        payload = {name: stored[name][:, span] for name in self.tensors}
        if self.int8:
            import torch

            from kvgraft.kv.quant import dequantise

            for name, (dtype, _) in self.tensors.items():
                payload[name] = dequantise(
                    payload[name], stored[name + _SCALE], getattr(torch, dtype)
                )
        start = chunk.source_start + span.start
        names = chunk.scope, chunk.chains[place], chunk.source
        return StoredBlock(payload, chunk.tokens[span], *names, start, not self.int8)

    def encode(self) -> bytes:
        """Return JSON that describes the chunk without its payload. Equal records give equal
        JSON."""
        chunk = self.chunk
        chains, tokens = b"".join(chunk.chains), chunk.tokens.astype("<i4").tobytes()
        place = (chunk.block_size, chunk.source, chunk.source_start)
        return msgspec.json.encode(
            _Wire(chunk.scope, chunk.namespace, chains, tokens, *place, self.tensors, self.int8),
            order="deterministic",
        )

    @classmethod
    def decode(cls, data: bytes) -> "ChunkRecord":
        """Decode a record; ValueError if it is invalid."""
        try:
            wire = msgspec.json.decode(data, type=_Wire)
        except msgspec.DecodeError as error:
            raise ValueError(f"no record: {error}") from error

        if len(wire.chains) % KEY_BYTES or len(wire.tokens) % 4:
            raise ValueError(
                f"no record: {len(wire.chains)} bytes of chains, {len(wire.tokens)} of tokens"
            )

        chains = tuple(
            wire.chains[at : at + KEY_BYTES] for at in range(0, len(wire.chains), KEY_BYTES)
        )
        tokens = np.frombuffer(wire.tokens, "<i4")
        chunk = Chunk(wire.scope, wire.namespace, chains, tokens, wire.source, wire.source_start)
        if chunk.block_size != wire.block_size:
            raise ValueError(
                f"no record: blocks of {chunk.block_size} tokens, it says {wire.block_size}"
            )

        return cls(chunk, dict(sorted(wire.tensors.items())), wire.int8)


def specs(payload: Payload) -> dict[str, TensorSpec]:
    """Return dtype and shape of every tensor."""
    return {
        name: (str(t.dtype).removeprefix("torch."), cast(Shape, tuple(t.shape)))
        for name, t in payload.items()
    }


def nbytes(payload: Payload) -> int:
    """Return the memory of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in payload.values())


def consecutive(starts: Sequence[tuple[Hashable, int]], size: int) -> Iterator[slice]:
    """Yield runs of blocks that follow each other in one source.

    Args:
        starts: (source, position of the first token) of each block.
        size: tokens of a block.
    """
    first = 0
    for stop in range(1, len(starts) + 1):
        source, start = starts[stop - 1]
        if stop == len(starts) or starts[stop] != (source, start + size):
            yield slice(first, stop)
            first = stop
