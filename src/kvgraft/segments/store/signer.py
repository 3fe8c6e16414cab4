"""What servers with one secret write at places that others may reach: names that tell nothing, and
signed data."""

import hmac
from dataclasses import replace

import msgspec
from blake3 import blake3

from kvgraft.segments.store.chunk import ChunkRecord
from kvgraft.segments.store.files import DIGEST_BYTES, BadPayload
from kvgraft.segments.store.secret import derive


class Signer:
    """Names and signatures by keys that are derived from a secret of 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._data_key, self._record_key, self._name_key = (
            derive(secret, of) for of in ("data", "records", "names")
        )

    def name(self, record: ChunkRecord) -> str:
        """Of a chunk in this form: digests, the first one of its scope."""
        form = msgspec.json.encode((record.tensors, record.int8), order="deterministic")
        scope = blake3(record.chunk.scope, key=self._name_key).hexdigest()
        return f"{scope[:16]}/{blake3(record.key + form, key=self._name_key).hexdigest()}"

    def close(self, data: bytes, name: str) -> bytes:
        """The data of the chunk with this name, signed."""
        return _signature(self._data_key, name, data) + data

    def closed_bytes(self, num_bytes: int) -> int:
        """Bytes of so much data, signed."""
        return DIGEST_BYTES + num_bytes

    def open(self, sealed: bytes, name: str) -> bytes:
        """The data that was signed for this name; BadPayload if it was not."""
        return _opened(self._data_key, name, sealed)

    def close_record(self, record: bytes) -> bytes:
        """Return the signed form of a record."""
        return _signature(self._record_key, "", record) + record

    def open_record(self, sealed: bytes) -> bytes:
        """Return a record from its signed form; BadPayload if it was not."""
        return _opened(self._record_key, "", sealed)


def without_source(record: ChunkRecord) -> ChunkRecord:
    """The same for all who have read this text, whenever and wherever."""
    return replace(record, chunk=replace(record.chunk, namespace="", source=0))


def _signature(key: bytes, name: str, data: bytes | memoryview) -> bytes:
    return blake3(name.encode(), key=key).update(data).digest()


def _opened(key: bytes, name: str, sealed: bytes) -> bytes:
    view = memoryview(sealed)
    if not hmac.compare_digest(
        bytes(view[:DIGEST_BYTES]), _signature(key, name, view[DIGEST_BYTES:])
    ):
        raise BadPayload("damaged")
    return sealed[DIGEST_BYTES:]
