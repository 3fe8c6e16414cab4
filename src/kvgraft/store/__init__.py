"""Segment store: tiers below device memory that hold chunks of KV in host memory and on disk."""

from kvgraft.core.chunk import Chunk, ChunkRecord, StoredBlock, consecutive
from kvgraft.store.chunk_index import ChunkIndex
from kvgraft.store.maintenance import StoreDirectory
from kvgraft.store.options import StoreOptions
from kvgraft.store.store import SegmentStore

__all__ = [
    "Chunk",
    "ChunkIndex",
    "ChunkRecord",
    "SegmentStore",
    "StoreDirectory",
    "StoreOptions",
    "StoredBlock",
    "consecutive",
]
