"""Tiers below device memory: chunks of KV in host memory and on disk."""

from kvgraft.segments.store.chunk import Chunk, Record, StoredBlock, consecutive
from kvgraft.segments.store.maintenance import StoreDirectory
from kvgraft.segments.store.options import StoreOptions
from kvgraft.segments.store.register import Register
from kvgraft.segments.store.store import SegmentStore

__all__ = [
    "Chunk",
    "Record",
    "Register",
    "SegmentStore",
    "StoreDirectory",
    "StoreOptions",
    "StoredBlock",
    "consecutive",
]
