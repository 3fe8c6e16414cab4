"""How documents are cut and kept."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.kv.documents import BlockCut, Document, DocumentStore

SCOPE = b"s" * 32


def make_document(num_tokens: int = 4) -> Document:
    """Of one layer and one head; 24 bytes of keys, values and outliers a token, and 40 more."""
    kv = torch.zeros(1, 1, num_tokens, 2)
    small = torch.zeros(1, 1)
    return Document(
        kv,
        kv.clone(),
        8,
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 2),
        small,
        small,
        torch.zeros(0),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_anchors"),
    [(1, 1), (100, 100), (193, 129), (520, 136), (1200, 176), (4096, 192), (90_000, 144)],
)
def test_blocks_have_the_size_that_was_asked_for(num_tokens: int, num_anchors: int):
    """SamKV's three of 64 tokens are a seventh of a passage of 1200; of the last block only what
    there is."""
    assert BlockCut(64, 1, 2).num_anchors(num_tokens) == num_anchors


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 3), st.integers(0, 3))
def test_anchors_and_middle_are_the_whole_document(
    num_tokens: int, size: int, initial: int, local: int
):
    blocks = BlockCut(size, initial, local)
    count = blocks.count(num_tokens)
    assert (count - 1) * size < num_tokens <= count * size
    assert len(blocks.middle(num_tokens)) == max(count - initial - local, 0)
    middle = blocks.middle_tokens(num_tokens)
    assert blocks.num_anchors(num_tokens) == num_tokens - len(middle)
    if middle:
        assert middle.start == initial * size
        assert num_tokens - middle.stop <= local * size


def test_the_store_forgets_what_was_used_least_recently():
    document = make_document()
    store = DocumentStore(2 * document.nbytes)
    texts = [np.array([number]) for number in range(3)]
    for text in texts[:2]:
        store.put(text, SCOPE, BlockCut(), document)
    assert store.get(texts[0], SCOPE, BlockCut()) is document
    store.put(texts[2], SCOPE, BlockCut(), document)
    assert [store.get(text, SCOPE, BlockCut()) is not None for text in texts] == [True, False, True]
    assert (len(store), store.nbytes) == (2, 2 * document.nbytes)
    store.put(texts[2], SCOPE, BlockCut(), document)  # again: it is counted once
    assert (len(store), store.nbytes) == (2, 2 * document.nbytes)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_what_is_larger_than_the_store_is_not_kept():
    store = DocumentStore(10)
    store.put(np.array([1]), SCOPE, BlockCut(), make_document())
    assert (len(store), store.nbytes) == (0, 0)
    with pytest.raises(ValueError, match="at least 0 bytes, got -1"):
        DocumentStore(-1)


def test_another_scope_or_cut_finds_nothing():
    store = DocumentStore(1000)
    store.put(np.array([1, 2]), SCOPE, BlockCut(), make_document())
    assert store.get(np.array([1, 2]), b"t" * 32, BlockCut()) is None
    assert store.get(np.array([1, 2]), SCOPE, BlockCut(32)) is None
    assert store.get(np.array([2, 1]), SCOPE, BlockCut()) is None
