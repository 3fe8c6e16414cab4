"""Texts of the testbed, and copies of them edited so that it is known which tokens are still the
same."""

from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from kvgraft.engine.text import load_tokenizer
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.documents import Facts, make_documents

KINDS = ("replace", "insert", "delete", "move")
MOVED = 32  # tokens that move as one


@dataclass(frozen=True, eq=False)
class Edited:
    """A copy of a text; `origin` int64 [n] is where each token stood in it, -1 for new ones."""

    tokens: np.ndarray
    origin: np.ndarray


def texts(seed: int, count: int, num_tokens: int) -> list[np.ndarray]:
    """Documents of the testbed: facts among filler, all of the same few words; int32 [num_tokens]
    each."""
    tokenizer, number = _tokenizer(), 0
    found: list[np.ndarray] = []
    while len(found) < count:
        rng = Random(f"{seed} {number}")
        written = make_documents(
            rng, Facts(needle=8, variable=12), orders=[tuple(range(4))], num_tokens=6 * num_tokens
        )
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in written)
        found += [np.array(ids[:num_tokens], np.int32) for ids in encoded if len(ids) >= num_tokens]
        number += 1
    return found[:count]


def edit(tokens: np.ndarray, rate: float, kind: str, seed: int) -> Edited:
    """A copy with a share of its tokens replaced, deleted, or followed by another, or moved in
    pieces of 32."""
    rng, size = np.random.default_rng(seed), len(tokens)
    origin = np.arange(size)
    if kind == "move":
        for _ in range(max(1, round(rate * size / MOVED))):
            start, target = rng.integers(0, size - MOVED, 2)
            piece = slice(start, start + MOVED)
            origin = np.insert(np.delete(origin, piece), target, origin[piece])
    else:
        hit = rng.random(size) < rate
        counts = np.ones(size, np.int64) + hit * {"replace": 0, "insert": 1, "delete": -1}[kind]
        first = np.repeat(np.cumsum(counts) - counts, counts)
        new = np.repeat(hit, counts) & ((np.arange(counts.sum()) > first) | (kind == "replace"))
        origin = np.where(new, -1, np.repeat(origin, counts))
    words = rng.integers(8, _tokenizer().vocab_size, len(origin))
    return Edited(np.where(origin < 0, words, tokens[origin]).astype(np.int32), origin)


@cache
def _tokenizer():  # type: ignore[no-untyped-def]
    return load_tokenizer(MODEL_DIR)
