"""What admission asks of the CPU, counted: times differ from machine to machine, counts do not."""

import hashlib
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core import block_index, keys
from models import VOCAB_SIZE

SIZE, DOCUMENTS = 4, 6
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


class CountedHash:
    """SHA-256 that counts its digests."""

    def __init__(self, counts: Counter[str], given: Any) -> None:
        self.counts, self.hash = counts, given

    def copy(self) -> "CountedHash":
        return CountedHash(self.counts, self.hash.copy())

    def update(self, data: bytes) -> None:
        self.hash.update(data)

    def digest(self) -> bytes:
        self.counts["SHA-256"] += 1
        return self.hash.digest()


def engine_and_prompt(model: Path, num_tokens: int) -> tuple[Engine, list[int]]:
    """An engine that has read documents, and a prompt of them in another order, between new
    text."""
    random = np.random.default_rng(0)
    before, *documents, behind = np.array_split(
        random.integers(3, VOCAB_SIZE, num_tokens), DOCUMENTS + 2
    )
    engine = Engine(model, dtype="float32", block_size=SIZE, num_pages=4 * num_tokens // SIZE)
    engine.generate([Request(np.concatenate(documents).tolist(), "full", ONE_TOKEN)])
    return engine, np.concatenate([before, *documents[::-1], behind]).tolist()


def test_a_request_hashes_each_block_once_a_kind(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    engine, prompt = engine_and_prompt(model_dirs["llama"], 256)
    counts: Counter[str] = Counter()
    blocks_of, windows_of = block_index.block_hashes, block_index.window_hashes

    def block_hashes(blocks: np.ndarray, scope: bytes) -> np.ndarray:
        counts["inserted"] += len(blocks)
        return blocks_of(blocks, scope)

    def window_hashes(tokens: np.ndarray, size: int, scope: bytes) -> np.ndarray:
        counts["searched"] += len(tokens)
        return windows_of(tokens, size, scope)

    sha256 = SimpleNamespace(sha256=lambda data: CountedHash(counts, hashlib.sha256(data)))
    monkeypatch.setattr(keys, "hashlib", sha256)
    monkeypatch.setattr(block_index, "block_hashes", block_hashes)
    monkeypatch.setattr(block_index, "window_hashes", window_hashes)
    result = engine.generate([Request(prompt, "naive", ONE_TOKEN)])[0]
    assert result.report.grafted_tokens > 100
    assert counts["searched"] == len(prompt)
    assert 0 < counts["inserted"] <= len(prompt) // SIZE
    assert counts["SHA-256"] <= len(prompt) // SIZE + 1, "and the scope"


def test_admission_works_on_segments_not_on_blocks(model_dirs: dict[str, Path]):
    def num_calls(num_tokens: int) -> int:
        engine, prompt = engine_and_prompt(model_dirs["llama"], num_tokens)
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            calls[event] += 1

        sequence = engine._sequence(0, Request(prompt, "naive", ONE_TOKEN, remember=False))
        sys.setprofile(count)
        try:
            engine.memory.admit(sequence, idle=True)
        finally:
            sys.setprofile(None)
        assert len(sequence.provenance.steps) >= DOCUMENTS
        return calls["call"]

    short, long = 128, 480
    assert num_calls(long) < num_calls(short) + (long - short) // SIZE // 2
