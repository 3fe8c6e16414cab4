import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.core.keys import as_int32, block_hashes, chain_hashes, scope_digest, window_hashes

SCOPE = scope_digest("model", "tenant")
OTHER_SCOPE = scope_digest("model", "other tenant")
tokens_lists = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def test_scope_parts_are_length_prefixed():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab"), ("ab", "ç")]
    scopes = {scope_digest(*pair) for pair in pairs}
    assert len(scopes) == len(pairs)
    assert {len(scope) for scope in scopes} == {32}


@settings(deadline=None, derandomize=True)
@given(tokens_lists, st.integers(1, 33))
def test_window_hashes_equal_block_hashes_of_every_window(tokens, block_size):
    tokens = np.array(tokens, np.int32)
    hashes = window_hashes(tokens, block_size, SCOPE)
    assert hashes.dtype == np.uint64
    assert len(hashes) == max(len(tokens) - block_size + 1, 0)
    if len(hashes):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, block_size)
        np.testing.assert_array_equal(hashes, block_hashes(windows, SCOPE))


def test_window_hashes_depend_on_tokens_order_and_scope():
    tokens = np.random.default_rng(0).integers(0, 150_000, 16)
    swapped, edited = tokens.copy(), tokens.copy()
    swapped[[3, 11]] = swapped[[11, 3]]
    edited[15] += 1
    variants = [(tokens, SCOPE), (swapped, SCOPE), (edited, SCOPE), (tokens, OTHER_SCOPE)]
    assert len({int(window_hashes(t, 16, scope)[0]) for t, scope in variants}) == 4


def test_window_hashes_spread_over_all_bits():
    hashes = window_hashes(np.arange(100_000, dtype=np.int32), 16, SCOPE)
    assert len(np.unique(hashes)) == len(hashes)
    # every part of the word fills 2^16 buckets as 100,000 random values would
    for shift in (0, 24, 48):
        occupied = len(np.unique((hashes >> np.uint64(shift)) & np.uint64(0xFFFF)))
        assert occupied == pytest.approx(65536 * (1 - np.exp(-len(hashes) / 65536)), rel=0.02)


def test_chain_hashes_identify_the_whole_prefix():
    tokens = np.arange(70, dtype=np.int32)
    keys = chain_hashes(tokens, 16, SCOPE)
    assert [len(key) for key in keys] == [32] * 4
    assert chain_hashes(tokens[:40], 16, SCOPE) == keys[:2]
    assert chain_hashes(tokens[32:], 16, keys[1]) == keys[2:]
    data = b"chain" + SCOPE + b"".join(token.to_bytes(4, "little") for token in range(16))
    assert keys[0] == hashlib.sha256(data).digest()
    edited = tokens.copy()
    edited[20] = 999
    edited_keys = chain_hashes(edited, 16, SCOPE)
    assert edited_keys[0] == keys[0]
    assert not set(edited_keys[1:]) & set(keys)
    assert not set(chain_hashes(tokens, 16, OTHER_SCOPE)) & set(keys)


@pytest.mark.parametrize(
    "keys_of",
    [
        lambda tokens, scope: window_hashes(tokens, 4, scope),
        lambda tokens, scope: block_hashes(tokens.reshape(-1, 4), scope),
        lambda tokens, scope: chain_hashes(tokens, 4, scope),
    ],
)
def test_scope_of_another_length_is_refused(keys_of):
    tokens = np.arange(8, dtype=np.int32)
    assert len(keys_of(tokens, SCOPE)) > 0
    with pytest.raises(ValueError, match="scope has 6 bytes"):
        keys_of(tokens, b"tenant")


@pytest.mark.parametrize("values", [[-1], [2**31], [1.0], [True], [[1, 2]]])
def test_as_int32_refuses(values):
    with pytest.raises(ValueError, match="tokens"):
        as_int32("tokens", np.array(values))


def test_as_int32_accepts_lists_and_nothing():
    assert as_int32("tokens", [0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
    assert as_int32("tokens", []).dtype == np.int32
