"""Segment store: tiers below device memory that hold chunks of KV in host memory and on disk."""

from kvgraft.segments.store.chunk import Chunk, ChunkRecord, StoredBlock, consecutive
from kvgraft.segments.store.chunk_index import ChunkIndex
from kvgraft.segments.store.maintenance import StoreDirectory
from kvgraft.segments.store.options import StoreOptions
from kvgraft.segments.store.store import SegmentStore

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
