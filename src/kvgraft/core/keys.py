"""Content keys of token blocks: a rolling hash proposes where text occurs, chained SHA-256 names a
whole prefix.

A scope is the 32-byte digest of model identity and namespace (SparseX, section 4.3: the extra key).
It is the root of every key, so blocks of two namespaces never share one.
"""

import hashlib
from functools import cache

import numpy as np

SCOPE_BYTES = 32
# Number of cached powers of a base.
KEPT_POWERS = 1 << 16
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)


def scope_digest(model_identity: str, namespace: str) -> bytes:
    """Isolation root of every key: SHA-256 over the length-prefixed UTF-8 parts, 32 bytes."""
    parts = (model_identity.encode(), namespace.encode())
    return hashlib.sha256(
        b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    ).digest()


def check_scope(scope: bytes) -> None:
    """Raise ValueError unless scope has the length that `scope_digest` returns."""
    if len(scope) != SCOPE_BYTES:
        raise ValueError(
            f"scope has {len(scope)} bytes, expected the {SCOPE_BYTES} of scope_digest"
        )


def as_int32(name: str, values: np.ndarray) -> np.ndarray:
    """Return values as an int32 vector; ValueError unless they are one-dimensional integers in [0,
    2^31)."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions, expected 1")
    if array.size and (
        array.dtype.kind not in "iu" or array.min() < 0 or array.max() > np.iinfo(np.int32).max
    ):
        raise ValueError(
            f"{name} must be integers in [0, 2^31), got {array.dtype} with minimum {array.min()}"
        )
    return array.astype(np.int32, copy=False)


def window_hashes(tokens: np.ndarray, block_size: int, scope: bytes) -> np.ndarray:
    """Hash the window of block_size tokens at every offset: `sum_k mix(token_k) B^k mod 2^64`,
    mixed again.

    The hash does not depend on the offset. It only proposes candidates, since collisions can be
    constructed.

    Args:
        tokens: token ids, int [n], or the bytes of a text, uint8.

    Returns:
        uint64 [max(n - block_size + 1, 0)].
    """
    if len(tokens) < block_size:
        return np.empty(0, np.uint64)
    if tokens.dtype == np.uint8:
        mixed = _mix(np.arange(256, dtype=np.uint64) + _seed(scope))[tokens]
    else:
        mixed = _mix(tokens.astype(np.uint64) + _seed(scope))
    terms = mixed * _powers(_BASE, len(tokens))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms)))  # [n + 1]
    windows = sums[block_size:] - sums[:-block_size]
    return _mix(windows * _powers(_INVERSE, len(windows)))


def block_hashes(blocks: np.ndarray, scope: bytes) -> np.ndarray:
    """`window_hashes` of stacked blocks: int [m, block_size] -> uint64 [m]."""
    return _mix(_mix(blocks.astype(np.uint64) + _seed(scope)) @ _powers(_BASE, blocks.shape[1]))


def chain_hashes(tokens: np.ndarray, block_size: int, parent: bytes) -> list[bytes]:
    """Exact-prefix key of every full block: SHA-256 over the preceding key, or the scope
    (`parent`), and its tokens."""
    check_scope(parent)
    data, width = tokens.astype("<i4").tobytes(), 4 * block_size
    keys, begun = [], hashlib.sha256(b"chain")
    for at in range(0, len(data) - width + 1, width):
        key = begun.copy()
        key.update(parent + data[at : at + width])
        parent = key.digest()
        keys.append(parent)
    return keys


def _seed(scope: bytes) -> np.uint64:
    check_scope(scope)
    return np.frombuffer(scope, "<u8", count=1)[0]


def _powers(base: int, count: int) -> np.ndarray:
    return _first_powers(base)[:count] if count <= KEPT_POWERS else _made_powers(base, count)


@cache
def _first_powers(base: int) -> np.ndarray:
    powers = _made_powers(base, KEPT_POWERS)
    powers.flags.writeable = False
    return powers


def _made_powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words
