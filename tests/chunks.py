"""Chunks whose payload follows from their key, so that any process can tell whether it reads the
right one."""

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import torch

from kvgraft.core.chunk import ChunkRecord
from kvgraft.core.keys import chain_hashes, scope_digest
from kvgraft.store import Chunk, SegmentStore, StoreDirectory, files
from kvgraft.store.catalogue import Catalogue

SIZE = 4  # tokens of a block
SCOPE, OTHER_SCOPE = scope_digest("model", "tenant"), scope_digest("model", "other tenant")
SHAPES = {"keys": (2, 6), "values": (2, 6), "residual": (1, 10)}  # streams, d


def make_tokens(num_blocks, seed=0):
    return np.random.default_rng(seed).integers(0, 150_000, num_blocks * SIZE, dtype=np.int32)


def make_chunks(tokens, *, source, scope=SCOPE, chunk_blocks=4, namespace="tenant"):
    """A sequence, cut into chunks."""
    chains, chunks = chain_hashes(tokens, SIZE, scope), []
    for first in range(0, len(chains), chunk_blocks):
        part = tuple(chains[first : first + chunk_blocks])
        span = tokens[first * SIZE : (first + len(part)) * SIZE]
        chunks.append(Chunk(scope, namespace, part, span, source, first * SIZE))
    return chunks


def make_chunk(seed, *, scope=SCOPE, num_blocks=4):
    (chunk,) = make_chunks(
        make_tokens(num_blocks, seed), source=seed, scope=scope, chunk_blocks=num_blocks
    )
    return chunk


def make_payload(chunk, dtype=torch.float32):
    """Of every chunk another, whatever its source: [streams, tokens, d] each."""
    seed = int.from_bytes(hashlib.sha256(chunk.key).digest()[:7], "little")
    generator, count = torch.Generator().manual_seed(seed), len(chunk.tokens)
    return {
        name: torch.randn(s, count, d, generator=generator).to(dtype)
        for name, (s, d) in SHAPES.items()
    }


NBYTES = sum(tensor.nbytes for tensor in make_payload(make_chunk(0)).values())  # of four blocks
FILE = len(
    files.encode(
        ChunkRecord.of(make_chunk(0), make_payload(make_chunk(0)), int8=False),
        make_payload(make_chunk(0)),
    )
)
FILE += 16  # bytes, of longer source numbers


def put(store, *chunks, dtype=torch.float32):
    for chunk in chunks:
        assert store.put(chunk, make_payload(chunk, dtype))


def same(fetched, chunk, place, dtype=torch.float32):
    """Whether a fetched block is the chunk's at this place, to the last bit."""
    span = slice(place * SIZE, (place + 1) * SIZE)
    expected = make_payload(chunk, dtype)
    return (
        fetched.exact
        and fetched.payload.keys() == expected.keys()
        and all(torch.equal(fetched.payload[name], expected[name][:, span]) for name in expected)
        and all(fetched.payload[name].dtype == dtype for name in expected)
        and np.array_equal(fetched.tokens, chunk.tokens[span])
        and (fetched.chain, fetched.source) == (chunk.chains[place], chunk.source)
        and fetched.source_start == chunk.source_start + span.start
    )


def holds(store, chunk, dtype=torch.float32):
    """Whether the chunk is there, whole and to the last bit; it must not be there in part, nor
    wrongly."""
    fetched = store.fetch(store.prefix(chunk.chains, chunk.scope), chunk.scope)
    assert len(fetched) == chunk.num_blocks
    if all(block is None for block in fetched):
        return False
    assert all(
        block is not None and same(block, chunk, place, dtype)
        for place, block in enumerate(fetched)
    )
    return True


def file_of(directory, chunk):
    return files.PayloadFiles(Path(directory).resolve()).path(chunk.key)


# What follows runs in processes of its own.


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def put_many(directory, seeds, disk_bytes, moment, reports):
    """Put chunks until killed, or die as by kill -9 when a moment of the second file or of the
    first eviction comes."""
    limits = {"ram_bytes": 1 << 20, "disk_bytes": disk_bytes, "quota": 1.0}
    with SegmentStore(block_size=SIZE, directory=directory, **limits) as store:
        if moment is not None:
            put(store, make_chunk(seeds[0]))
            store.flush()
            die_at(moment)
        for seed in seeds:
            store.put(make_chunk(seed), make_payload(make_chunk(seed)))
            if moment is None:
                store.flush()
                reports.send(seed)


def die_at(moment):
    def half_written(path, data):
        path.write_bytes(data[: len(data) // 2])
        die()

    def before(owner, name):
        setattr(owner, name, die)

    def after(owner, name):
        original = getattr(owner, name)
        setattr(owner, name, lambda *given: (original(*given), die()))

    {
        "while the file is written": lambda: setattr(files, "write_file", half_written),
        "before the rename": lambda: before(files.PayloadFiles, "publish"),
        "before the commit": lambda: after(files.PayloadFiles, "publish"),
        "after the commit": lambda: after(Catalogue, "insert"),
        "while an evicted one is removed": lambda: after(files.PayloadFiles, "remove"),
        "after an evicted one was removed": lambda: after(Catalogue, "remove"),
    }[moment]()


def look(directory, reports):
    """Open a directory, tell how many chunks it has, and let it go."""
    with StoreDirectory(directory) as kept:
        reports.send(len(kept.list()))


def share(directory, mine, theirs, reports):
    """Put my chunks while another process puts its own, reading both; report what was read and what
    is wrong."""
    found, wrong = set(), 0
    with SegmentStore(
        block_size=SIZE, ram_bytes=0, directory=directory, disk_bytes=1 << 24, quota=1.0
    ) as store:
        for turn in range(3):
            for own, other in zip(mine, theirs, strict=True):
                store.put(make_chunk(own), make_payload(make_chunk(own)))
                for seed in (own, other):
                    try:
                        found |= {seed} if holds(store, make_chunk(seed)) else set()
                    except AssertionError:
                        wrong += 1
            store.flush()
            reports.send(turn)
            reports.recv()  # the other has come as far
        last = {seed for seed in {*mine, *theirs} if holds(store, make_chunk(seed))}
        reports.send((sorted(last), wrong, dict(store.counts)))
        reports.recv()
