"""Names and signatures for a place that others may access: names reveal nothing, and data is signed
with a common secret."""

import hmac
from dataclasses import replace

import msgspec
from blake3 import blake3

from kvgraft.core.chunk import ChunkRecord
from kvgraft.store.files import DIGEST_BYTES, BadPayload
from kvgraft.store.secret import derive


class Signer:
    """Names and signatures by keys that are derived from a secret of 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._data_key, self._record_key, self._name_key = (
            derive(secret, of) for of in ("data", "records", "names")
        )

    def name(self, record: ChunkRecord) -> str:
        """Return the name of a chunk in this form: two digests, the first one of its scope."""
        form = msgspec.json.encode((record.tensors, record.int8), order="deterministic")
        scope = blake3(record.chunk.scope, key=self._name_key).hexdigest()
        return f"{scope[:16]}/{blake3(record.key + form, key=self._name_key).hexdigest()}"

    def close(self, data: bytes, name: str) -> bytes:
        """Sign the data of the chunk with this name."""
        return _signature(self._data_key, name, data) + data

    def closed_bytes(self, num_bytes: int) -> int:
        """Size of `num_bytes` of data with its signature."""
        return DIGEST_BYTES + num_bytes

    def open(self, sealed: bytes, name: str) -> bytes:
        """Return the data that was signed for this name; BadPayload if the signature is wrong."""
        return _opened(self._data_key, name, sealed)

    def close_record(self, record: bytes) -> bytes:
        """Sign a record."""
        return _signature(self._record_key, "", record) + record

    def open_record(self, sealed: bytes) -> bytes:
        """Return a record from its signed form; BadPayload if the signature is wrong."""
        return _opened(self._record_key, "", sealed)


def without_source(record: ChunkRecord) -> ChunkRecord:
    """Return the record without namespace and source, so that it is equal for all servers that have
    read this text."""
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
